"""A training of one number that survives: each step all ranks add one to it, by a collective.

Arguments: steps, seconds a step. Prints a line per generation and one at the end.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from megatron_resilient.elastic import fenced_wait, graveyard, sockets
from megatron_resilient.elastic.member import Fenced, Member


class Trainer:
    def __init__(self, member, steps, seconds):
        self.member, self.steps, self.seconds = member, steps, seconds
        self.step = self.generation = 0
        fenced_wait.install(member.check, self.count)

    def count(self):
        self.member.progress += 1

    def state(self):
        return {
            "generation": self.generation,
            "step": self.step,
            "ready": False,
            "coordinate": None,
            "grid": [1, 1, 1],
        }

    def run(self):
        while True:
            world = self.member.next_world(self.state(), {"min_nodes": self.member.min_nodes})
            spare = sockets.tcp_inodes()
            self.member.on_fence = lambda spare=spare: sockets.cut_sockets(
                spare | self.member.spared_inodes()
            )
            try:
                self.begin(world)
                done = self.train(world)
            except Fenced as over:
                say(f"fenced: {over}")
                done = False
            except RuntimeError as error:
                self.member.leave_generation(str(error).splitlines()[0])
                done = False
            if done:
                self.member.finish(0)
                say(f"done at step {self.step} in generation {world.generation}")
                return
            sockets.cut_sockets(spare | self.member.spared_inodes())
            assert graveyard.retire(self.end, wait_seconds=10)

    def begin(self, world):
        store = dist.TCPStore(world.store_host, world.store_port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"generation {world.generation}", store),
            rank=world.rank,
            world_size=len(world.seats),
        )
        newest = torch.tensor(float(self.step))
        dist.all_reduce(newest, op=dist.ReduceOp.MAX)
        self.step, self.generation = int(newest), world.generation
        say(
            f"generation {world.generation} {world.cause} rank {world.rank} of "
            f"{len(world.seats)} at step {self.step} lost {','.join(world.lost_nodes)} "
            f"joined {','.join(world.joined_nodes)} planned {world.planned} final {world.final}"
        )

    def train(self, world):
        while self.step < self.steps and not world.final:
            told = torch.tensor([1.0, float(self.member.wants_boundary & 1)])
            dist.all_reduce(told)
            assert told[0] == len(world.seats)
            self.step += 1
            self.member.report(step=self.step)
            if told[1]:
                self.member.boundary(self.state())
                return False
            time.sleep(self.seconds)
        dist.barrier()
        return True

    def end(self):
        if dist.is_initialized():
            dist.destroy_process_group()


def say(text):
    print(text, flush=True)


if __name__ == "__main__":
    member = Member.from_environment()
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    Trainer(member, int(sys.argv[1]), float(sys.argv[2])).run()

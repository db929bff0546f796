"""One process's way through the generations of a job: leave a world, wait, join the next one."""

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args
from torch.distributed import distributed_c10d

from megatron_resilient import error_report, plugin
from megatron_resilient.comm.node_groups import NODE_MAP, join_node_map
from megatron_resilient.config import config_from_args
from megatron_resilient.elastic import fenced_groups, fenced_wait
from megatron_resilient.elastic.faults import FaultInjector, parse_faults
from megatron_resilient.elastic.graveyard import retire
from megatron_resilient.elastic.member import Fenced, Member, World
from megatron_resilient.elastic.sockets import cut_sockets, tcp_inodes
from megatron_resilient.errors import ResilientError
from megatron_resilient.mcore.checkpointing import run as checkpoints
from megatron_resilient.mcore.recovery import faults, hand_over, report
from megatron_resilient.mcore.recovery.arrays import Arrays
from megatron_resilient.mcore.recovery.live_state import LiveState, forget_error
from megatron_resilient.mcore.recovery.old_state import OldState
from megatron_resilient.mcore.recovery.signs import shows_a_failed_peer
from megatron_resilient.mcore.reset import reset_megatron

_session: "Session | None" = None


class Boundary(Exception):
    """The membership changes between two steps; everybody is alive and has handed over."""

    def __init__(self, leaving: set[str]) -> None:
        """Names the nodes that all agreed to let go."""
        super().__init__()
        self.leaving = leaving


def current() -> "Session | None":
    """Returns this process's session; None in a run without an agent."""
    return _session


class Session:
    """What survives a change of the world.

    Attributes:
        member: the process's place in the job.
        world: the current generation; None before the first.
        live: the state of the current generation; None until it is complete.
        old: the state of the generation before, until all ranks have the new one.
        clock: Unix times of the recovery in progress, by phase.
        changes: nodes that were lost and that joined since the last step, over all generations.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.world: World | None = None
        self.live: LiveState | None = None
        self.old: OldState | None = None
        self.model: list[torch.nn.Module] = []
        self.clock: dict[str, float] = {}
        self._rejoined: Any = None
        self.changes: tuple[list[str], list[str]] = ([], [])
        self._aborted = 0  # newest generation whose communicators were aborted
        self._older_sockets = tcp_inodes()
        member.on_fence = self._free_main_thread
        if plugin.on_cpu():
            fenced_wait.install(member.check, self._note_progress)
            fenced_groups.install(member.check)

    def run(self, main: Callable[[], Any]) -> None:
        """Calls `main` for each generation in which this process has a seat, until training ends.

        Raises:
            Whatever `main` raises that is no sign of a peer's failure.
        """
        global _session
        _session = self
        # Megatron's modules are there for good; collections after a recovery need not walk them.
        gc.collect()
        gc.freeze()
        while True:
            try:
                main()
            except SystemExit as stop:
                self.member.finish(
                    stop.code if isinstance(stop.code, int) else int(bool(stop.code))
                )
                raise
            except BaseException as error:
                if self._survives(error):
                    self._leave(error)
                    continue
                if isinstance(error, ResilientError):
                    # A defect of the job, not of this node: a new start would come to the same.
                    self.member.finish(error_report.exit_code(error), error)
                else:
                    self.member.leave_generation(_cause(error))
                raise
            else:
                self.member.finish(0)
                if dist.is_initialized():  # an interpreter that ends with gloo groups may abort
                    dist.destroy_process_group()
                return

    def join(self, grid: list[int], settings: dict[str, Any], fault_flag: str | None) -> World:
        """Waits for a seat in the next generation and takes it.

        Args:
            grid: sizes that stay: [tensor, context, pipeline].
            settings: must be equal in all processes.
            fault_flag: what `--resilient-fault` says.
        """
        wanted_faults = parse_faults(fault_flag)
        self.clock["ready"] = time.time()
        while True:
            self._older_sockets = tcp_inodes()
            generation = self.world.generation if self.world else 0
            kept = self.old.to_json() if self.old else {}
            state = {"generation": generation, "coordinate": None, **kept, "grid": grid}
            self.world = self.member.next_world(state, settings)
            self.changes[0].extend(self.world.lost_nodes)
            self.changes[1].extend(self.world.joined_nodes)
            self._settle_step()
            if self._is_given_what_donors_hold():
                break
        self.clock["formed"] = time.time()
        seat = self.world.seats[self.world.rank]
        newest = self.newest()
        done = newest["step"] if newest else self.world.newest_step or None
        faults.install(
            FaultInjector(
                wanted_faults,
                seat.node,
                seat.local_rank,
                self.world.times["formed"],
                self.member.cut_off,
                self.member.tell,
                done,
            )
        )
        faults.point("recovery")
        os.environ.update(
            RANK=str(self.world.rank),
            WORLD_SIZE=str(len(self.world.seats)),
            MASTER_ADDR=self.world.store_host,
            MASTER_PORT=str(self.world.store_port),
            # torch's rendezvous is then a client of the coordinator's store.
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        # Seats follow what processes hold, so that nodes need not have neighbouring ranks.
        os.environ[NODE_MAP] = join_node_map([each.node for each in self.world.seats])
        return self.world

    def begin(self, built: tuple[list[torch.nn.Module], Any, Any], rejoined: Any) -> None:
        """Starts a generation whose model is complete on this rank. Collective over all ranks.

        Args:
            built: what Megatron's setup_model_and_optimizer returned.
            rejoined: how it was filled from the generation before; None for a start.
        """
        live = LiveState(self.member, *built)
        if rejoined is not None:
            live.resume_from(rejoined)
        self._mirror(live, rejoined is None)
        self.live = live
        self.member.report(step=live.progress.step)
        # What was kept may be another rank's only source until all are complete.
        dist.barrier()
        self.old = None
        self.clock["filled"] = time.time()
        self._rejoined = rejoined

    def _mirror(self, live: LiveState, is_start: bool) -> None:
        """Keeps shards of the distributed optimizer twice, or says what a loss would cost."""
        options = get_args()
        if not options.use_distributed_optimizer:
            return
        assert self.world is not None
        nodes = [seat.node for seat in self.world.seats]
        if config_from_args(options).elastic.mirror:
            if live.mirror_shards(nodes):
                return
            why = "no rank on another node can guard them"
        else:
            why = "--no-resilient-mirror"
        if is_start and self.world.rank == 0:
            print(
                f"dense optimizer shards are kept once ({why}): the loss of a node sends the run "
                "back to its newest checkpoint",
                flush=True,
            )

    def newest(self) -> dict[str, Any] | None:
        """Returns what the rank that has come farthest said of itself; None if none has state.

        What a process held back while it stood by does not count once the job has gone on. (One
        step more than survivors have may have been told: by one that died right after the commit.)
        """
        assert self.world is not None
        states = [seat.state for seat in self.world.everybody if "step" in seat.state]
        best = max(states, key=lambda state: (state["step"], state["begun"]), default=None)
        is_stale = best is not None and best["step"] + 1 < self.world.newest_step
        return None if is_stale else best

    def tell_recovery(self, record: Any) -> None:
        """Writes the RecoveryReport when the first step of a generation is done."""
        if self._rejoined is not None:
            report.tell(self, self._rejoined, record)
            self._rejoined = None
        self.changes = ([], [])

    def _is_given_what_donors_hold(self) -> bool:
        """Takes over, before the world begins, what is held by processes without a seat in it.

        Returns:
            Whether this process has a seat; if not, it has given and stands by.
        """
        world = self.world
        assert world is not None
        if not world.donors:
            return True
        heritage = hand_over.from_donors(world, self.old.arrays() if self.old else Arrays())
        if self.old is not None:
            self.old.inherit(heritage)
            self.old.donated = world.rank >= len(world.seats)
        return world.rank < len(world.seats)

    def _settle_step(self) -> None:
        """Brings what this process kept to the newest step that any survivor has."""
        newest = self.newest()
        if newest is None:
            self.old = None
        if self.old is None or newest is None or self.old.progress.step == newest["step"]:
            return
        if self.old.donated:
            self.old = None  # the others went on while this process stood by
            return
        if self.old.ready is None or self.old.ready.step != newest["step"]:
            raise ResilientError(
                f"this process is at step {self.old.progress.step}, a peer at {newest['step']}, "
                "and the gradients between are not here: this is a defect, please report it"
            )
        self.old.complete_step()

    def _survives(self, error: BaseException) -> bool:
        if isinstance(error, Boundary) or shows_a_failed_peer(error):
            return True
        if isinstance(error, KeyboardInterrupt | ResilientError):
            return False
        return self.member.fenced  # cut sockets can surface as anything

    def _leave(self, error: BaseException) -> None:
        """Gets out of a generation with what is needed for the next one."""
        self.clock = {"left": time.time()}
        if not isinstance(error, Boundary | Fenced):
            self.member.leave_generation(_cause(error))
        forget_error(error)
        checkpoints.abandon()  # it copies from what is changed next
        if self.live is not None:
            self.live.finish_update()
            self.old, self.live = self.live.leave(), None
        if isinstance(error, Boundary):
            assert self.old is not None
            self.member.boundary(self.old.to_json(), error.leaving)
        # Whoever drops the last reference to a gloo group waits for its threads.
        groups = list(distributed_c10d._world.pg_map)
        reset_megatron(self.model)
        self.model = []
        retire(groups.clear)

    def _free_main_thread(self) -> None:
        """Ends the collectives of this process; called on the watchdog thread."""
        if plugin.on_cpu():
            cut_sockets(self._older_sockets | self.member.spared_inodes())
            return
        generation = self.world.generation if self.world else 0
        if self._aborted >= generation:  # this is called again until the main thread is out
            return
        self._aborted = generation
        device = torch.device("cuda", torch.cuda.current_device())
        for group in list(distributed_c10d._world.pg_map):
            group._get_backend(device).abort()

    def _note_progress(self) -> None:
        self.member.progress += 1


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]

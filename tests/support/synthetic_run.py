"""Writes the events of a run that never was: a stand-in for days of training on a cluster.

python -m tests.support.synthetic_run RUN_DIR [--steps N]
"""

import argparse
import os
from dataclasses import dataclass, field

import numpy as np

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.lanes import lane_records
from megatron_resilient.algorithms.layer_schedule import schedule_layers
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.telemetry import EventLog

START = 1_767_600_000.0  # 2026-01-05 08:00 UTC
TOKENS_A_STEP = 1_048_576


@dataclass
class SyntheticRun:
    """A run in which nodes fail and return, replicas move, and one job is killed and resumed.

    Attributes:
        log: Where it writes.
        steps: How many steps it does in the end.
        layers: MoE layers.
        experts: Logical experts a layer.
        nodes: Nodes at the start, of 8 ranks each.
    """

    log: EventLog
    steps: int
    layers: int
    experts: int
    nodes: int
    rng: np.random.Generator
    now: float = START
    members: list[str] = field(default_factory=list)
    imbalance: float = 1.0

    def write(self) -> None:
        """Writes all events."""
        every = max(1, self.steps // 12)
        self.names = [f"gpu-{index:02d}" for index in range(self.nodes)]
        self._popularity = self.rng.normal(0, 0.9, (self.layers, self.experts))
        failures = {round(self.steps * share) for share in (0.13, 0.31, 0.335, 0.66, 0.9)}
        returns = {round(self.steps * share) for share in (0.2, 0.45, 0.75)}
        killed_at = round(self.steps * 0.55)
        self._start(0)
        step, resumed = 1, False
        while step <= self.steps:
            if step in failures:
                failures.remove(step)
                self._fail(step)
            if step in returns and len(self.members) < self.nodes:
                returns.remove(step)
                self._join(step)
            if step == killed_at and not resumed:
                resumed = True
                self.log.emit(
                    "error",
                    step,
                    type="OSError",
                    message="[Errno 28] No space left on device: 'runs/<script>alert(1)</script>'",
                )
                self.now += 3 * 3600
                saved = step - 1 - (step - 1) % every
                self._start(saved)
                self.log.emit(
                    "checkpoint_loaded",
                    saved,
                    path=f"runs/moe/step-{saved:07d}",
                    seconds=41.0,
                    bytes=212_000_000_000,
                    lost_expert_tokens=1_800_000,
                )
                step = saved + 1
            self._step(step)
            if step % every == 0:
                self._save(step)
            if step % (every // 2 or 1) == 0:
                loss = self._loss(step) + 0.02
                self.log.emit("evaluation", step, loss={"lm loss": loss}, split="validation")
            step += 1
        self.log.emit("run_end", self.steps, exit=0)

    def _start(self, step: int) -> None:
        self.log.generation = 0
        for name in self.names:
            if name not in self.members:
                self.members.append(name)
                self.log.emit("member_join", member=name, members=len(self.members))
                self.now += 0.4
        self.now += 55
        self.log.emit(
            "run_start",
            step,
            world_size=8 * len(self.members),
            tp=1,
            pp=2,
            ep=32,
            dp=4 * len(self.members),
            num_experts=self.experts,
            layers=self.layers,
            device="NVIDIA H200",
            versions={"megatron-resilient": "0.1.0", "megatron-core": "0.19.2", "torch": "2.11.0"},
            patch_digest="9f1c7e2ab4d0",
            args={"hidden_size": 4096, "moe_router_topk": 2, "seq_length": 4096, "lr": 3e-4},
        )

    def _loss(self, step: int) -> float:
        return 1.9 + 9.0 / (1 + step / (0.004 * self.steps + 1)) ** 0.55

    def _step(self, step: int) -> None:
        seconds = 4.1 * self.nodes / len(self.members) * (0.8 + 0.2 * self.imbalance)
        seconds *= float(self.rng.lognormal(0, 0.02))
        self.now += seconds
        self.imbalance = min(1.6, self.imbalance + 1.2 / self.steps)
        skipped = bool(self.rng.random() < 0.0005)
        loss = float(self._loss(step) + self.rng.normal(0, 0.035))
        self.log.emit(
            "step",
            step,
            loss={
                "lm loss": float("nan") if skipped else loss,
                "load_balancing_loss": 1.05 + float(self.rng.random()) * 0.02,
            },
            seconds=seconds,
            tokens=TOKENS_A_STEP,
            tokens_per_second=TOKENS_A_STEP / seconds,
            grad_norm=float("inf") if skipped else 0.4 + float(self.rng.random()) * 0.1,
            learning_rate=3e-4,
            skipped=skipped,
        )
        interval = max(1, self.steps // 150)
        if step % interval == 0:
            self._expert_loads(step, interval)
        if step % max(1, self.steps // 8) == 0:
            before, self.imbalance = self.imbalance, 1.04
            self.now += 1.3
            for layer in range(1, self.layers + 1):
                slots = self.rng.permutation(np.arange(2 * self.experts) % self.experts)
                self.log.emit(
                    "placement",
                    step,
                    layer=layer,
                    slots=[own.tolist() for own in np.array_split(slots, 4)],
                )
            self.log.emit(
                "rebalance",
                step,
                seconds=1.3,
                bytes=9_600_000_000,
                imbalance_before=before,
                imbalance_after=self.imbalance,
            )

            self._schedules(step)

    def _schedules(self, step: int) -> None:
        """Plans two layers, and says that they took a little longer than planned."""
        profile = Profile(
            LinearCost(0.18, 8e-8),
            LinearCost(0.05, 7e-8),
            LinearCost(0.05, 7e-8),
            LinearCost(0.3, 1.5e-7),
            LinearCost(0.09, 1e-11),
        )
        work = [LayerWork(6e7, 6e7, 6e7, flops, 2**24, 2.5) for flops in (4e11, 1.2e12)]
        for layer, plan in enumerate(schedule_layers(profile, work, 8), start=1):
            for phase, own in (("forward", plan.forward), ("backward", plan.backward)):
                lanes = lane_records(plan.lanes(backward=phase == "backward"))
                longer = 1 + 0.03 * float(self.rng.random())
                self.log.emit(
                    "schedule",
                    step,
                    layer=layer,
                    phase=phase,
                    degree=own.degree,
                    order=own.order,
                    planned_seconds=own.predicted_ms / 1e3,
                    measured_seconds=longer * own.predicted_ms / 1e3,
                    planned=lanes,
                    measured={
                        stream: [[*op[:2], longer * op[2], longer * op[3]] for op in lane]
                        for stream, lane in lanes.items()
                    },
                )

    def _expert_loads(self, step: int, interval: int) -> None:
        self._popularity += self.rng.normal(0, 0.05, self._popularity.shape)
        self._popularity *= 0.995
        ranks = 8 * len(self.members) // 2
        for layer in range(self.layers):
            # The first layers route unevenly for longer, as they do in practice.
            sharpness = 0.5 + 0.9 * np.exp(-layer / 3)
            weights = np.exp(sharpness * self._popularity[layer])
            tokens = self.rng.multinomial(TOKENS_A_STEP * 2 * interval, weights / weights.sum())
            share = tokens.sum() // ranks
            worst = self.imbalance * (1 + 0.01 * float(self.rng.random()))
            rank_tokens = [int(share * worst)] + [int(share)] * (ranks - 1)
            self.log.emit(
                "expert_load",
                step,
                layer=layer + 1,
                tokens=tokens.tolist(),
                steps=interval,
                rank_tokens=rank_tokens,
            )

    def _fail(self, step: int) -> None:
        victim = self.members.pop(int(self.rng.integers(len(self.members))))
        self.now += 1.0
        self.log.emit("failure", step, cause="SIGKILL", failed_nodes=[victim])
        self.log.emit("member_leave", step, member=victim, members=len(self.members), planned=False)
        self._recover(step)

    def _join(self, step: int) -> None:
        for name in self.names:
            if name not in self.members:
                self.members.append(name)
                self.log.emit("member_join", step, member=name, members=len(self.members))
        self._recover(step)

    def _recover(self, step: int) -> None:
        self.log.generation += 1
        seconds = {
            name: float(mean * self.rng.lognormal(0, 0.35))
            for name, mean in [
                ("detect", 1.1),
                ("fence", 0.3),
                ("plan", 0.05),
                ("rebuild", 6.5),
                ("refill", 3.2),
                ("first_step", 7.0),
            ]
        }
        self.now += sum(seconds.values())
        self.log.emit(
            "recovery", step, seconds=seconds, world_size=8 * len(self.members), source="memory"
        )

    def _save(self, step: int) -> None:
        path = f"runs/moe/step-{step:07d}"
        self.log.emit("checkpoint_save_start", step, path=path, asynchronous=True)
        stall = float(self.rng.lognormal(-0.8, 0.4))
        self.now += stall
        self.log.emit(
            "checkpoint_saved",
            step,
            path=path,
            seconds=float(34 * self.rng.lognormal(0, 0.15)),
            stall_seconds=stall,
            bytes=212_000_000_000,
            asynchronous=True,
        )


def write_synthetic_run(
    run_dir: str | os.PathLike[str],
    *,
    steps: int = 6000,
    layers: int = 12,
    experts: int = 64,
    nodes: int = 8,
    seed: int = 0,
) -> None:
    """Writes `run_dir/events.jsonl`."""
    with EventLog(run_dir, rank=0, clock=lambda: run.now) as log:
        run = SyntheticRun(log, steps, layers, experts, nodes, np.random.default_rng(seed))
        run.write()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--steps", type=int, default=6000)
    args = parser.parse_args()
    write_synthetic_run(args.run_dir, steps=args.steps)

"""What one process knows about the run in progress, and what it writes into the run folder."""

import dataclasses
import os
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import get_args, get_tensorboard_writer
from megatron.training.async_utils import is_empty_async_queue
from megatron.training.global_vars import get_wandb_writer

from megatron_resilient import plugin
from megatron_resilient.config import ResilientConfig, config_from_args
from megatron_resilient.elastic.world import World
from megatron_resilient.mcore.expert_load import ExpertLoad
from megatron_resilient.patching import apply
from megatron_resilient.telemetry import EventLog, write_summary

if TYPE_CHECKING:
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
    from megatron_resilient.mcore.rebalance import Move

DEFAULT_RUN_DIR = "resilient_run"
_ARGUMENTS_OF_INTEREST = (
    "hidden_size",
    "moe_router_topk",
    "moe_token_dispatcher_type",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr",
    "seed",
    "load",
    "save",
)


def run_dir(config: ResilientConfig, args: Any) -> str:
    """Returns the folder of events.jsonl: the flag, else the --save folder, else a fixed name."""
    return config.telemetry.run_dir or args.save or DEFAULT_RUN_DIR


@dataclass
class RunRecord:
    """Writes the events of this process. One per process and training run.

    Attributes:
        replicated: the layers whose experts have replicas, on this rank.
        latest: what is known of the last step, for those who ask while training runs.
    """

    log: EventLog
    config: ResilientConfig
    load: ExpertLoad
    replicated: "list[ReplicatedMoELayer]" = field(default_factory=list)
    step: int = 0
    latest: dict[str, Any] = field(default_factory=dict)
    _load_counted_from: int = 0  # the last step before those that `load` holds
    _pending: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, model: list[torch.nn.Module], world: World | None) -> "RunRecord":
        """Opens the run folder and, on the last rank, writes `run_start` if a job begins.

        Args:
            model: the model chunks, whose routers are counted.
            world: the generation of an elastic run.
        """
        args = get_args()
        config = config_from_args(args)
        folder = run_dir(config, args)
        os.makedirs(folder, exist_ok=True)
        record = cls(
            log=EventLog(
                folder,
                rank=args.rank,
                generation=world.generation if world else 0,
                node=world.seats[world.rank].node if world else None,
            ),
            config=config,
            load=ExpertLoad(model if config.telemetry.expert_load_interval else []),
            step=args.iteration,
            _load_counted_from=args.iteration,
        )
        if record.speaks and (world is None or world.cause == "start"):
            record.write("run_start", **_facts(args))
        return record

    @property
    def speaks(self) -> bool:
        """The last rank has the loss, as in Megatron's log: it speaks for all."""
        return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event of this process at the current step."""
        self.log.emit(event, step=self.step, **fields)

    def after_step(
        self, seconds: float, result: tuple, learning_rate: float | None, replayed: bool = False
    ) -> None:
        """Records one `train_step`: its loss and speed, and now and then the expert loads.

        Args:
            seconds: that it took.
            result: what train_step returned.
            learning_rate: after it.
            replayed: it had committed in the generation before.
        """
        args = get_args()
        losses, skipped, grad_norm = result[0], result[1], result[5]
        self.step += 1
        tokens = get_current_running_global_batch_size() * args.seq_length
        self.latest["tokens_per_second"] = tokens / seconds
        self.latest |= {key.replace(" ", "_"): float(value) for key, value in losses.items()}
        if self.speaks:
            self.write(
                "step",
                loss={key: float(value) for key, value in losses.items()},
                seconds=seconds,
                tokens=tokens,
                tokens_per_second=tokens / seconds,
                grad_norm=None if grad_norm is None else float(grad_norm),
                learning_rate=learning_rate,
                skipped=bool(skipped),
                **({"replayed": True} if replayed else {}),
            )
        every = self.config.telemetry.expert_load_interval
        if every and self.step % every == 0:
            self._write_expert_load()

    def _write_expert_load(self) -> None:
        steps, self._load_counted_from = self.step - self._load_counted_from, self.step
        # All ranks of one pipeline stage hold the same layers.
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        loads = self.load.take(group)
        of_ranks = {layer.layer_number: layer.take_rank_tokens() for layer in self.replicated}
        if self.speaks_for_stage:
            for layer, tokens in loads.items():
                # With several expert-parallel domains: of this rank's.
                own = {"rank_tokens": of_ranks[layer]} if layer in of_ranks else {}
                self.write("expert_load", layer=layer, tokens=tokens, steps=steps, **own)
        if not self.speaks:
            return
        for layer, tokens in loads.items():
            mean = sum(tokens) / len(tokens)
            imbalance = max(tokens) / mean if mean else 1.0
            self.latest["imbalance"] = max(imbalance, self.latest.get("imbalance", 1.0))
            _plot(f"moe/load_imbalance_layer_{layer}", imbalance, self.step)

    @property
    def speaks_for_stage(self) -> bool:
        """The last rank of a pipeline stage speaks for the layers that it holds."""
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return torch.distributed.get_rank(group) == torch.distributed.get_world_size(group) - 1

    def placed(self) -> None:
        """Records where the experts are."""
        if self.speaks_for_stage:
            for layer in self.replicated:
                self.write("placement", layer=layer.layer_number, slots=layer.holding)

    def rebalanced(self, move: "Move") -> None:
        """Records that experts were moved."""
        self.placed()
        if self.speaks:
            self.write("rebalance", **dataclasses.asdict(move))
            _plot("moe/rebalance_imbalance_before", move.imbalance_before, self.step)
            _plot("moe/rebalance_imbalance_after", move.imbalance_after, self.step)

    def plot(self, name: str, value: float) -> None:
        """Draws one value at the current step in TensorBoard and W&B, where they are on."""
        _plot(name, value, self.step)

    def evaluated(self, losses: dict[str, torch.Tensor]) -> None:
        """Records the losses of an evaluation after the current step."""
        if self.speaks:
            self.write("evaluation", loss={key: float(value) for key, value in losses.items()})

    def save_started(self, iteration: int) -> None:
        """Records that a checkpoint save begins; from now on training stands still."""
        start = time.perf_counter()
        args = get_args()
        save = {
            "path": os.path.join(args.save, f"iter_{iteration:07d}"),
            "asynchronous": bool(args.async_save),
        }
        if self.speaks:
            self.write("checkpoint_save_start", **save)
        self._pending.append({**save, "start": start})

    def save_returned(self) -> None:
        """Records how long training stood still; a synchronous save is complete with it."""
        save = self._pending[-1]
        save["stall_seconds"] = time.perf_counter() - save["start"]
        self.saves_finalized()

    def saves_finalized(self) -> None:
        """Records the pending saves as complete if none is being written any more."""
        if not self._pending or not is_empty_async_queue():
            return
        for save in self._pending:
            start = save.pop("start")
            if self.speaks:
                self.write("checkpoint_saved", **save, seconds=time.perf_counter() - start)
        self._pending.clear()

    def loaded(self, seconds: float, **facts: Any) -> None:
        """Records the checkpoint from which this run goes on.

        Args:
            seconds: that it took.
            **facts: other fields of the event; with its path where that is not Megatron's own.
        """
        if self.speaks:
            if "path" not in facts:
                facts["path"] = os.path.join(get_args().load, f"iter_{self.step:07d}")
            self.write("checkpoint_loaded", seconds=seconds, **facts)

    def end(self, exit_code: int) -> None:
        """Writes `run_end` and the summary, on the last rank."""
        if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            self.write("run_end", exit=exit_code)
            write_summary(self.log.path.parent)
        self.log.close()


def _plot(name: str, value: float, step: int) -> None:
    writer = get_tensorboard_writer()
    if writer:
        writer.add_scalar(name, value, step)
    wandb = get_wandb_writer()
    if wandb:
        wandb.log({name: value}, step)


def _facts(args: Any) -> dict[str, Any]:
    return {
        "world_size": args.world_size,
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "ep": args.expert_model_parallel_size,
        "dp": args.data_parallel_size,
        "num_experts": args.num_experts or 0,
        "layers": args.num_layers,
        "device": "cpu" if plugin.on_cpu() else torch.cuda.get_device_name(),
        "versions": {
            name: version(name) for name in ("megatron-resilient", "megatron-core", "torch")
        },
        "patch_digest": apply.applied_digest(),
        "args": {name: getattr(args, name) for name in _ARGUMENTS_OF_INTEREST},
    }

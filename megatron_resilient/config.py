"""The configuration: frozen dataclasses, from which the `--resilient-*` flags are generated.

A field `run_dir` becomes the flag `--resilient-run-dir`; its help, choices and unit stand in the
field's metadata. What must hold inside one section is checked when the section is made.
"""

import argparse
from dataclasses import Field, dataclass, field, fields
from typing import Any

from megatron_resilient.errors import ConfigError

PREFIX = "resilient_"
DEVICES = ("auto", "cpu", "cuda")
GATES = ("megatron", "gshard", "sigmoid", "xmoe", "expert-choice", "soft")
WIRE_DTYPES = ("model", "bf16", "fp8")
OVERLAPS = ("off", "fixed", "auto")
OVERLAP_ORDERS = ("gather-first", "scatter-first", "largest-first")
DISPATCHES = ("direct", "1d", "2d")


def _flag(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # also NaN
        flag = "--" + (PREFIX + name).replace("_", "-")
        raise ConfigError(f"{flag} {value}: must be at least {least}")


@dataclass(frozen=True)
class DeviceConfig:
    """Where training runs."""

    device: str = _flag(
        "auto",
        "auto: the GPU if there is one, else the CPU with gloo. Read by enable(), before parsing.",
        DEVICES,
    )


@dataclass(frozen=True)
class ReplicaConfig:
    """Replicas of experts: how many, where, and when they are placed anew."""

    slots_per_rank: int = _flag(
        0,
        "expert slots on each expert-parallel rank; more slots than experts / EP are filled with "
        "replicas of hot experts; 0: stock, no replicas",
    )
    min_replicas: int = _flag(
        2, "replicas that every expert keeps on different nodes, as far as slots suffice"
    )
    ranks_per_node: int = _flag(
        0, "ranks that fail together; 0: those of one machine (LOCAL_WORLD_SIZE)"
    )
    rebalance_interval: int = _flag(
        200, "steps between two looks at the load and perhaps a new placement; 0: never"
    )
    load_window: int = _flag(
        0, "last steps before a look whose load counts; 0: all since the look before"
    )
    rebalance_threshold: float = _flag(
        0.05,
        "least predicted fall of max/mean tokens per rank for which experts are moved, if that "
        "also saves more time than it costs; 0: move at every look",
    )
    check_replicas_interval: int = _flag(
        0, "steps between two checks that replicas are bit-identical; 0: never"
    )
    max_expert_gib: float = _flag(
        0.0, "refuse to start if a rank's slots need more GiB (weights, gradients, moments); 0: any"
    )

    def __post_init__(self) -> None:
        for name in ("slots_per_rank", "ranks_per_node", "rebalance_interval", "load_window"):
            _at_least(name, getattr(self, name), 0)
        for name in ("rebalance_threshold", "check_replicas_interval", "max_expert_gib"):
            _at_least(name, getattr(self, name), 0)
        _at_least("min_replicas", self.min_replicas, 1)
        if self.load_window > self.rebalance_interval > 0:
            raise ConfigError(
                f"--resilient-load-window {self.load_window}: must not exceed "
                f"--resilient-rebalance-interval {self.rebalance_interval}"
            )


@dataclass(frozen=True)
class GateConfig:
    """How tokens come to experts: the gate, and the form in which they travel."""

    gate: str = _flag(
        "megatron",
        "how experts are chosen; megatron: its own router, untouched. See docs/gates.md",
        GATES,
    )
    gate_dimensions: int = _flag(
        0, "xmoe: dimensions in which tokens and experts are compared; 0: half the experts"
    )
    gate_temperature: float = _flag(
        0.3, "xmoe: what cosines are divided by at the start; it is learned from there"
    )
    gate_mixtures: int = _flag(
        0,
        "soft: mixtures of tokens (the paper's slots) per expert and sequence; 0: as many as "
        "--moe-router-topk would send it tokens",
    )
    allow_lookahead_gates: bool = _flag(
        False,
        "allow expert-choice and soft, by which what a token gets depends on later tokens: not "
        "for a language model that predicts the next token",
    )
    wire_dtype: str = _flag(
        "model",
        "form in which tokens travel between experts' ranks; model: as they are; bf16; fp8: e4m3 "
        "with a scale per token. Rounds tokens and their gradients; see docs/gates.md",
        WIRE_DTYPES,
    )

    def __post_init__(self) -> None:
        for name in ("gate_dimensions", "gate_mixtures"):
            _at_least(name, getattr(self, name), 0)
        _at_least("gate_temperature", self.gate_temperature, 0.01)


@dataclass(frozen=True)
class OverlapConfig:
    """Communication of MoE layers beside their computation, and the way that tokens take."""

    overlap: str = _flag(
        "off",
        "cut the tokens of MoE layers into chunks that travel while others are computed; fixed: "
        "into as many as --resilient-overlap-degrees says; auto: as planned from what operations "
        "take, measured at the start and while training. See docs/scheduling.md",
        OVERLAPS,
    )
    overlap_degrees: tuple[int, int] = _flag(
        (2, 2), "fixed: chunks of the forward and of the backward pass"
    )
    overlap_order: str = _flag(
        "gather-first",
        "fixed: order of the AllGathers and ReduceScatters of expert tensor parallelism",
        OVERLAP_ORDERS,
    )
    overlap_max_degree: int = _flag(8, "auto: most chunks of a pass")
    overlap_interval: int = _flag(
        100, "auto: steps between two looks at whether the plan still holds"
    )
    overlap_profiles: str | None = _flag(
        None,
        "auto: folder that keeps measured costs for later jobs on the same machines; without it "
        "each job measures them, which takes seconds",
    )
    dispatch: str = _flag(
        "direct",
        "way of tokens between experts' ranks; 1d, 2d: gathered inside each node, then sent "
        "between nodes, over one of its ranks or over all",
        DISPATCHES,
    )

    def __post_init__(self) -> None:
        forward, backward = self.overlap_degrees
        if forward < 1 or backward < 1:
            raise ConfigError(
                f"--resilient-overlap-degrees {forward} {backward}: each must be at least 1"
            )
        object.__setattr__(self, "overlap_degrees", (forward, backward))  # a parser's list
        _at_least("overlap_max_degree", self.overlap_max_degree, 1)
        _at_least("overlap_interval", self.overlap_interval, 1)


@dataclass(frozen=True)
class ElasticConfig:
    """How a run goes on without the nodes that it lost; read in elastic runs only."""

    min_nodes: int = _flag(0, "fewest nodes that train; 0: what the launcher says")
    require_exact: bool = _flag(
        False,
        "when an expert is lost with all its replicas, all go back to the newest checkpoint; "
        "otherwise only that expert does",
    )
    mirror: bool = _flag(
        True, "keep each dense shard of the distributed optimizer on a second node as well"
    )
    fault: str | None = _flag(
        None,
        'faults to inject, such as "kill node=1 step=12; hang node=2 step=20 phase=save"; see '
        "docs/elastic.md",
    )

    def __post_init__(self) -> None:
        _at_least("min_nodes", self.min_nodes, 0)


@dataclass(frozen=True)
class CheckpointConfig:
    """What --save writes and --load reads: Megatron's own format, or one file per expert."""

    checkpoint_format: str = _flag(
        "torch_dist",
        "torch_dist: Megatron's own; experts: a file per layer and expert, written beside "
        "training, verified, readable at any expert-parallel size. --load reads both",
        ("torch_dist", "experts"),
    )
    checkpoint_experts: int = _flag(
        0,
        "experts of each layer that a save writes (partial-experts checkpoints: the others are "
        "kept from earlier saves); 0: all, every time",
    )
    checkpoint_snapshot_experts: int = _flag(
        0,
        "experts of each layer that a partial save copies into host memory; 0: as many as cost no "
        "time, as measured",
    )
    checkpoint_exact: bool = _flag(
        False, "insist on all experts in every save, as is the default; excludes partial ones"
    )
    checkpoint_selection: str = _flag(
        "sequential",
        "which experts a partial save writes: in turn, or those with most unsaved tokens",
        ("sequential", "load-aware"),
    )
    checkpoint_masters: str = _flag(
        "selected",
        "whose fp32 weights a partial save writes: those of the selected experts, or of all "
        "(then only moments grow old)",
        ("selected", "all"),
    )
    checkpoint_lost_tokens: float = _flag(
        0.0375,
        "part of all routed tokens whose updates faults may cost; partial saves write more "
        "experts when more would be lost; 0: their number stays",
    )
    checkpoint_memory_gib: float = _flag(
        0.0, "host memory of a rank for saves on their way to storage; 0: what three saves need"
    )
    checkpoint_mtbf_seconds: float = _flag(
        0.0,
        "mean time between faults of the whole job: saves then come as often as pays by what they "
        "are measured to cost, and --save-interval is only the first; 0: --save-interval",
    )
    checkpoint_keep: int = _flag(2, "newest saves that are kept; 0: all")
    checkpoint_stall_seconds: float = _flag(
        60.0, "seconds without a byte written after which a save is given up"
    )

    def __post_init__(self) -> None:
        for name in (
            "experts",
            "snapshot_experts",
            "lost_tokens",
            "memory_gib",
            "mtbf_seconds",
            "keep",
        ):
            _at_least(f"checkpoint_{name}", getattr(self, f"checkpoint_{name}"), 0)
        _at_least("checkpoint_stall_seconds", self.checkpoint_stall_seconds, 1)


@dataclass(frozen=True)
class TelemetryConfig:
    """What a run writes about itself."""

    run_dir: str | None = _flag(
        None,
        "folder for events.jsonl and summary.json; default: the --save folder, without one "
        "./resilient_run",
    )
    expert_load_interval: int = _flag(
        10, "steps between two expert_load events (tokens per expert and layer); 0: none"
    )

    def __post_init__(self) -> None:
        _at_least("expert_load_interval", self.expert_load_interval, 0)


@dataclass(frozen=True)
class ResilientConfig:
    """All sections together."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    gates: GateConfig = field(default_factory=GateConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


SECTIONS: dict[str, type] = {
    "device": DeviceConfig,
    "replicas": ReplicaConfig,
    "gates": GateConfig,
    "overlap": OverlapConfig,
    "elastic": ElasticConfig,
    "checkpoint": CheckpointConfig,
    "telemetry": TelemetryConfig,
}


def flag_name(section_field: "Field[Any]") -> str:
    """Returns the command-line spelling of a field."""
    return "--" + (PREFIX + section_field.name).replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per field of every section to `parser`."""
    for name, section in SECTIONS.items():
        group = parser.add_argument_group(f"resilient: {name}", section.__doc__)
        for item in fields(section):
            is_bool = item.type is bool
            pair = {"nargs": 2} if item.type == tuple[int, int] else {}
            group.add_argument(
                flag_name(item),
                default=item.default,
                help=item.metadata["help"],
                **(
                    {"action": argparse.BooleanOptionalAction}
                    if is_bool
                    else {"type": _value_type(item), "choices": item.metadata["choices"], **pair}
                ),
            )


def config_from_args(args: argparse.Namespace) -> ResilientConfig:
    """Builds the configuration from parsed flags.

    Raises:
        ConfigError: two values do not go together, or one is out of range.
    """
    return ResilientConfig(
        **{
            name: section(**{f.name: getattr(args, PREFIX + f.name) for f in fields(section)})
            for name, section in SECTIONS.items()
        }
    )


def _value_type(item: "Field[Any]") -> type:
    if item.type == tuple[int, int]:
        return int
    for candidate in (int, float, str):
        if item.type is candidate or item.type == (candidate | None):
            return candidate
    raise TypeError(f"no flag type for field {item.name}: {item.type}")

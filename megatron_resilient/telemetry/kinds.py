"""The kinds of events and their fields: what a writer must give and a reader may rely on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_resilient.errors import TelemetryError
from megatron_resilient.telemetry.values import is_finite_number, is_number


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_int(v) and v >= 0 for v in value)


def _is_list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(type(v) is kind for v in value)


def _is_numbers_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _is_operations(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(lane, list) and all(map(_is_operation, lane)) for lane in value.values()
    )


def _is_operation(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    stage, chunk, start, end = value
    numbers = is_finite_number(start) and is_finite_number(end)
    return isinstance(stage, str) and _is_int(chunk) and numbers and start <= end


# How a field's type is written in the docs -> the check of a value that came from JSON.
TYPES: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "int or null": lambda value: value is None or _is_int(value),
    "finite number": is_finite_number,
    "number": is_number,
    "number or null": lambda value: value is None or is_number(value),
    "text": lambda value: isinstance(value, str),
    "text or int": lambda value: isinstance(value, str) or _is_int(value),
    "true or false": lambda value: isinstance(value, bool),
    "counts": _is_counts,
    "list of int": _is_list_of(int),
    "list of text": _is_list_of(str),
    "lists of int": lambda value: isinstance(value, list) and all(map(_is_list_of(int), value)),
    "stream -> operations": _is_operations,
    "name -> number": _is_numbers_by_name,
    "name -> value": lambda value: isinstance(value, dict),
}


@dataclass(frozen=True)
class Field:
    """One field of an event.

    Attributes:
        name: Key in the JSON object.
        type: Key of `TYPES`.
        meaning: What it says, with its unit.
        required: Whether every such event has it.
    """

    name: str
    type: str
    meaning: str
    required: bool = False


@dataclass(frozen=True)
class EventKind:
    """One kind of event.

    Attributes:
        name: Value of the field `event`.
        meaning: When it is written.
        fields: Its fields beside the common ones.
        needs_step: Whether its `step` may not be null.
    """

    name: str
    meaning: str
    fields: tuple[Field, ...]
    needs_step: bool = False


# Every event has these; they say when, where in training, and who wrote it.
COMMON = (
    Field("time", "finite number", "when, in seconds since 1970 (UTC)", required=True),
    Field("event", "text", "the kind", required=True),
    Field("step", "int or null", "the training step that it belongs to, from 1", required=True),
    Field("generation", "int", "how many times the set of members had changed", required=True),
    Field("rank", "int or null", "the writer's rank; null: the writer is no rank", required=True),
    Field("node", "text", "the writer's node"),
)

_KINDS = (
    EventKind(
        "run_start",
        "a job starts or resumes in this directory; written once a job",
        (
            Field("world_size", "int", "ranks", required=True),
            Field("tp", "int", "tensor-parallel size"),
            Field("pp", "int", "pipeline-parallel size"),
            Field("ep", "int", "expert-parallel size"),
            Field("dp", "int", "data-parallel size"),
            Field("num_experts", "int", "logical experts a layer"),
            Field("layers", "int", "layers of the model"),
            Field("device", "text", "the device, such as `cpu` or the name of a GPU"),
            Field("versions", "name -> value", "versions of the packages that matter"),
            Field("patch_digest", "text", "digest of the applied set of patches"),
            Field("args", "name -> value", "arguments of interest"),
        ),
    ),
    EventKind(
        "step",
        "a step is done: the optimizer has stepped; written by one rank",
        (
            Field("loss", "name -> number", "losses, such as `lm loss`", required=True),
            Field("seconds", "finite number", "wall-clock seconds of the step", required=True),
            Field("tokens", "int", "tokens that the whole job trained on", required=True),
            Field(
                "tokens_per_second", "finite number", "of the whole job; default tokens / seconds"
            ),
            Field("grad_norm", "number or null", "norm of the gradients before clipping"),
            Field("learning_rate", "number or null", "learning rate of the step"),
            Field("skipped", "true or false", "the update was left out (non-finite gradients)"),
            Field(
                "replayed",
                "true or false",
                "it had committed before a failure, and is told (again) by the next generation",
            ),
        ),
        needs_step=True,
    ),
    EventKind(
        "expert_load",
        "what the router did in one layer since the last such event of that layer",
        (
            Field("layer", "int", "layer, counted as in the model", required=True),
            Field("tokens", "counts", "tokens of each logical expert, E numbers", required=True),
            Field("steps", "int", "steps that the counts cover", required=True),
            Field("rank_tokens", "counts", "tokens that each rank of the domain computed"),
        ),
    ),
    EventKind(
        "checkpoint_save_start",
        "a save begins",
        (
            Field("path", "text", "where to", required=True),
            Field("asynchronous", "true or false", "training goes on meanwhile"),
        ),
    ),
    EventKind(
        "checkpoint_saved",
        "a save is complete: it can be loaded",
        (
            Field("path", "text", "where it is", required=True),
            Field(
                "seconds", "finite number", "from the start of the save to its end", required=True
            ),
            Field(
                "stall_seconds", "finite number", "how long training waited for it", required=True
            ),
            Field("bytes", "int", "bytes written by the whole job"),
            Field("asynchronous", "true or false", "training went on meanwhile"),
        ),
    ),
    EventKind(
        "checkpoint_failed",
        "a save was given up; the ones before it are as they were",
        (
            Field("path", "text", "where it was to be", required=True),
            Field("why", "text", "what happened, and on which rank", required=True),
        ),
    ),
    EventKind(
        "checkpoint_loaded",
        "state was read from storage",
        (
            Field("path", "text", "where from", required=True),
            Field("seconds", "finite number", "how long it took"),
            Field("bytes", "int", "bytes read by the whole job"),
            Field(
                "lost_expert_tokens",
                "int",
                "token-expert pairs whose updates are lost: their expert came from an older save",
            ),
            Field("lost_share", "finite number", "the same, of all pairs of the planned training"),
            Field(
                "replaced_experts",
                "lists of int",
                "[layer, expert, step, older step]: the version of that step was damaged",
            ),
        ),
    ),
    EventKind(
        "failure",
        "members are gone or hang",
        (
            Field("cause", "text", "what was seen, such as a signal or a lapsed heartbeat"),
            Field("failed_ranks", "list of int", "ranks, as they were numbered before"),
            Field("failed_nodes", "list of text", "nodes"),
        ),
    ),
    EventKind(
        "recovery",
        "training goes on after a failure, a departure or an arrival",
        (
            Field(
                "seconds",
                "name -> number",
                "seconds of each phase, one after the other: "
                "detect, fence, plan, rebuild, refill, first_step",
                required=True,
            ),
            Field("cause", "text", "`failure`, `leave`, `join`, ..."),
            Field("lost_nodes", "list of text", "members before that are none now"),
            Field("joined_nodes", "list of text", "the other way round"),
            Field("world_size", "int", "ranks from now on"),
            Field("source", "text", "where state came from: memory, snapshot, checkpoint"),
            Field("bytes", "int", "state that moved between ranks"),
            Field("experts_moved", "int", "experts that ranks got which they did not have"),
            Field("lost_steps", "int", "steps to be done again"),
            Field("lost_tokens", "int", "tokens of those"),
            Field(
                "lost_experts",
                "lists of int",
                "[layer, expert] whose newest state was on no live rank",
            ),
            Field(
                "lost_expert_tokens",
                "int",
                "token-expert pairs whose updates are lost: their expert came from an older save",
            ),
        ),
    ),
    EventKind(
        "member_join",
        "a node is a member from now on",
        (
            Field("member", "text", "the node", required=True),
            Field("members", "int", "how many there are now"),
        ),
    ),
    EventKind(
        "member_leave",
        "a node is a member no longer",
        (
            Field("member", "text", "the node", required=True),
            Field("members", "int", "how many there are now"),
            Field("planned", "true or false", "it had said so before"),
        ),
    ),
    EventKind(
        "straggler",
        "a node is alive but slow: the others wait for it; written when it is noticed",
        (
            Field("member", "text", "the node", required=True),
            Field("busy", "finite number", "its share of time outside collectives, 0 to 1"),
            Field("median_busy", "finite number", "the median of that share over the nodes"),
        ),
    ),
    EventKind(
        "placement",
        "where the experts of a layer are from now on",
        (
            Field("layer", "int", "layer, counted as in the model", required=True),
            Field("slots", "lists of int", "for each rank, its slots' experts", required=True),
        ),
    ),
    EventKind(
        "rebalance",
        "replicas were counted and placed anew",
        (
            Field("seconds", "finite number", "how long training waited for it"),
            Field("bytes", "int", "bytes of expert state moved"),
            Field("imbalance_before", "number", "max / mean tokens of a rank, old placement"),
            Field("imbalance_after", "number", "the same, new placement"),
        ),
    ),
    EventKind(
        "schedule",
        "how one pass of an MoE layer is cut into chunks, from now on or as it was measured",
        (
            Field("layer", "int", "layer, counted as in the model", required=True),
            Field("phase", "text", "`forward` or `backward`", required=True),
            Field("degree", "int", "chunks", required=True),
            Field(
                "planned_seconds", "finite number", "time of the pass, as planned", required=True
            ),
            Field("measured_seconds", "finite number", "as measured, the slowest rank's"),
            Field("order", "text", "order of the stream inside nodes"),
            Field("gradient_bytes", "int", "bytes of the gradient slice sent meanwhile"),
            Field(
                "planned",
                "stream -> operations",
                "for each stream its operations: [stage, chunk, start, end], in seconds",
                required=True,
            ),
            Field("measured", "stream -> operations", "the same, as one rank measured it"),
        ),
    ),
    EventKind(
        "evaluation",
        "the model was evaluated",
        (
            Field("loss", "name -> number", "losses", required=True),
            Field("split", "text", "`validation` or `test`"),
        ),
    ),
    EventKind(
        "error",
        "an error ends the writer or the run",
        (
            Field("message", "text", "what it said", required=True),
            Field("type", "text", "name of the exception"),
        ),
    ),
    EventKind(
        "run_end",
        "the job ends in an orderly way; after a kill there is none",
        (Field("exit", "text or int", "exit code, or one word why", required=True),),
    ),
)

KINDS: dict[str, EventKind] = {kind.name: kind for kind in _KINDS}


def check_event(record: Mapping[str, object]) -> None:
    """Checks the fields of one event, as JSON has them.

    Fields that the kind does not name are the writer's own, and pass. So do kinds that are not in
    `KINDS`: a later version wrote them.

    Raises:
        TelemetryError: A required field or step is missing, or a field has another type.
    """
    _check_fields(record, COMMON, "an event")
    kind = KINDS.get(str(record["event"]))
    if kind is not None:
        _check_fields(record, kind.fields, kind.name)
        if kind.needs_step and record["step"] is None:
            raise TelemetryError(f"{kind.name} needs the step that it belongs to, not null")


def _check_fields(record: Mapping[str, object], fields: tuple[Field, ...], what: str) -> None:
    for field in fields:
        if field.name not in record:
            if field.required:
                raise TelemetryError(f"{what} needs the field {field.name!r} ({field.meaning})")
        elif not TYPES[field.type](record[field.name]):
            raise TelemetryError(
                f"{what}: the field {field.name!r} must be {field.type} ({field.meaning}), "
                f"not {record[field.name]!r:.80}"
            )

"""The computed table of docs/scale.md; tests/unit/test_scale.py holds the page against it.

.venv/bin/python -m benchmarks.scale_page
"""

from collections.abc import Callable

from benchmarks import scale_model as model
from benchmarks.scale_model import Cluster

SIZES = (1000, 10_000)
GIB, TIB, MIB = 1 << 30, 1 << 40, 1 << 20


def lines() -> list[str]:
    """Returns the rows of the table, in Markdown."""
    rows: list[tuple[str, str, Callable[[Cluster], float]]] = [
        ("expert-parallel ranks of a stage", ",", lambda c: c.expert_ranks),
        ("slots of a rank and layer, for two replicas of each expert", ",", lambda c: c.slots),
        ("slots of a rank, GiB", ".2f", lambda c: model.expert_bytes(c) / GIB),
        ("dense state of a rank, GiB", ".2f", _dense(sharded=False, mirrored=False)),
        ("the same with the distributed optimizer", ".2f", _dense(sharded=True, mirrored=False)),
        ("and with its mirror", ".2f", _dense(sharded=True, mirrored=True)),
        (
            "counts gathered, a layer and microbatch, MiB",
            ".2f",
            lambda c: _mib(model.counts_bytes(c)),
        ),
        (
            "sums of replicas' gradients, sent by a rank in a step, GiB",
            ".2f",
            lambda c: model.replica_sum_bytes(c) / GIB,
        ),
        ("expert state held anew after 1 lost node, GiB", ".1f", _recovery(1)),
        ("after 8", ".1f", _recovery(8)),
        ("a full save, TiB", ".2f", lambda c: model.save_bytes() / TIB),
        ("a rank's share of it, GiB", ".3f", lambda c: model.save_bytes() / c.ranks / GIB),
        ("files of a full save, at least", ",", model.save_files),
        ("heartbeats to the coordinator, a second", ",.0f", model.beats_per_second),
        ("if every rank told every other one", ",.0f", model.mesh_beats_per_second),
        ("process groups that Megatron asks for, on each rank", ",", model.group_calls),
    ]
    return [
        f"| {name} | " + " | ".join(format(value(Cluster.of(n)), form) for n in SIZES) + " |"
        for name, form, value in rows
    ]


def _dense(*, sharded: bool, mirrored: bool) -> Callable[[Cluster], float]:
    return lambda c: model.dense_bytes(c, sharded=sharded, mirrored=mirrored) / GIB


def _recovery(lost: int) -> Callable[[Cluster], float]:
    return lambda c: model.recovery_bytes(c, lost)[0] / GIB


def _mib(size: int) -> float:
    return size / MIB


if __name__ == "__main__":
    print("\n".join(lines()))

"""What 100, 1,000 and 10,000 nodes of 8 GPUs would cost: measured here, computed, extrapolated.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/scale.py [--csv FILE]

Every number says how it came about:

measured      the code that training runs, at that size, on this machine: planning on made-up
              loads, the coordinator with a socket for each member, manifests, records, events
computed      by a formula of scale_model.py, from sizes or from a measured unit cost
extrapolated  by the line through the two sizes that were measured

docs/scale.md says what follows. Takes some minutes. The coordinator is measured at sizes that the
limit of open files allows. Ends with status 1 if counted process groups are not the formula's.
"""

import argparse
import csv
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import scale_model as model
from benchmarks.scale_coordinator import measure, take_over
from benchmarks.scale_groups import count_calls, gloo_groups, store_rate
from benchmarks.scale_model import Cluster
from benchmarks.scale_planning import TOKENS_PER_RANK, plan_stage, plan_state
from benchmarks.scale_storage import events_cost, manifest_cost, records_cost

SIZES = (100, 1000, 10_000)
MEASURED_STATE = (100, 1000)  # sizes at which the state of all ranks fits into one process here
MEASURED, COMPUTED, EXTRAPOLATED = "measured", "computed", "extrapolated"
console = Console(width=150, highlight=False)


@dataclass(frozen=True)
class Row:
    """A quantity at all sizes.

    Attributes:
        name: What it is.
        unit: Of its values.
        values: (value, how it came about), by size.
    """

    name: str
    unit: str
    values: tuple[tuple[float, str], ...]


def measured(name: str, unit: str, values: list[float]) -> Row:
    """Returns a row of values of the first sizes; the others on the line through the last two."""
    known = [(value, MEASURED) for value in values]
    last = len(values) - 1
    before, base = (SIZES[last - 1], SIZES[last]) if last else (0, SIZES[0])
    slope = (values[-1] - (values[-2] if last else 0.0)) / (base - before)
    more = [(values[-1] + slope * (n - base), EXTRAPOLATED) for n in SIZES[last + 1 :]]
    return Row(name, unit, (*known, *more))


def computed(name: str, unit: str, values: list[float]) -> Row:
    """Returns a row of computed values."""
    return Row(name, unit, tuple((value, COMPUTED) for value in values))


def sizes_of_state(clusters: list[Cluster]) -> list[Row]:
    """Returns what follows from sizes alone."""
    gib, mib = 1 << 30, 1 << 20
    both = (
        ("dense state of a rank", {"sharded": False, "mirrored": False}),
        ("  with the distributed optimizer", {"sharded": True, "mirrored": False}),
        ("  and its mirror", {"sharded": True, "mirrored": True}),
    )
    return [
        computed("expert-parallel ranks of a stage", "", [c.expert_ranks for c in clusters]),
        computed("slots of a rank", "", [c.slots for c in clusters]),
        computed("expert state of a rank", "GiB", [model.expert_bytes(c) / gib for c in clusters]),
        *(
            computed(name, "GiB", [model.dense_bytes(c, **how) / gib for c in clusters])
            for name, how in both
        ),
        computed(
            "count matrix of a layer and microbatch",
            "MiB",
            [model.counts_bytes(c) / mib for c in clusters],
        ),
        computed(
            "sums of replicas' gradients, sent by a rank in a step",
            "GiB",
            [model.replica_sum_bytes(c) / gib for c in clusters],
        ),
        *(
            computed(
                f"state to hold anew after {lost} lost node{'s' * (lost > 1)}",
                "GiB",
                [model.recovery_bytes(c, lost)[0] / gib for c in clusters],
            )
            for lost in (1, 8)
        ),
        computed("a full save", "TiB", [model.save_bytes() / (1 << 40) for _ in clusters]),
        computed(
            "heartbeats that reach the coordinator", "/s", [*map(model.beats_per_second, clusters)]
        ),
        computed(
            "  if every rank told every other", "/s", [*map(model.mesh_beats_per_second, clusters)]
        ),
    ]


def planning(clusters: list[Cluster]) -> list[Row]:
    """Measures planning of a stage at all sizes."""
    planned = [plan_stage(cluster) for cluster in clusters]
    rows = [
        measured(f"planning, a stage: {name}", "s", [each.seconds[name] for each in planned])
        for name in planned[0].seconds
    ]
    for name, shares in (
        ("tokens' copies that leave their node, local first", [p.remote_local for p in planned]),
        ("  shared evenly over replicas", [p.remote_even for p in planned]),
    ):
        rows.append(measured(name, "share", shares))
        volume = [model.dispatch_bytes(TOKENS_PER_RANK, share) / (1 << 20) for share in shares]
        rows.append(computed("  bytes of a rank, a layer and microbatch", "MiB", volume))
    rows.append(measured("max/mean tokens of a rank", "", [each.imbalance for each in planned]))
    return rows


def state(clusters: list[Cluster], folder: Path) -> list[Row]:
    """Measures plans over the state of all ranks, manifests, records and events."""
    told: dict[str, list[float]] = {}
    for cluster in clusters[: len(MEASURED_STATE)]:
        seconds, writes, packed_bytes = plan_state(cluster, sharded=True)
        for name, value in seconds.items():
            told.setdefault(name, []).append(value)
        told.setdefault("told bytes", []).append(packed_bytes)
        for name, value in manifest_cost(cluster, writes, folder).items():
            told.setdefault(f"manifest {name}", []).append(value)
    reading = [
        each * cluster.ranks
        for each, cluster in zip(told["reading what a rank holds"], clusters, strict=False)
    ]
    records = [records_cost(cluster.ranks, folder / str(cluster.nodes)) for cluster in clusters]
    events = [
        events_cost(cluster.expert_ranks, folder / f"run{cluster.nodes}") for cluster in clusters
    ]
    files = [(count, MEASURED) for count in told["manifest files"]]
    files += [(model.save_files(cluster), COMPUTED) for cluster in clusters[len(files) :]]
    return [
        measured("recovery: reading what all ranks hold, on each", "s", reading),
        measured("recovery: refill plan of the world", "s", told["refill plan"]),
        measured("save: write plan of the world", "s", told["write plan"]),
        Row("save: files", "", tuple(files)),
        measured("save: manifest", "MiB", [each / (1 << 20) for each in told["manifest bytes"]]),
        measured("save: manifest, to make", "s", told["manifest write"]),
        measured("save: manifest, to read and verify", "s", told["manifest read"]),
        measured("save: records, taken by rank 0", "s", [taken for _, taken in records]),
        measured("events of ten steps", "kB", [each["bytes"] / 1000 for each in events]),
        measured("  time of rank 0 for them", "s", [each["seconds"] for each in events]),
    ]


def coordinator(clusters: list[Cluster]) -> list[Row]:
    """Measures the coordinator at the sizes that this machine has sockets for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    possible = [c for c in clusters if c.nodes * (c.gpus + 1) + 500 < min(limit, 27_000)]
    costs = [measure(cluster.nodes, cluster.gpus) for cluster in possible]
    beats = [cost["beat"].cpu_seconds for cost in costs]
    load = [
        (each * model.beats_per_second(cluster), COMPUTED)
        for each, cluster in zip([*beats, *beats[-1:] * 3], clusters, strict=False)
    ]
    clock = [cost["idle"].cpu_seconds for cost in costs]
    names = (
        ("connect", "all connect"),
        ("start", "all are ready: first generation"),
        ("fence", "one says that it broke: all are fenced"),
        ("form", "all are ready again: next generation"),
        ("status", "status"),
    )
    rows = [
        Row("coordinator: a heartbeat", "us", tuple((1e6 * each, MEASURED) for each in beats)),
        Row("  all heartbeats, share of a core", "", tuple(load)),
        measured("coordinator: its clock, share of a core", "", clock),
    ]
    rows += [
        measured(f"coordinator: {text}", "s", [cost[name].seconds for cost in costs])
        for name, text in names
    ]
    back = [take_over(cluster.nodes, cluster.gpus) for cluster in possible]
    rows += [
        measured("coordinator: started anew, all are back", "s", back),
        measured("  a world, as it is sent to each", "kB", [c["form"].bytes / 1000 for c in costs]),
        measured("  its memory", "MB", [c["memory"].bytes / 1e6 for c in costs]),
    ]
    return rows


def groups(clusters: list[Cluster]) -> tuple[list[Row], bool]:
    """Counts process groups, and measures what one costs; tells whether the formula holds."""
    counted = [count_calls(c.ranks, c.stages)[0] for c in clusters[:2]]
    kept = counted == [model.group_calls(c) for c in clusters[:2]]
    costs = {ranks: gloo_groups(ranks) for ranks in (2, 4)}
    foreign = costs[4]["foreign"]
    calls = [
        *((count, MEASURED) for count in counted),
        (model.group_calls(clusters[2]), COMPUTED),
    ]
    seconds = [model.group_calls(cluster) * foreign for cluster in clusters]
    console.print(
        f"gloo: a group of 2 ranks {1e3 * costs[2]['member']:.1f} ms, of 4 "
        f"{1e3 * costs[4]['member']:.1f} ms; a call for a group of others {1e6 * foreign:.0f} us. "
        f"The store: {store_rate():,.0f} operations/s over 4 connections."
    )
    return [
        Row("process groups that Megatron asks for, on each rank", "", tuple(calls)),
        computed("  time of a rank for those that it is not in", "s", seconds),
    ], kept


def show(rows: list[Row]) -> None:
    """Prints the table."""
    table = Table(
        title="nodes of 8 GPUs; 16 pipeline stages; m measured, c computed, x extrapolated"
    )
    table.add_column("quantity")
    table.add_column("unit")
    for nodes in SIZES:
        table.add_column(f"{nodes:,}", justify="right")
    marks = {MEASURED: "m", COMPUTED: "c", EXTRAPOLATED: "x"}
    for row in rows:
        cells = [f"{value:,.4g} {marks[how]}" for value, how in row.values]
        table.add_row(row.name, row.unit, *cells)
    console.print(table)


def main() -> int:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=Path("scale.csv"), help="default: %(default)s")
    args = parser.parse_args()
    clusters = [Cluster.of(nodes) for nodes in SIZES]
    rows = sizes_of_state(clusters)
    with tempfile.TemporaryDirectory() as folder:
        rows += planning(clusters)
        rows += state(clusters, Path(folder))
    asked, kept = groups(clusters)
    rows += asked + coordinator(clusters)
    show(rows)
    with args.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["quantity", "unit", "nodes", "value", "how"])
        for row in rows:
            for nodes, (value, how) in zip(SIZES, row.values, strict=False):
                writer.writerow([row.name.strip(), row.unit, nodes, f"{value:.6g}", how])
    if not kept:
        console.print("[red]Process groups are not those of scale_model.group_calls.[/]")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

"""FSMoE, section 5: where gradients are sent, and by how much they prolong a backward pass.

On the layers of table 2, with as many tokens as there and as in figure 6: all after the backward
pass; in buckets of 30 MB, as Lina; in the room that costs nothing alone (the paper's first step);
with what is left distributed by differential evolution (its second step); and by the dynamic
programming of this project.

    .venv/bin/python tools/reproduce/fsmoe_gradients.py

Writes fsmoe_gradients.csv and .png into --out, and prints what each exposes.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import differential_evolution

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.algorithms.cost_model import LinearCost
from megatron_resilient.algorithms.gradient_partition import (
    AFTER_ALL,
    Partition,
    Window,
    fill_free_room,
    partition_gradients,
    partition_of,
)
from megatron_resilient.algorithms.pipelining import phase_options
from megatron_resilient.algorithms.stream_model import ORDERS
from megatron_resilient.simulation.overlap import MAX_DEGREE, TESTBED_A, TESTBED_B
from tools.reproduce.figure import Compared, Figure, flags, plot_bars, publish, write_csv
from tools.reproduce.fsmoe_setup import BATCH, GPT2_XL, MIXTRAL_7B, TOKENS, Layer, table_layer
from tools.reproduce.fsmoe_systems import LINA_BYTES, backward_row, costs_of, in_buckets

CASES = (
    (TESTBED_A, GPT2_XL, BATCH * TOKENS),
    (TESTBED_A, MIXTRAL_7B, BATCH * TOKENS),
    (TESTBED_B, MIXTRAL_7B, BATCH * TOKENS),
    (TESTBED_A, GPT2_XL, 1024),
    (TESTBED_A, MIXTRAL_7B, 1024),
    (TESTBED_B, GPT2_XL, 256),
)
LAYERS = 12  # as many as differential evolution can search
GENERATIONS = 300
END, BUCKETS, FIRST = "after all", "30 MB buckets", "step 1"
EVOLVED, OURS = "differential evolution", "ours"
NOTES = (
    "Windows are those of the paper's schedule: the MoE layer's backward pass with the degree of "
    "its choice, and the attention's. Where free room takes all but the first layer's gradients, "
    "step 1 and ours are the same; the paper gives no number.",
    "Buckets are of one layer, and sent whole where the link is free, whether they fit or not.",
    "Differential evolution: population 15 a variable, at most 300 generations, seeded; a variable "
    "is the share of what waits that an MoE layer sends, so that nothing is sent before it is "
    "there. It is not the same on every rank unless the seed and the library are.",
)

FloatArray = npt.NDArray[np.float64]


def evolved(
    windows: Sequence[Window], made: Sequence[int], allreduce: LinearCost, seed: int = 0
) -> Partition:
    """Fills free room, then distributes what is left over MoE windows by differential evolution."""
    base, _ = fill_free_room(windows, made, allreduce)
    moe = range(0, len(windows), 2)

    def slices(shares: FloatArray) -> FloatArray:
        """Returns bytes of every window, [windows, S], of shares, [MoE windows, S]."""
        waiting = np.zeros(shares.shape[1])
        sent = np.repeat(np.array(base, dtype=float)[:, None], shares.shape[1], axis=1)
        # What later windows send in step 1 must still be there for them.
        made_so_far = np.concatenate([[0], np.cumsum(made)])[:-1]
        slack = made_so_far - np.cumsum(base)
        spare = np.minimum.accumulate(slack[::-1])[::-1]
        for number, index in enumerate(moe):
            more = np.floor(shares[number] * np.maximum(0.0, spare[index] - waiting))
            sent[index] += more
            waiting = waiting + more
        return sent

    def times(sizes: FloatArray) -> FloatArray:
        return np.where(sizes > 0, allreduce.alpha_ms + allreduce.beta * sizes, 0.0)

    def exposed(shares: FloatArray) -> FloatArray:
        table = shares if shares.ndim == 2 else shares[:, None]
        sent = slices(table)
        total = AFTER_ALL.exposed_ms(times(sum(made) - sent.sum(axis=0)))
        for window, sizes in zip(windows, sent, strict=True):
            total = total + window.exposed_ms(times(sizes))
        return total if shares.ndim == 2 else total[0]

    found = differential_evolution(
        exposed,
        [(0.0, 1.0)] * len(moe),
        maxiter=GENERATIONS,
        tol=1e-6,
        popsize=15,
        rng=seed,
        polish=False,
        vectorized=True,
        updating="deferred",
    )
    best = slices(found.x[:, None])[:, 0]
    return partition_of(windows, [int(own) for own in best], made, allreduce)


def ways(layer: Layer) -> dict[str, tuple[Partition, float]]:
    """Returns every distribution, and the CPU seconds that it took."""
    _, backward = costs_of(layer)
    options = phase_options([backward], MAX_DEGREE, orders=ORDERS[:1])[0]
    window = Window.of_moe(options)
    row, made = backward_row(window, layer, LAYERS)
    fixed, _ = backward_row(window.best_way(0.0), layer, LAYERS)
    cost = layer.profile.allreduce
    kinds = {
        # One AllReduce a layer, not one of all.
        END: lambda: partition_of(
            [AFTER_ALL] * LAYERS, [layer.work.gradient_bytes] * LAYERS, made[1::2], cost
        ),
        BUCKETS: lambda: in_buckets(fixed, made, cost, LINA_BYTES),
        FIRST: lambda: partition_of(row, fill_free_room(row, made, cost)[0], made, cost),
        EVOLVED: lambda: evolved(row, made, cost),
        OURS: lambda: partition_gradients(row, made, cost),
    }
    found = {}
    for name, make in kinds.items():
        begin = time.process_time()
        partition = make()
        found[name] = (partition, time.process_time() - begin)
    return found


def main() -> int:
    """Makes the figure."""
    args = flags(__doc__ or "").parse_args()
    table, rows = [], []
    panels: dict[str, dict[str, dict[str, float]]] = {}
    seconds: dict[str, float] = {EVOLVED: 0.0, OURS: 0.0}
    for testbed, shape, tokens in CASES:
        found = ways(table_layer(testbed, shape, tokens))
        name = f"{shape.name} on {testbed.name}, {tokens} tokens"
        for way, (partition, took) in found.items():
            exposed = sum(partition.exposed_ms)
            table.append(Compared(f"{name}: exposed, ms, {way}", None, exposed, "computed"))
            rows.append((testbed.name, shape.name, tokens, way, exposed, took))
            panel = f"tokens of {'table 2' if tokens == BATCH * TOKENS else 'figure 6'}"
            bars = panels.setdefault(panel, {}).setdefault(way, {})
            bars[f"{shape.name}\non {testbed.name}"] = exposed
            if way in seconds:
                seconds[way] += took / len(CASES)
    table += [
        Compared(f"CPU ms of {way}, {LAYERS} layers", None, 1e3 * own, "measured")
        for way, own in seconds.items()
    ]
    write_csv(
        args.out / "fsmoe_gradients.csv",
        ("testbed", "model", "tokens", "way", "exposed_ms", "cpu_seconds"),
        rows,
    )
    plot_bars(args.out / "fsmoe_gradients.png", panels, "exposed, ms", "computed")
    publish(
        args.out,
        Figure(
            "fsmoe_gradients",
            "Section 5: gradients in slices",
            f"By how much the gradients of {LAYERS} layers prolong the backward pass, from the "
            "times of table 2.",
            tuple(table),
            NOTES,
            ("fsmoe_gradients.png",),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

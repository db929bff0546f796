"""FSMoE, section 6.5, table 6: what the four gates cost, against each other.

measured: this project's gates in one MoE layer of Megatron on one CPU core, GPT2-XL's size with a
fourth of each expert, as a rank of testbed B has it. The paper's are steps of all of GPT2-XL on
that testbed: another machine, and much that is no gate. Only ratios to GShard's gate are compared.

    .venv/bin/python tools/reproduce/fsmoe_gates.py

Writes fsmoe_gates.csv and .png into --out, and prints the paper's ratios beside ours.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.pretrain_pool import PretrainPool
from tools.reproduce.figure import Compared, Figure, flags, plot_bars, publish, write_csv
from tools.reproduce.fsmoe_gate_layers import medians
from tools.reproduce.fsmoe_setup import GPT2_XL

# Step of DeepSpeed-MoE and of FSMoE, ms; names are those of --resilient-gate.
PAPER_MS = {
    "gshard": (968.1, 707.7),
    "xmoe": (1064.0, 746.9),
    "sigmoid": (986.6, 721.0),
    "expert-choice": (909.9, 685.5),
}
SIZES = {"hidden": GPT2_XL.hidden, "ffn": GPT2_XL.ffn // 4, "experts": 8, "tokens": 256}
ROUNDS = 8
TIMEOUT_SECONDS = 120.0
WHY = "One layer on one CPU core, where experts are nearly all there is, against steps of a model."
NOTES = (
    "CPU time, forward and backward; medians over rounds of the ratio to GShard's gate in the same "
    "round; who runs first changes. Nothing is dropped for capacity. With the gate's share of a "
    "layer as small as here, ratios of layers that differ by a few percent are noise.",
    "FSMoE over DeepSpeed-MoE (1.37, 1.42, 1.37 and 1.33 in table 6) needs both systems on GPUs; "
    "that of GShard's gate is simulated in the section on real models.",
)


def main() -> int:
    """Makes the figure."""
    args = flags(__doc__ or "").parse_args()
    with PretrainPool(1) as pool:
        told = pool.call(
            "tools.reproduce.fsmoe_gate_layers:times",
            timeout_seconds=TIMEOUT_SECONDS,
            gates=list(PAPER_MS),
            rounds=ROUNDS,
            **SIZES,
        )[0]
    layer, alone = (medians(told, name, "gshard") for name in ("layer", "gate"))
    paper = {
        system: {gate: own[place] / PAPER_MS["gshard"][place] for gate, own in PAPER_MS.items()}
        for place, system in enumerate(("DeepSpeed-MoE", "FSMoE"))
    }
    table = [
        Compared(
            f"{gate} over gshard: step in FSMoE (paper), layer (ours)",
            paper["FSMoE"][gate],
            layer[gate],
            "measured",
            WHY,
        )
        for gate in PAPER_MS
        if gate != "gshard"
    ]
    table += [
        Compared(f"{gate} over gshard: the gate alone", None, alone[gate], "measured")
        for gate in PAPER_MS
        if gate != "gshard"
    ]
    share = sum(told["gshard"]["gate"]) / sum(told["gshard"]["layer"])
    table.append(Compared("gshard: the gate's share of the layer", None, share, "measured"))
    write_csv(
        args.out / "fsmoe_gates.csv",
        ("gate", "part", "round", "cpu_ms"),
        [
            (gate, part, number, value)
            for gate, parts in told.items()
            for part, values in parts.items()
            for number, value in enumerate(values)
        ],
    )
    bars = {f"paper, {system}": own for system, own in paper.items()}
    plot_bars(
        args.out / "fsmoe_gates.png",
        {"time over GShard's gate": {**bars, "ours": layer}},
        "ratio",
        "measured",
    )
    publish(
        args.out,
        Figure(
            "fsmoe_gates",
            "Table 6: four gates",
            "What a layer takes with each of our gates, as a multiple of GShard's, measured on one "
            "CPU core, beside the paper's steps on GPUs.",
            tuple(table),
            NOTES,
            ("fsmoe_gates.png",),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

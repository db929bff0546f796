"""MoC-System, section 6.2: from how many GPUs on F&B hides a snapshot, simulated in the paper.

Computed here, without a network simulator: F&B is the matrix products at a fifth of the GPU's peak,
and an all-to-all that grows with the number of GPUs. How fast it grows is calibrated, by where the
paper's Base-Async is hidden (1024 A800s), so that number is no result; where MoC-Async is hidden is
one. Snapshots are bytes of the rank with most over the paper's bandwidth.

Given: hidden size 2048, FFN 4 times that, 24 layers, one expert a GPU and layer, 1/8 of experts
saved. Not given, assumed: 8192 tokens a GPU, one expert a token, LLaMA's three matrices in an FFN,
32000 words.

    .venv/bin/python tools/reproduce/moc_scaling.py
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.algorithms.checkpoint_tuning import snapshot_size
from megatron_resilient.algorithms.expert_selection import Selection, select
from tools.reproduce.figure import Compared, Figure, flags, plot_lines, publish, write_csv

HIDDEN, LAYERS, VOCABULARY, TOKENS = 2048, 24, 32_000, 8192
EXPERT = 3 * HIDDEN * 4 * HIDDEN  # parameters
DENSE = LAYERS * 4 * HIDDEN**2 + 2 * VOCABULARY * HIDDEN
WEIGHT_BYTES, OPTIMIZER_BYTES = 2, 12
STATE_BYTES = WEIGHT_BYTES + OPTIMIZER_BYTES
PART = 8
BASE_HIDDEN, MOC_HIDDEN = 1024, 64
GPUS = [2**power for power in range(3, 12)]


@dataclass(frozen=True)
class Gpu:
    """A GPU of the paper's simulation: its peak, of which a fifth is reached, and its D2H."""

    name: str
    flops: float
    bytes_per_second: float

    def products_seconds(self, tokens: int = TOKENS) -> float:
        """Returns how long the matrix products of a forward and backward pass take."""
        return 6 * (DENSE + LAYERS * EXPERT) * tokens / (0.2 * self.flops)


A800 = Gpu("A800", 312e12, 1e9)
H100 = Gpu("H100", 989e12, 2e9)


def base_bytes(gpus: int) -> float:
    """Returns bytes of rank 0, which writes all dense weights, in a full save."""
    return DENSE * (WEIGHT_BYTES + OPTIMIZER_BYTES / gpus) + LAYERS * EXPERT * STATE_BYTES


def moc_bytes(gpus: int, most: float) -> float:
    """Returns bytes of the rank with most if that is one with so many experts (all layers)."""
    shard = DENSE * OPTIMIZER_BYTES / gpus
    mean = DENSE * STATE_BYTES / gpus + LAYERS * EXPERT * STATE_BYTES / PART
    return max(mean, shard + most * EXPERT * STATE_BYTES)


def most_experts(chosen: Selection) -> int:
    """Returns experts of the rank with most; expert e of every layer is on rank e."""
    return max(Counter(expert for own in chosen for expert in own).values())


def in_turn(gpus: int) -> int:
    """Returns the same for saves in turn, the most of a rotation."""
    k = max(1, gpus // PART)
    saves = range(-(-gpus // k))
    return max(most_experts(select("sequential", save, LAYERS, gpus, k)) for save in saves)


def neighbours(gpus: int) -> int:
    """Returns the same if a save takes K neighbours, of every layer one further on."""
    k = max(1, gpus // PART)
    return most_experts([tuple((layer + j) % gpus for j in range(k)) for layer in range(LAYERS)])


def exchange_seconds_per_gpu(tokens: int = TOKENS) -> float:
    """Returns what every GPU more adds to F&B, calibrated: 1024 A800s just hide a full save."""
    hidden = base_bytes(BASE_HIDDEN) / A800.bytes_per_second
    return (hidden - A800.products_seconds(tokens)) / BASE_HIDDEN


def f_and_b(gpu: Gpu, gpus: int, tokens: int = TOKENS) -> float:
    """Returns the seconds of a forward and backward pass."""
    return gpu.products_seconds(tokens) + exchange_seconds_per_gpu(tokens) * gpus


def hidden_from(gpu: Gpu, is_partial: bool, tokens: int = TOKENS) -> int:
    """Returns the least number of GPUs, a power of two, that hides a snapshot.

    Args:
        gpu: which.
        is_partial: the saves have a part of the experts, in turn; else they are Base-Async's.
        tokens: of a GPU.
    """
    for gpus in GPUS:
        size = moc_bytes(gpus, in_turn(gpus)) if is_partial else base_bytes(gpus)
        time = f_and_b(gpu, gpus, tokens)
        if snapshot_size(lambda _, s=size: s, 1, gpu.bytes_per_second, time).stall_seconds < 1e-9:
            return gpus
    raise ValueError(f"no number of {gpu.name}s up to {GPUS[-1]} hides it")


def main() -> int:
    """Makes the figure."""
    args = flags(__doc__ or "").parse_args()
    rows: list[tuple[object, ...]] = []
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for gpu in (A800, H100):
        speed = gpu.bytes_per_second
        lines = {
            "F&B": [f_and_b(gpu, gpus) for gpus in GPUS],
            "Base-Async": [base_bytes(gpus) / speed for gpus in GPUS],
            "MoC": [moc_bytes(gpus, in_turn(gpus)) / speed for gpus in GPUS],
            "MoC, neighbours": [moc_bytes(gpus, neighbours(gpus)) / speed for gpus in GPUS],
        }
        xs = [math.log2(gpus) for gpus in GPUS]
        panels[gpu.name] = {name: (xs, ys) for name, ys in lines.items()}
        rows += [
            (gpu.name, name, gpus, seconds)
            for name, ys in lines.items()
            for gpus, seconds in zip(GPUS, ys, strict=True)
        ]
    write_csv(args.out / "moc_scaling.csv", ("gpu", "what", "gpus", "seconds"), rows)
    plot_lines(args.out / "moc_scaling.png", panels, "log2 of GPUs", "s", "computed")
    others = {tokens: hidden_from(A800, True, tokens) for tokens in (TOKENS // 2, 2 * TOKENS)}
    publish(
        args.out,
        Figure(
            "moc_scaling",
            "Section 6.2: snapshots and F&B at scale",
            "Seconds of a snapshot and of a forward and backward pass on 8 to 2048 GPUs, for a "
            "LLaMA-like model with one expert a GPU and layer, of which a save has 1/8.",
            (
                Compared(
                    "A800s from which Base-Async is hidden",
                    BASE_HIDDEN,
                    hidden_from(A800, False),
                    "calibrated",
                ),
                Compared(
                    "A800s from which MoC-Async is hidden",
                    MOC_HIDDEN,
                    hidden_from(A800, True),
                    "computed",
                ),
                Compared("H100s, Base-Async", None, hidden_from(H100, False), "computed"),
                Compared("H100s, MoC-Async", None, hidden_from(H100, True), "computed"),
            ),
            (
                "MoC-Async is hidden from "
                + " and ".join(f"{n} A800s at {t} tokens a GPU" for t, n in others.items())
                + ", which the paper does not give.",
                "The paper prints its rule for K = 1 only. Ours takes experts that are N/K apart, "
                f"so every rank writes {in_turn(BASE_HIDDEN):.0f} of its {LAYERS}; K neighbours, "
                f"as one may read it, would have some ranks write {neighbours(BASE_HIDDEN)} of "
                f"{LAYERS} on {BASE_HIDDEN} GPUs, and {neighbours(64)} on 64.",
            ),
            ("moc_scaling.png",),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How much work each operation of a pass was, in the units of a profile."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_resilient.algorithms.stage_costs import BACKWARD_GEMMS
from megatron_resilient.comm import routes
from megatron_resilient.comm.blocks import Form
from megatron_resilient.comm.chunked_pass import ChunkedPass, Ways
from megatron_resilient.comm.hierarchical import Plan
from megatron_resilient.comm.pipeline import Key


def pass_units(
    one: ChunkedPass, config: Any, ways: Ways, nodes: Sequence[int] | None, backward: bool
) -> dict[Key, float]:
    """Returns bytes and floating-point operations on this rank; O(chunks * ranks).

    Args:
        one: a pass that has run.
        config: Megatron's TransformerConfig.
        ways: how rows travelled.
        nodes: node of each expert-parallel rank; None: unknown.
        backward: which pass it was.
    """
    sent, returned = _row_bytes(one.sent_forms), _row_bytes(one.returned_forms)
    wide = [Form(one.sum_dtype or form.dtype, form.shape) for form in one.returned_forms]
    added = _row_bytes(wide)
    row_flops = row_flops_of(config) * (BACKWARD_GEMMS if backward else 1)
    if ways.tensor_group is not None:
        row_flops /= ways.tensor_group.size()
    units: dict[Key, float] = {}
    for chunk, (own, plan) in enumerate(zip(one.chunks, one.plans, strict=True)):
        out, back = sent_rows(plan, own.counts_RR, ways.router.rank, nodes)
        units["dispatch", chunk] = out * sent
        units["combine", chunk] = back * returned
        units["expert", chunk] = float(own.slot_rows_nC.sum()) * row_flops
        if ways.tensor_group is not None:
            units["allgather", chunk] = sum(own.gathered_rows) * sent
            units["reducescatter", chunk] = sum(own.gathered_rows) * added
    return units


def sent_rows(
    plan: Plan, counts_RR: np.ndarray, rank: int, nodes: Sequence[int] | None
) -> tuple[float, float]:
    """Returns rows that a rank sends in a dispatch, and in the combine that goes with it.

    To other nodes; to other ranks where there is but one node, or none is known. Where rows travel
    in several hops those of the hop between nodes count, which are perhaps not the rank's own.

    Args:
        plan: of the dispatch.
        counts_RR: rows from each rank to each.
        rank: this one.
        nodes: node of each rank; None: unknown.
    """
    hops = [stage for stage in plan.stages if stage.kind == routes.INTER and stage.group]
    if hops:
        out, back = (
            sum(sum(rows) - rows[stage.group.rank()] for stage, rows in ways if stage.group)
            for ways in (
                [(stage, stage.send_rows) for stage in hops],
                [(stage, stage.receive_rows) for stage in hops],
            )
        )
        return out, back
    ranks = len(counts_RR)
    own = np.array(range(ranks) if nodes is None or len(set(nodes)) == 1 else nodes)
    far = own != own[rank]
    return float(counts_RR[rank, far].sum()), float(counts_RR[far, rank].sum())


def _row_bytes(forms: Sequence[Form]) -> float:
    return float(sum(form.row_bytes for form in forms))


def row_flops_of(config: Any) -> float:
    """Returns floating-point operations of one token in one whole expert, forward."""
    width = config.moe_latent_size or config.hidden_size
    products = 3 if config.gated_linear_unit else 2
    return 2.0 * width * (config.moe_ffn_hidden_size or config.ffn_hidden_size) * products

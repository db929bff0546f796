"""The paper's formula for the time of a pass: one of four cases, by what dominates."""

# Names of the cases, by their number.
CASES = {
    1: "link between nodes, gradients included",
    2: "experts",
    3: "all-to-all",
    4: "link inside nodes",
}


def four_case_time(
    a2a_ms: float,
    allgather_ms: float,
    reducescatter_ms: float,
    expert_ms: float,
    degree: int,
    slice_ms: float = 0.0,
) -> tuple[int, float]:
    """Returns the case and the time of a pass with all AllGathers first, in closed form.

    FSMoE (arXiv 2501.10714), section 4.2: Q1 to Q7 and cases 1 to 4. Kept as a check of the exact
    model (`stream_model.simulate` in the order gather-first), which plans are made with. Both are
    equal where an AllGather takes as long as a ReduceScatter. Where it does not, the formula is too
    low: its cases ask about the AllGather alone.

    Args:
        a2a_ms: One chunk's dispatch, or its combine.
        allgather_ms: One chunk's.
        reducescatter_ms: One chunk's.
        expert_ms: One chunk's; in the backward pass twice that of the forward pass.
        degree: Chunks.
        slice_ms: The gradient slice; 0 in the forward pass.
    """
    a2a, both, experts = a2a_ms, allgather_ms + reducescatter_ms, degree * expert_ms
    between_ends = 2 * (degree - 1) * a2a
    q1 = a2a > allgather_ms
    q2 = experts > between_ends
    q3 = experts > (degree - 1) * both
    q4 = slice_ms > both
    q5 = slice_ms > experts - between_ends + both
    q6 = slice_ms > degree * both - between_ends
    if q1:
        case = (1 if q5 else 2) if q2 else (1 if q4 else 3)
    else:
        case = (1 if q5 else 2) if q3 else (1 if q6 else 4)
    time = {
        1: 2 * degree * a2a + slice_ms,
        2: 2 * a2a + both + experts,
        3: 2 * degree * a2a + both,
        4: 2 * a2a + degree * both,
    }[case]
    return case, time

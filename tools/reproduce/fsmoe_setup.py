"""What the FSMoE paper (arXiv 2501.10714) prints of its layers, as figures need it.

Table 2: milliseconds of every operation of a layer with 4 sequences of 1024 tokens. Each is taken
for the sum of its kind over a pass: two all-to-alls; the AllGather of the MoE layer and that of the
attention, which moves tokens once where the MoE layer moves them k f = 2.4 times; and so the
ReduceScatter. That is how costs and times agree best (`fsmoe_breakdown.py`).
"""

from dataclasses import dataclass

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.simulation.overlap import TOP_K, Testbed

BATCH, TOKENS = 4, 1024  # of table 2
CAPACITY = 1.2
COPIES = TOP_K * CAPACITY  # of a token, that an MoE layer sends
FLOAT_BYTES = 4
NODES = {"A": 6, "B": 8}


@dataclass(frozen=True)
class Shape:
    """A model of the paper.

    Attributes:
        name: of it.
        layers: of it.
        hidden: M.
        ffn: H.
        products: of an expert.
        reduced: weights of a layer whose gradients are summed between nodes, as a multiple of M^2
            over the ranks of a node: the one that the AllReduce's times on testbed A follow from.
            GPT-2: queries, keys and values; Mixtral: all four with a fourth of the key heads.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    products: int
    reduced: float

    def gradient_bytes(self, testbed: Testbed) -> int:
        """Returns those of a layer that a rank sums."""
        return int(FLOAT_BYTES * self.reduced * self.hidden**2 / testbed.ranks_per_node)


GPT2_XL = Shape("GPT2-XL", 48, 1600, 6400, 2, 3.0)
MIXTRAL_7B = Shape("Mixtral-7B", 32, 4096, 14336, 3, 2.5)
MIXTRAL_22B = Shape("Mixtral-22B", 33, 6144, 16384, 3, 2.5)


@dataclass(frozen=True)
class Pass:
    """Times of table 2 of one pass, in milliseconds."""

    a2a: float
    allreduce: float
    allgather: float
    reducescatter: float
    experts: float
    routing: float
    order: float
    attention: float

    @property
    def communication(self) -> float:
        """All links."""
        return self.a2a + self.allreduce + self.allgather + self.reducescatter

    @property
    def computing(self) -> float:
        """All else."""
        return self.experts + self.routing + self.order + self.attention

    @property
    def dense(self) -> float:
        """What computes, but experts."""
        return self.routing + self.order + self.attention


# (testbed, model) -> (forward, backward).
TABLE_2 = {
    ("A", GPT2_XL.name): (
        Pass(6.9, 0.0, 4.6, 5.4, 3.1, 0.1, 0.3, 1.7),
        Pass(6.9, 5.26, 4.6, 5.4, 6.1, 0.1, 0.4, 3.6),
    ),
    ("A", MIXTRAL_7B.name): (
        Pass(19.5, 0.0, 12.3, 13.7, 15.6, 0.1, 0.3, 4.1),
        Pass(19.6, 26.45, 12.3, 13.7, 31.8, 0.1, 0.5, 7.7),
    ),
    ("B", GPT2_XL.name): (
        Pass(11.2, 0.0, 15.5, 15.7, 6.7, 0.1, 0.3, 4.5),
        Pass(11.2, 7.3, 15.5, 15.2, 13.0, 0.1, 0.3, 8.6),
    ),
    ("B", MIXTRAL_7B.name): (
        Pass(28.3, 0.0, 39.6, 40.8, 58.5, 0.1, 0.7, 9.5),
        Pass(30.8, 32.1, 40.1, 41.8, 119.7, 0.2, 1.2, 18.1),
    ),
}


@dataclass(frozen=True)
class Layer:
    """One of many equal layers, as the scheduler takes it.

    Attributes:
        profile: costs, in units of what a rank does in a layer of table 2; of the AllReduce: in
            bytes.
        work: of the MoE layer and what comes before it.
        dense_ms: of all but the MoE layer, forward and backward.
    """

    profile: Profile
    work: LayerWork
    dense_ms: float


def table_layer(
    testbed: Testbed,
    shape: Shape,
    tokens: int = BATCH * TOKENS,
    nodes: int | None = None,
) -> Layer:
    """Returns a layer of a model, from table 2 and the alphas that the paper printed.

    What an operation takes beyond its alpha grows with the tokens, and with M, M H or M^2 from the
    model of the table to a larger one. With other nodes than the table's, the share of tokens that
    goes to other nodes is another, and so are the rounds of an AllReduce.

    Args:
        testbed: the table's.
        shape: GPT2-XL, Mixtral-7B, or what is scaled from it.
        tokens: of a rank's sequences.
        nodes: None: those of the table.
    """
    known = shape if (testbed.name, shape.name) in TABLE_2 else MIXTRAL_7B
    forward, backward = TABLE_2[testbed.name, known.name]
    alphas = {name: alpha for name, (alpha, _) in testbed.costs.items()}
    alphas["gemm"] *= known.products
    wide = shape.hidden / known.hidden

    def beyond(name: str, times: float, calls: int) -> float:
        """What one call of the table takes beyond its alpha, in the mean."""
        return max(0.0, times / calls - alphas[name])

    # Both passes send the same: their mean. Backward, experts compute twice.
    a2a = beyond("a2a", forward.a2a + backward.a2a, 4)
    links = {
        name: beyond(name, getattr(forward, name) + getattr(backward, name), 4) * 2
        for name in ("allgather", "reducescatter")
    }
    experts = beyond("gemm", forward.experts + backward.experts, 3)
    here = NODES[testbed.name]
    nodes = here if nodes is None else nodes
    away = (1 - 1 / nodes) / (1 - 1 / here)
    size = shape.gradient_bytes(testbed)
    reduced = beyond("allreduce", backward.allreduce, 1) / known.gradient_bytes(testbed)
    moe = COPIES / (COPIES + 1)
    profile = Profile(
        LinearCost(alphas["a2a"], a2a * wide * away),
        *(LinearCost(alphas[name], moe * own * wide) for name, own in links.items()),
        LinearCost(alphas["allreduce"], reduced * away),
        LinearCost(alphas["gemm"], experts * wide * shape.ffn / known.ffn),
    )
    share = tokens / (BATCH * TOKENS)
    attention = [
        sum(alphas[name] + (1 - moe) * own * wide * share for name, own in links.items())
        + own_pass.dense * wide**2 * share
        for own_pass in (forward, backward)
    ]
    work = LayerWork(share, share, share, share, size, attention[1])
    return Layer(profile, work, sum(attention))

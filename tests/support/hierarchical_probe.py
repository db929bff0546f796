"""All-to-alls by every way, on the ranks of a test, each against torch's own."""

import torch
import torch.distributed as dist

from megatron_resilient.comm import exchange
from megatron_resilient.comm.gather_counts import gather_counts
from megatron_resilient.comm.hierarchical import Router
from megatron_resilient.comm.node_groups import NodeGroups
from megatron_resilient.errors import ConfigError

COUNTS = {
    "uneven": lambda s, d: (3 * s + 5 * d) % 7,
    "none at all": lambda s, d: 0,
    "one rank gets all": lambda s, d: 4 if d == 2 else 0,
    "one rank sends nothing": lambda s, d: 0 if s == 1 else 2 + d,
    "only inside": lambda s, d: 3 if s == d else 0,
}


def everything(maps, counts):
    """All of it in one start of the ranks."""
    return {
        "ways": [ways(*each) for each in maps],
        "refused": refused([0, 0, 0, 1]),
        "rows": [rows(each) for each in counts],
    }


def ways(nodes, algorithms):
    """Returns for each case whether it is equal to direct in every bit, forward and backward."""
    whole = dist.group.WORLD
    groups = NodeGroups.make(whole, nodes)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    answer = {}
    for algorithm in algorithms:
        router = Router(algorithm, groups)
        for title, count in COUNTS.items():
            counts = [[count(s, d) for d in range(ranks)] for s in range(ranks)]
            told = gather_counts(counts[rank], whole)
            assert told.tolist() == counts
            plan = router.plan(told)
            for dtype in (torch.float32, torch.bfloat16):
                key = f"{algorithm} {title} {dtype}"
                answer[key] = case(plan, counts, dtype, rank, ranks)
    return answer


def case(plan, counts, dtype, rank, ranks):
    generator = torch.Generator().manual_seed(rank)
    send, receive = counts[rank], [counts[s][rank] for s in range(ranks)]
    x = torch.randn(sum(send), 3, generator=generator).to(dtype).requires_grad_()
    expected = torch.empty(sum(receive), 3, dtype=dtype)
    dist.all_to_all_single(expected, x.detach(), receive, send)
    got = plan.dispatch(x)
    there = torch.randn(got.shape, generator=generator).to(dtype)
    back = torch.empty(sum(send), 3, dtype=dtype)
    dist.all_to_all_single(back, there, send, receive)
    got.backward(there)
    returned = there.clone().requires_grad_()
    combined = plan.combine(returned)
    combined.backward(x.detach())
    return {
        "dispatch": torch.equal(got, expected),
        "its gradient": torch.equal(x.grad, back),
        "combine": torch.equal(combined, back),
        "its gradient too": torch.equal(returned.grad, expected),
    }


def refused(nodes):
    groups = NodeGroups.make(dist.group.WORLD, nodes)
    try:
        Router("2d", groups)
    except ConfigError as error:
        return str(error)
    return None


def rows(counts):
    """All-gather and reduce-scatter of uneven rows, and an all-reduce."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    answer = {}
    for dtype in (torch.float32, torch.bfloat16):
        every = [
            torch.randn(sum(counts), 2, generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(ranks)
        ]
        parts = [x.split(counts) for x in every]
        got = exchange.all_gather(parts[rank][rank], counts, group)
        gathered = torch.equal(got, torch.cat([parts[r][r] for r in range(ranks)]))
        total = torch.zeros(sum(counts), 2)
        for x in every:
            total += x.float()
        total = total.to(dtype)
        summed = exchange.reduce_scatter(every[rank], counts, group)
        reduced = exchange.all_reduce(every[rank], group)
        answer[str(dtype)] = [
            gathered,
            torch.equal(summed, total.split(counts)[rank]),
            torch.equal(reduced, total),
        ]
    return answer

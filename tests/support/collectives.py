"""Collective calls of one rank, for the workers of a pool; each function opens gloo anew.

What stock does with the same arguments is asked of the functions that the patches wrap.
"""

import contextlib

import numpy as np
import torch
import torch.distributed as dist

ROWS = (1, 3, 2)


@contextlib.contextmanager
def gloo():
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def refusal(call, *args, **kwargs):
    """Returns the first line of the error of a call, None if it goes through."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return None


def all_gather():
    with gloo() as rank:
        own = torch.full((ROWS[rank], 2), float(rank))
        uneven = [torch.zeros(rows, 2) for rows in ROWS]
        stock = refusal(dist.all_gather.__wrapped__, uneven, own)
        dist.all_gather(uneven, own)
        even = [torch.zeros(1) for _ in ROWS]
        work = dist.all_gather(even, torch.full((1,), float(rank)), async_op=True)
        work.wait()
        pair = dist.new_group([0, 2])
        among_two = [torch.zeros(ROWS[0]), torch.zeros(ROWS[2])]
        if rank != 1:
            dist.all_gather(among_two, torch.full((ROWS[rank],), 10.0 + rank), group=pair)
        return {
            "stock": stock,
            "uneven": [part.tolist() for part in uneven],
            "even": [part.tolist() for part in even],
            "among two": [part.tolist() for part in among_two],
        }


def reduce_scatter():
    with gloo() as rank:
        # Part p of rank r is full of 10 r + p; 30000 rows are more than one of gloo's segments.
        answer = {}
        for scale in (1, 10_000):
            parts = [torch.full((rows * scale, 2), 10.0 * rank + p) for p, rows in enumerate(ROWS)]
            for name in ("SUM", "MAX", "AVG"):
                output = torch.zeros_like(parts[rank])
                dist.reduce_scatter(output, parts, getattr(dist.ReduceOp, name))
                answer[f"{name} {scale}"] = output.unique().tolist()
            answer[f"inputs {scale}"] = [part.unique().tolist() for part in parts]
        return answer


def averages():
    with gloo() as rank:
        mean = dist.ReduceOp.AVG
        values = torch.tensor([float(rank), 3.0])
        dist.all_reduce(values, op=mean)
        later = torch.tensor([3.0 * rank])
        dist.all_reduce(later, mean, async_op=True).wait()
        whole = torch.arange(3.0) + rank
        part = torch.zeros(1)
        dist.reduce_scatter_tensor(part, whole, op=mean)
        return {
            "mean": values.tolist(),
            "async mean": later.tolist(),
            "scattered mean": part.tolist(),
            "input": whole.tolist(),
        }


def all_to_all_single():
    """Rank r sends s + 1 rows to rank s, full of 10 r + s."""
    with gloo() as rank:
        sent = torch.cat([torch.full((s + 1,), 10.0 * rank + s) for s in range(3)])
        sizes = torch.tensor([1, 2, 3]), torch.tensor([rank + 1] * 3)
        results = []
        for convert in (lambda x: x, lambda x: x.numpy(), lambda x: x.tolist(), np.asarray):
            received = torch.zeros(3 * (rank + 1))
            dist.all_to_all_single(received, sent, convert(sizes[1]), convert(sizes[0]))
            results.append(received.tolist())
        received = torch.zeros(3 * (rank + 1))
        stock = refusal(dist.all_to_all_single.__wrapped__, received, sent, sizes[1], sizes[0])
        equal = torch.zeros(3)
        dist.all_to_all_single(equal, torch.full((3,), float(rank)))
        return {"stock": stock, "received": results, "equal": equal.tolist()}

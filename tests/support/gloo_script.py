"""What a forked worker runs: four steps of a data-parallel regression over gloo.

Arguments: rendezvous file, workers in all. Prints the weights.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    path, size = sys.argv[1], int(sys.argv[2])
    node = int(os.environ["MEGATRON_RESILIENT_NODE"].removeprefix("node"))
    rank = node * int(os.environ["LOCAL_WORLD_SIZE"]) + int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (model(torch.full((2, 3), float(rank))) ** 2).mean().backward()
        optimizer.step()
    weights = [p.flatten().tolist() for p in model.parameters()]
    print("weights", weights, os.path.basename(sys.argv[0]), __name__, flush=True)
    dist.destroy_process_group()

"""All-to-all in one hop or several, for rows with uneven splits, and back.

What arrives does not depend on the way: rows of rank 0, then of rank 1, ..., each rank's in their
order, bit for bit. The way back is the exact reverse, over the same ranks; it is also the backward
pass. See `routes` for the ways.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_resilient.comm import routes
from megatron_resilient.comm.blocks import arrange, restore
from megatron_resilient.comm.exchange import all_to_all
from megatron_resilient.comm.node_groups import NodeGroups, across


@dataclass(frozen=True)
class _Hop:
    """One hop as one rank sees it; blocks are given as s * ranks + d.

    Attributes:
        kind: WHOLE, INTRA or INTER.
        order: the blocks that it has, in the order in which they are sent, as places.
        sent: how many of these go to each rank of the group.
        received: the blocks that come from each rank of the group.
        group: None if this rank takes no part in the hop.
    """

    kind: str
    order: list[int]
    sent: list[int]
    received: list[np.ndarray]
    group: dist.ProcessGroup | None


class Router:
    """The hops of one algorithm over one set of groups. Building it is O(hops x ranks^2), once.

    Args:
        algorithm: "direct", "1d" or "2d".
        groups: the ranks and their nodes.

    Raises:
        ConfigError: no such algorithm, or 2d with nodes of different sizes.
    """

    def __init__(self, algorithm: str, groups: NodeGroups) -> None:
        self.algorithm, self.groups = algorithm, groups
        self.ranks = dist.get_world_size(groups.whole)
        self.rank = dist.get_rank(groups.whole)
        kinds, holders = routes.stops(algorithm, groups.nodes)
        flat = holders.reshape(len(kinds) + 1, -1)
        self._first = np.flatnonzero(flat[0] == self.rank)
        held = self._first
        self._hops: list[_Hop] = []
        for hop, kind in enumerate(kinds):
            members, group = _members(kind, groups, self.rank)
            here, there = flat[hop], flat[hop + 1]
            # All of a rank's blocks stay where they are: it has no part in the hop (nor has any
            # other of its group, or it would receive).
            moving = np.isin(here, members) & (here != there)
            place = {int(block): i for i, block in enumerate(held)}
            to = [held[there[held] == member] for member in members]
            received = [
                np.flatnonzero((here == member) & (there == self.rank)) for member in members
            ]
            order = [place[int(block)] for blocks in to for block in sorted(blocks)]
            self._hops.append(
                _Hop(kind, order, [len(b) for b in to], received, group if moving.any() else None)
            )
            held = np.concatenate(received)
        # Blocks arrive hop by hop; in the end they stand by their source.
        self._last = [int(i) for i in np.argsort(held)]

    def plan(self, counts: Sequence[Sequence[int]] | torch.Tensor | np.ndarray) -> "Plan":
        """Returns the plan for one exchange; O(ranks) per hop, no communication.

        Args:
            counts: [ranks, ranks]; `counts[s][d]` rows go from s to d. The same on every rank.
        """
        array = np.asarray(counts, dtype=np.int64)
        if array.shape != (self.ranks, self.ranks) or array.min(initial=0) < 0:
            raise ValueError(
                f"counts of shape {array.shape} for {self.ranks} ranks, or negative ones"
            )
        flat = array.reshape(-1)
        stages = []
        sizes = flat[self._first]
        for hop in self._hops:
            ordered = sizes[hop.order]
            cuts = np.cumsum([0, *hop.sent])
            stages.append(
                Stage(
                    kind=hop.kind,
                    group=hop.group,
                    order=hop.order,
                    sizes=sizes.tolist(),
                    send_rows=[int(ordered[a:b].sum()) for a, b in itertools.pairwise(cuts)],
                    receive_rows=[int(flat[blocks].sum()) for blocks in hop.received],
                )
            )
            sizes = flat[np.concatenate(hop.received)]
        return Plan(tuple(stages), self._last, sizes.tolist())


def _members(kind: str, groups: NodeGroups, rank: int) -> tuple[list[int], dist.ProcessGroup]:
    if kind == routes.WHOLE:
        return list(range(sum(map(len, groups.nodes)))), groups.whole
    if kind == routes.INTRA:
        return next(list(node) for node in groups.nodes if rank in node), groups.intra
    return next(list(ranks) for ranks in across(groups.nodes) if rank in ranks), groups.inter


@dataclass(frozen=True)
class Stage:
    """One hop of one exchange: an operation for the stream of its kind.

    Attributes:
        kind: "whole", "intra" or "inter".
        group: None if nothing moves on this rank's group.
        order: blocks in the order in which they are sent, as places in `sizes`.
        sizes: rows of each block that is here.
        send_rows: rows to each rank of the group.
        receive_rows: rows from each.
    """

    kind: str
    group: dist.ProcessGroup | None
    order: list[int]
    sizes: list[int]
    send_rows: list[int]
    receive_rows: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Does the hop: [sum(sizes), ...] to [sum(receive_rows), ...]. Collective over `group`."""
        x = arrange(x, self.sizes, self.order)
        if self.group is None:
            return x
        return all_to_all(x, self.send_rows, self.receive_rows, self.group)

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        """Undoes it: [sum(receive_rows), ...] to [sum(sizes), ...]. Collective over `group`."""
        if self.group is not None:
            x = all_to_all(x, self.receive_rows, self.send_rows, self.group)
        return restore(x, self.sizes, self.order)


@dataclass(frozen=True)
class Plan:
    """One exchange. Its stages may be run one by one; then `arrange` and `restore` are the rest.

    Attributes:
        stages: the hops, in order.
        order: blocks by source, as places among those that the last hop brought.
        sizes: rows of each of these.
    """

    stages: tuple[Stage, ...]
    order: list[int]
    sizes: list[int]

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """Sends rows to their ranks; the gradient takes the way back. Collective.

        Args:
            x: [rows, ...], by destination.

        Returns:
            [rows, ...], by source.
        """
        return _Travel.apply(x, self.forward, self.backward)

    def combine(self, x: torch.Tensor) -> torch.Tensor:
        """Sends rows back to where `dispatch` brought them from; differentiable too. Collective.

        Args:
            x: [rows, ...], by source.

        Returns:
            [rows, ...], by destination, as they were given to `dispatch`.
        """
        return _Travel.apply(x, self.backward, self.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `dispatch`, outside autograd."""
        for stage in self.stages:
            x = stage.forward(x)
        return self.arrange(x)

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        """As `combine`, outside autograd."""
        x = self.restore(x)
        for stage in reversed(self.stages):
            x = stage.backward(x)
        return x

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """Puts what the last stage brought in the order of sources."""
        return arrange(x, self.sizes, self.order)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """Undoes `arrange`."""
        return restore(x, self.sizes, self.order)


class _Travel(torch.autograd.Function):
    """Rows go one way, their gradient the other."""

    @staticmethod
    def forward(ctx, x, way, back):
        ctx.back = back
        return way(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None

"""The process groups inside nodes and between them, from the node of each rank."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.errors import ConfigError

# The node of each rank of the world, by rank, with commas between.
NODE_MAP = "MEGATRON_RESILIENT_NODE_MAP"


def read_node_map(world: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the node of each rank, as the launcher says.

    MEGATRON_RESILIENT_NODE_MAP if it is set; else nodes of LOCAL_WORLD_SIZE ranks each, as torchrun
    fills them.

    Args:
        world: number of ranks.
        environ: the environment.

    Raises:
        ConfigError: neither is there, or it does not fit `world`.
    """
    if NODE_MAP in environ:
        nodes = [node.strip() for node in environ[NODE_MAP].split(",")]
        if len(nodes) != world or not all(nodes):
            raise ConfigError(
                f"{NODE_MAP} names {len(nodes)} ranks of {world}: give the node of each, by rank, "
                "with commas between"
            )
        return nodes
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or int(local) < 1 or world % int(local):
        raise ConfigError(
            f"which rank is on which node is unknown: start with torchrun, or set {NODE_MAP} "
            "(such as 0,0,1,1)"
        )
    return [str(rank // int(local)) for rank in range(world)]


def join_node_map(nodes: Sequence[str]) -> str:
    """Returns what `read_node_map` reads: nodes numbered in the order of their first ranks."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return ",".join(str(numbers[node]) for node in nodes)


@dataclass(frozen=True)
class NodeGroups:
    """A group of ranks, cut into nodes.

    Ranks of a node keep their order; the local index of a rank is its place among them.

    Attributes:
        whole: all the ranks.
        nodes: for each node, in the order of their first ranks, its ranks, numbered as in `whole`.
        intra: the group of this rank's node.
        inter: the group of the ranks with this rank's local index, one of each node that has so
            many. That of local index 0 has a rank of every node.
    """

    whole: dist.ProcessGroup
    nodes: tuple[tuple[int, ...], ...]
    intra: dist.ProcessGroup
    inter: dist.ProcessGroup

    @classmethod
    def make(cls, whole: dist.ProcessGroup, node_map: Sequence[object]) -> Self:
        """Creates the groups. Collective over all ranks of the world, also those not in `whole`.

        Args:
            whole: the group to cut.
            node_map: the node of each of its ranks.
        """
        members = dist.get_process_group_ranks(whole)
        return cls._make(whole, [members], dict(zip(members, node_map, strict=True)))

    @classmethod
    def make_each(cls, whole: dist.ProcessGroup, node_map: Sequence[object]) -> Self:
        """Creates the groups of every such group at once. Collective over all ranks of the world.

        Args:
            whole: the group to cut; each rank of the world gives the one that it is in.
            node_map: the node of each rank of the world.
        """
        told = gather_json(dist.get_process_group_ranks(whole))
        every = sorted({tuple(members) for members in told})
        return cls._make(whole, every, dict(enumerate(node_map)))

    @classmethod
    def _make(
        cls,
        whole: dist.ProcessGroup,
        every: Sequence[Sequence[int]],
        node_of: Mapping[int, object],
    ) -> Self:
        own = dist.get_process_group_ranks(whole)
        nodes_of_each = [cut([node_of[rank] for rank in members]) for members in every]
        intra, inter = (
            dist.new_subgroups_by_enumeration(
                [
                    [members[rank] for rank in ranks]
                    for members, nodes in zip(every, nodes_of_each, strict=True)
                    for ranks in cut_again(nodes)
                ]
            )[0]
            for cut_again in (list, across)
        )
        return cls(whole, cut([node_of[rank] for rank in own]), intra, inter)

    @classmethod
    def one_node(cls, whole: dist.ProcessGroup) -> Self:
        """Takes all ranks of a group for one node; creates no group, and is not collective."""
        return cls(whole, (tuple(range(dist.get_world_size(whole))),), whole, whole)

    @property
    def even(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len({len(node) for node in self.nodes}) == 1


def cut(node_map: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each node, nodes in the order of their first ranks."""
    nodes: dict[object, list[int]] = {}
    for rank, node in enumerate(node_map):
        nodes.setdefault(node, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def across(nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the ranks of each local index, nodes in order."""
    most = max(map(len, nodes))
    return [[node[k] for node in nodes if k < len(node)] for k in range(most)]

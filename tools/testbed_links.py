"""The network of the emulated testbed, as the commands of iproute2 that build it.

Every rank is a network namespace with two links: `intra` to the bridge of its node, `inter` to the
bridge between nodes. Both carry the rank's one address; a route per peer chooses between them, so
that one address in a rendezvous serves both. Each end of each link is shaped by itself, so a rank
sends and receives at its rate at once, and two ranks that send to a third share that one's rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass

# Fewer, larger packets: on two cores it is packets, and not bytes, that cost time.
MTU = 9000
# A shaper lets so much through at once. Larger bursts make short messages look too fast; smaller
# ones than the kernel's timer can serve make long ones too slow.
_BURST_BYTES = 12_000
_BURST_BYTES_PER_MBIT = 80
# How long a packet may wait in a shaper; then it is dropped, as in a switch.
_QUEUE_MS = 50


@dataclass(frozen=True)
class Layout:
    """Nodes, their ranks and their links.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: ranks on each; rank r is on node r // ranks_per_node.
        inter_mbit: rate of each rank's link to other nodes, each way, in Mbit/s.
        intra_mbit: rate of each rank's link inside its node.

    Raises:
        ValueError: a number is below 1, or there are more ranks than addresses.
    """

    nodes: int = 2
    ranks_per_node: int = 2
    inter_mbit: float = 100
    intra_mbit: float = 400

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "inter_mbit", "intra_mbit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be at least 1")
        if self.world > 250:
            raise ValueError(f"{self.world} ranks are more than one machine can stand in for")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        """Returns the node of a rank."""
        return rank // self.ranks_per_node

    def link(self, rank: int, peer: int) -> str:
        """Returns the device by which a rank reaches another one."""
        return "intra" if self.node(rank) == self.node(peer) else "inter"


def namespace(rank: int) -> str:
    """Returns the name of a rank's network namespace."""
    return f"rank{rank}"


def address(rank: int) -> str:
    """Returns the address of a rank, the same on both of its links."""
    return f"10.77.0.{rank + 1}"


def hosts(layout: Layout) -> str:
    """Returns an /etc/hosts that names every rank, also as IPv6 sockets see it."""
    ranks = range(layout.world)
    names = [
        f"{form}{address(rank)} {namespace(rank)}" for form in ("", "::ffff:") for rank in ranks
    ]
    return "\n".join(["127.0.0.1 localhost", *names, ""])


def commands(layout: Layout) -> Iterator[list[str]]:
    """Yields the commands that build the network, in order; O(ranks^2) of them (routes).

    They are meant for a network namespace without anything in it but the loopback device.
    """
    yield from _split("ip link set lo up")
    for bridge in ["inter", *(f"node{node}" for node in range(layout.nodes))]:
        yield from _split(f"ip link add {bridge} mtu {MTU} type bridge")
        yield from _split(f"ip link set {bridge} up")
    for rank in range(layout.world):
        inside = namespace(rank)
        yield from _split(f"ip netns add {inside}", f"ip -n {inside} link set lo up")
        for link, bridge, mbit in (
            ("inter", "inter", layout.inter_mbit),
            ("intra", f"node{layout.node(rank)}", layout.intra_mbit),
        ):
            outer = f"{link}{rank}"
            shaper = _shaper(mbit)
            yield from _split(
                f"ip link add {outer} mtu {MTU} type veth"
                f" peer name {link} mtu {MTU} netns {inside}",
                f"ip link set {outer} master {bridge} up",
                f"ip -n {inside} link set {link} up",
                f"ip -n {inside} address add {address(rank)}/32 dev {link}",
                f"tc qdisc add dev {outer} root {shaper}",
                f"tc -n {inside} qdisc add dev {link} root {shaper}",
            )
    for rank in range(layout.world):
        for peer in range(layout.world):
            if peer != rank:
                # cubic: what a host uses by itself may differ, and then so would the measurements.
                yield from _split(
                    f"ip -n {namespace(rank)} route add {address(peer)}/32"
                    f" dev {layout.link(rank, peer)} src {address(rank)} congctl cubic"
                )


def _shaper(mbit: float) -> str:
    burst = max(_BURST_BYTES, round(mbit * _BURST_BYTES_PER_MBIT))
    return f"tbf rate {round(mbit * 1000)}kbit burst {burst}b latency {_QUEUE_MS}ms"


def _split(*lines: str) -> Iterator[list[str]]:
    for line in lines:
        yield line.split()

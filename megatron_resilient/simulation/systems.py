"""The systems that are compared, by name."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_resilient.errors import ConfigError

Base = Literal["restart", "in-process", "groups", "no-replicas", "ours"]

# What each does when a node is lost, for people.
BASES: dict[str, str] = {
    "restart": "all processes start again, from the newest checkpoint (torchrun, Megatron)",
    "in-process": "processes stay; state comes from the newest checkpoint",
    "groups": "processes stay; state comes from other expert-parallel groups of stock's (DS(FT))",
    "no-replicas": "processes stay; each expert once; lost ones come from the newest checkpoint",
    "ours": "processes stay; state comes from replicas, planned by load",
}
FEATURES = {
    "pec": "saves have K of the experts of each layer",
    "overlap": "communication and experts overlap as planned",
}
DEFAULT_SYSTEMS = (
    "restart",
    "in-process",
    "no-replicas",
    "ours",
    "ours+pec",
    "ours+overlap",
    "ours+pec+overlap",
)


@dataclass(frozen=True)
class System:
    """A system under simulation.

    Attributes:
        base: what it does when a node is lost.
        pec: whether saves are partial.
        overlap: whether communication and experts overlap.
    """

    base: Base
    pec: bool = False
    overlap: bool = False

    @property
    def name(self) -> str:
        """As the command line has it."""
        return self.base + "+pec" * self.pec + "+overlap" * self.overlap

    @property
    def is_ours(self) -> bool:
        """Whether it saves by expert, and pays for being recoverable."""
        return self.base in ("no-replicas", "ours")

    @property
    def keeps_state(self) -> bool:
        """Whether survivors go on with the state that they have."""
        return self.base in ("groups", "no-replicas", "ours")


def parse_system(name: str) -> System:
    """Returns the system of a name: one of BASES, for ours followed by `+` and FEATURES.

    Raises:
        ConfigError: there is none of this name.
    """
    base, *features = name.split("+")
    known: dict[str, System] = {
        "restart": System("restart"),
        "in-process": System("in-process"),
        "groups": System("groups"),
        "no-replicas": System("no-replicas"),
        "ours": System("ours"),
    }
    if (
        base not in known
        or not set(features) <= set(FEATURES)
        or (features and not known[base].is_ours)
    ):
        raise ConfigError(
            f"system {name!r}: use one of {', '.join(BASES)}; to no-replicas and ours "
            f"{' and '.join('+' + feature for feature in FEATURES)} may be added"
        )
    return replace(known[base], pec="pec" in features, overlap="overlap" in features)

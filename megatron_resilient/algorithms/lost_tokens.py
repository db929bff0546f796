"""Tokens whose updates a recovery loses, as experts go back to older saves (MoC-System, Eq. 7).

Counted per layer and logical expert from what was routed. A token is lost if it was routed to an
expert after that expert's version and before the checkpoint that is restored; what came after the
checkpoint is trained again, and not lost.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from megatron_resilient.algorithms.expert_selection import Selection, TwoLevels
from megatron_resilient.errors import PlanError

Counts = list[list[int]]  # [MoE layers][logical experts]
Level = Literal["snapshot", "persist"]


@dataclass(frozen=True)
class LostTokens:
    """What one recovery loses.

    Attributes:
        tokens: lost tokens, [MoE layers][logical experts].
        share: PLT of this recovery, 0 to 1: the mean over layers of lost / routed tokens.
    """

    tokens: Counts
    share: float


class TokenLedger:
    """Tokens routed to every expert, and how many of them the saves have.

    The count at an expert's newest version of a level is its mark. A save has marks of its own
    until it is durable (`persisted`) or has failed (`abandoned`), because training goes on
    meanwhile.

    Attributes:
        routed: tokens routed since training began, [MoE layers][logical experts].
    """

    def __init__(self, layers: int, experts: int) -> None:
        """Starts a training in which nothing was routed yet."""
        self.routed: Counts = [[0] * experts for _ in range(layers)]
        self._marks: dict[Level, Counts] = {
            "snapshot": copy.deepcopy(self.routed),
            "persist": copy.deepcopy(self.routed),
        }
        self._pending: dict[int, list[dict[int, int]]] = {}  # step -> per layer {expert: mark}

    def add(self, tokens: Sequence[Sequence[int]]) -> None:
        """Counts tokens that were routed, [MoE layers][logical experts]."""
        if [len(row) for row in tokens] != [len(row) for row in self.routed]:
            raise PlanError("the tokens are of another number of layers or experts")
        for own, new in zip(self.routed, tokens, strict=True):
            for expert, count in enumerate(new):
                own[expert] += int(count)

    def saved(self, step: int, selection: TwoLevels) -> None:
        """Notes that a snapshot was taken now, of which a part is on its way to storage.

        Args:
            step: training step of the save, which names it.
            selection: what the levels of this save have.
        """
        _set_marks(self._marks["snapshot"], self._marks_now(selection.snapshot))
        self._pending[step] = self._marks_now(selection.persist)

    def persisted(self, step: int) -> None:
        """Notes that the save of a step is durable."""
        _set_marks(self._marks["persist"], self._pending.pop(step))

    def abandoned(self, step: int) -> None:
        """Notes that the save of a step will never be durable."""
        self._pending.pop(step)

    def unsaved(self, level: Level, with_pending: bool = False) -> Counts:
        """Returns the tokens since every expert's newest version of a level.

        Args:
            level: which.
            with_pending: versions that are on their way to storage count: what a save selects by.
        """
        marks = self._marks[level]
        if with_pending and level == "persist":
            marks = copy.deepcopy(marks)
            for pending in self._pending.values():
                _set_marks(marks, pending)
        return [
            [routed - mark for routed, mark in zip(*rows, strict=True)]
            for rows in zip(self.routed, marks, strict=True)
        ]

    def lost(
        self,
        versions: Mapping[tuple[int, int], int] | None = None,
        planned: Sequence[int] | None = None,
    ) -> LostTokens:
        """Returns what is lost if this ledger's moment is restored with the newest durable experts.

        To be called on the ledger of the checkpoint that is restored (`from_plain`), before
        `restored`.

        Args:
            versions: {(MoE layer, expert): tokens routed to it at the version that is used}, for
                experts that come from elsewhere: an older file because the named one is damaged, or
                memory. The number stands in the ledger of the save that has this version.
            planned: tokens times top-k that each layer will have routed at the end of training, the
                paper's denominator; default: what was routed so far.
        """
        lost = self.unsaved("persist")
        for (layer, expert), mark in (versions or {}).items():
            lost[layer][expert] = max(0, self.routed[layer][expert] - mark)
        shares = []
        for layer, row in enumerate(lost):
            whole = sum(self.routed[layer]) if planned is None else planned[layer]
            shares.append(sum(row) / whole if whole else 0.0)
        return LostTokens(lost, sum(shares) / len(shares) if shares else 0.0)

    def restored(self) -> None:
        """Notes that training goes on from this ledger's moment.

        What was lost is lost once: what the experts are now is what their files have.
        """
        self._pending = {}
        for level in self._marks:
            self._marks[level] = copy.deepcopy(self.routed)

    def persist_marks(self, step: int) -> Counts:
        """Returns the marks of what is durable once the save of a step is: for its manifest.

        To be asked for when the fate of all saves before it is known.
        """
        marks = copy.deepcopy(self._marks["persist"])
        _set_marks(marks, self._pending[step])
        return marks

    def to_plain(self) -> dict[str, Any]:
        """Returns plain values. For a manifest `persist` is that of `persist_marks`."""
        return {
            "routed": copy.deepcopy(self.routed),
            "snapshot": copy.deepcopy(self._marks["snapshot"]),
            "persist": copy.deepcopy(self._marks["persist"]),
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_plain` returned.

        Raises:
            PlanError: it is something else.
        """
        try:
            routed, snapshot, persist = (
                [[int(count) for count in row] for row in values[name]]
                for name in ("routed", "snapshot", "persist")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"no counts of routed tokens: {error!r}") from error
        shapes = [[len(row) for row in counts] for counts in (routed, snapshot, persist)]
        if shapes[0] != shapes[1] or shapes[0] != shapes[2] or len(set(shapes[0])) > 1:
            raise PlanError("counts of routed tokens of unequal numbers of layers or experts")
        ledger = cls(0, 0)
        ledger.routed = routed
        ledger._marks = {"snapshot": snapshot, "persist": persist}
        return ledger

    def _marks_now(self, selection: Selection) -> list[dict[int, int]]:
        return [
            {expert: self.routed[layer][expert] for expert in experts}
            for layer, experts in enumerate(selection)
        ]


def expected_share(interval: int, experts: int, k: int, total_steps: int) -> float:
    """Returns the PLT to expect of one fault, if all experts get about as many tokens.

    Sequential selection: interval * (experts / k - 1) / (2 * total_steps), from Eq. 7.

    Args:
        interval: steps between two saves.
        experts: logical experts of a layer.
        k: of which so many are saved each time.
        total_steps: of the whole training.
    """
    return interval * (experts / k - 1) / (2 * total_steps)


@dataclass
class DynamicK:
    """Keeps the expected total of lost tokens under a limit (MoC-System, section 5.3).

    The paper doubles K once the loss at this K exceeds "its limit", which it does not give. Here K
    is doubled while what was lost and what the remaining faults are expected to lose is too much.

    Attributes:
        experts: logical experts of a layer; K never exceeds it.
        k: experts of a layer to persist in a save.
        limit: of the total PLT, 0 to 1.
        lost: PLT so far.
        expected: what was expected of the faults so far; uneven loads lose more.
    """

    experts: int
    k: int = 1
    limit: float = 0.0375
    lost: float = field(default=0.0)
    expected: float = field(default=0.0)

    def plan(self, interval: int, total_steps: int, remaining_faults: float) -> int:
        """Raises K if the faults still to come would exceed the limit.

        Args:
            interval: steps between two saves.
            total_steps: of the whole training.
            remaining_faults: expected number until its end.

        Returns:
            The K to use from now on.
        """
        worse = max(1.0, self.lost / self.expected) if self.expected > 0 else 1.0
        while self.k < self.experts:
            each = worse * expected_share(interval, self.experts, self.k, total_steps)
            if self.lost + each * remaining_faults <= self.limit:
                break
            self.k = min(2 * self.k, self.experts)
        return self.k

    def on_fault(
        self, share: float, interval: int, total_steps: int, remaining_faults: float
    ) -> int:
        """Adds what a fault lost, then plans.

        Args:
            share: PLT of the fault (`LostTokens.share`, of the planned tokens).
            interval: steps between two saves.
            total_steps: of the whole training.
            remaining_faults: expected number until its end.
        """
        self.lost += share
        self.expected += expected_share(interval, self.experts, self.k, total_steps)
        return self.plan(interval, total_steps, remaining_faults)

    def to_plain(self) -> dict[str, float]:
        """Returns plain values for a manifest."""
        return {
            "experts": self.experts,
            "k": self.k,
            "limit": self.limit,
            "lost": self.lost,
            "expected": self.expected,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_plain` returned.

        Raises:
            PlanError: it is something else.
        """
        try:
            return cls(
                int(values["experts"]),
                int(values["k"]),
                float(values["limit"]),
                float(values["lost"]),
                float(values["expected"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"no state of a dynamic K: {error!r}") from error


def _set_marks(marks: Counts, new: Sequence[Mapping[int, int]]) -> None:
    for row, experts in zip(marks, new, strict=True):
        for expert, mark in experts.items():
            row[expert] = max(row[expert], mark)

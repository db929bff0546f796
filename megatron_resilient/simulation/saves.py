"""The saves of a simulated job: which are durable, and what going back to one loses."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_resilient.algorithms.expert_selection import select_two_levels
from megatron_resilient.algorithms.lost_tokens import DynamicK, TokenLedger
from megatron_resilient.simulation.placements import Expert


class Save(NamedTuple):
    """One save.

    Attributes:
        step: after which it was made.
        number: among all saves.
        k: experts of each layer in it.
        durable_at: time from which on it can be gone back to.
    """

    step: int
    number: int
    k: int
    durable_at: float


@dataclass(frozen=True)
class Restored:
    """What one restore lost.

    Attributes:
        tokens: whose updates are gone.
        share: of all tokens that are planned (`LostTokens.share`).
    """

    tokens: int
    share: float


class Saves:
    """Saves of one job, with what experts in them are worth.

    Old saves are forgotten when later ones have all experts again: a ledger of tokens is played
    from the remaining ones only where something is restored.

    Attributes:
        begun: number of saves so far.
        durable_step: step that a restore goes back to.
    """

    def __init__(self, loads: Sequence[Sequence[int]], planned_steps: int, k: DynamicK) -> None:
        """Starts a job of which nothing is saved.

        Args:
            loads: tokens of a step, [layers][experts].
            planned_steps: of the whole training, which lost tokens are a share of.
            k: experts of each layer in a save, and how that grows.
        """
        self._loads = loads
        self._planned = [planned_steps * sum(row) for row in loads]
        self._dynamic = k
        self._layers, self._experts = len(loads), len(loads[0])
        self._kept: deque[Save] = deque()
        self._base: dict[str, Any] = TokenLedger(self._layers, self._experts).to_plain()
        self._base_step = 0
        # Set while the base is of a later moment than what a restore of everything goes back to.
        self._at_durable: dict[str, Any] | None = None
        self.begun = 0
        self.durable_step = 0

    @property
    def k(self) -> int:
        """Experts of each layer in the next save; the first one has all."""
        return self._dynamic.k if self.begun else self._experts

    @property
    def remembered(self) -> int:
        """So many saves in a row have all experts, and tell all that matters."""
        least = min([self._dynamic.k, *(save.k for save in self._kept)])
        return -(-self._experts // least) + 2

    def begin(self, step: int, durable_at: float) -> None:
        """Notes a save that is on its way."""
        self._kept.append(Save(step, self.begun, self.k, durable_at))
        self.begun += 1
        while len(self._kept) > self.remembered + 2:
            self._kept.popleft()

    def skip(self, saves: int) -> None:
        """Notes saves of which enough others will follow, so that they need not be told."""
        self.begun += saves

    def interrupt(self, now: float) -> None:
        """Gives up the saves that are not durable, and settles which step is."""
        while self._kept and self._kept[-1].durable_at > now:
            self._kept.pop()
        if self._kept:
            self.durable_step = self._kept[-1].step

    def saved_at_leaving(self, step: int) -> None:
        """Notes a full save that was made, and waited for, because a node was about to leave."""
        ledger = TokenLedger.from_plain(self._base)
        _add(ledger, self._loads, step - self._base_step)
        self.durable_step = step
        self._go_on_from(ledger)

    def roll_back(self) -> Restored:
        """Goes back to the newest durable save; to be called after `interrupt`."""
        if self._kept or self._at_durable is None:
            ledger = self._played()
        else:
            ledger = TokenLedger.from_plain(self._at_durable)
        lost = ledger.lost(planned=self._planned)
        self._go_on_from(ledger)
        return Restored(sum(map(sum, lost.tokens)), lost.share)

    def restore_experts(self, experts: Iterable[Expert], step: int) -> Restored:
        """Takes some experts from their newest durable versions, while all else goes on."""
        ledger = self._played()
        if self._kept or self._at_durable is None:
            self._at_durable = ledger.to_plain()
        last = self._kept[-1].step if self._kept else self._base_step
        _add(ledger, self._loads, step - last)
        unsaved, plain = ledger.unsaved("persist"), ledger.to_plain()
        tokens, share = 0, 0.0
        for layer, expert in experts:
            tokens += unsaved[layer][expert]
            share += unsaved[layer][expert] / self._planned[layer] / self._layers
            # What was lost is lost once.
            plain["persist"][layer][expert] = plain["routed"][layer][expert]
        self._base, self._base_step = plain, step
        self._kept.clear()
        return Restored(tokens, share)

    def _go_on_from(self, ledger: TokenLedger) -> None:
        ledger.restored()
        self._base, self._base_step = ledger.to_plain(), self.durable_step
        self._at_durable = None
        self._kept.clear()

    def _played(self) -> TokenLedger:
        """Returns the ledger at the newest save that is kept, all of them durable."""
        ledger = TokenLedger.from_plain(self._base)
        at = self._base_step
        for save in self._kept:
            _add(ledger, self._loads, save.step - at)
            at = save.step
            chosen = select_two_levels(
                "sequential", save.number, self._layers, self._experts, save.k, save.k
            )
            ledger.saved(save.step, chosen)
            ledger.persisted(save.step)
        return ledger


def _add(ledger: TokenLedger, loads: Sequence[Sequence[int]], steps: int) -> None:
    ledger.add([[tokens * steps for tokens in row] for row in loads])

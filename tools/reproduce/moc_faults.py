"""A training with partial saves and faults, played by the counters that training has.

Tokens of every expert are drawn, or even; each fault goes back to the newest save, and what the
ledger says is lost is lost. Work after a save is done again, so it does not count.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_resilient.algorithms.expert_selection import select_two_levels
from megatron_resilient.algorithms.lost_tokens import DynamicK, TokenLedger

Shares = Sequence[Sequence[float]]  # of the tokens of a layer, [MoE layers][experts]


@dataclass(frozen=True)
class Setting:
    """How it is trained and saved.

    Attributes:
        shares: of the tokens that each expert gets.
        steps: of the whole training.
        interval: steps between two saves.
        policy: which experts are saved.
        k_snapshot: experts of a layer in the snapshot; 0: those that are persisted.
        nodes: of which a fault takes one, whose experts come from storage, and the others' from
            their snapshots; 0: all come from storage. Expert e is on node e mod nodes.
        tokens: of a layer in one step.
        drawn: loads are drawn anew for each interval with these shares; else they are exactly so.
    """

    shares: Shares
    steps: int = 1280
    interval: int = 32
    policy: str = "sequential"
    k_snapshot: int = 0
    nodes: int = 0
    tokens: int = 1 << 14
    drawn: bool = False


def even(layers: int, experts: int) -> Shares:
    """Returns loads that are all the same."""
    return [[1 / experts] * experts] * layers


def play(
    setting: Setting, faults: Iterable[int], k: DynamicK, seed: int = 0, adapts: bool = False
) -> list[tuple[int, float, int]]:
    """Trains through some faults.

    Args:
        setting: how.
        faults: steps in which they strike.
        k: the controller; without `adapts` its K stays.
        seed: of the loads, and of the nodes that are lost.
        adapts: it is told of each fault, as training does it.

    Returns:
        For each fault: its step, the PLT that it adds, and K from then on.
    """
    draw = np.random.default_rng(seed)
    layers, experts = len(setting.shares), len(setting.shares[0])
    planned = [setting.steps * setting.tokens] * layers
    struck = Counter(step // setting.interval for step in faults)
    ledger, found = TokenLedger(layers, experts), []
    for save in range(-(-setting.steps // setting.interval)):
        step = save * setting.interval
        if save:
            ledger.add(_loads(setting, draw))
        own_k = k.k
        selection = select_two_levels(
            setting.policy,
            save,
            layers,
            experts,
            max(setting.k_snapshot, own_k),
            own_k,
            ledger.unsaved("snapshot"),
            ledger.unsaved("persist"),
        )
        ledger.saved(step, selection)
        ledger.persisted(step)
        for _ in range(struck[save]):
            lost = ledger.lost(_in_memory(setting, ledger, draw), planned).share
            ledger.restored()
            k.lost += 0 if adapts else lost
            if adapts:
                # As `Storage.adapt_k`: faults as frequent as so far.
                faults_so_far = len(found) + 1
                remaining = faults_so_far * (setting.steps - step) / max(1, step)
                k.on_fault(lost, setting.interval, setting.steps, remaining)
            found.append((step, lost, k.k))
    return found


def _loads(setting: Setting, draw: np.random.Generator) -> list[list[int]]:
    each = setting.tokens * setting.interval
    if setting.drawn:
        return [draw.multinomial(each, shares).tolist() for shares in setting.shares]
    return [[round(each * share) for share in shares] for shares in setting.shares]


def _in_memory(
    setting: Setting, ledger: TokenLedger, draw: np.random.Generator
) -> dict[tuple[int, int], int]:
    """Returns the versions of experts that healthy nodes have in memory."""
    if not setting.nodes:
        return {}
    lost_node = int(draw.integers(setting.nodes))
    marks = ledger.to_plain()["snapshot"]
    return {
        (layer, expert): mark
        for layer, row in enumerate(marks)
        for expert, mark in enumerate(row)
        if expert % setting.nodes != lost_node
    }

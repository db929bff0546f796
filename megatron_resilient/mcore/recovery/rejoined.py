"""How a generation got its state."""

from dataclasses import dataclass

from megatron_resilient.mcore.recovery.outcome import Outcome


@dataclass(frozen=True)
class Rejoined:
    """How a generation got its state.

    Attributes:
        source: `memory`, or `checkpoint` if some or all of it came from storage.
        step: the position from which training goes on.
        lost_steps: steps to be done again.
        lost_experts: (layer, expert) whose newest state is gone.
        lost_expert_tokens: token-expert pairs whose updates are gone with it (estimated from the
            last loads).
        bytes: state that this rank sent.
        experts_moved: experts that ranks got which they did not have.
        replay: what came of the last step, where its evaluation, saving or logging is still due.
        loads: {layer: tokens per expert} for which experts are placed.
    """

    source: str
    step: int
    lost_steps: int = 0
    lost_experts: tuple[tuple[int, int], ...] = ()
    lost_expert_tokens: int = 0
    bytes: int = 0
    experts_moved: int = 0
    replay: Outcome | None = None
    loads: dict[int, list[int]] | None = None

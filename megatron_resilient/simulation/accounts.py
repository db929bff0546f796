"""Where the time of a simulated job goes, and what is left of its work."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Accounts:
    """Seconds by what they were spent on; together they are the time on the clock.

    Attributes:
        productive: steps that were kept.
        lost: steps, and parts of steps, that were done and are gone.
        stalled: training waited for saves.
        recovery: from a loss, or a change of members, to the next step.
        idle: too few nodes.
        steps: that were kept so far.
        lost_steps: that were done and are gone.
    """

    productive: float = 0.0
    lost: float = 0.0
    stalled: float = 0.0
    recovery: float = 0.0
    idle: float = 0.0
    steps: int = 0
    lost_steps: int = 0
    _stretches: deque[tuple[int, int, float]] = field(default_factory=deque)

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.productive + self.lost + self.stalled + self.recovery + self.idle

    def work(self, steps: int, step_seconds: float) -> None:
        """Adds whole steps."""
        if not steps:
            return
        self.productive += steps * step_seconds
        first, after = self.steps, self.steps + steps
        if self._stretches and self._stretches[-1][2] == step_seconds:
            first, _, _ = self._stretches.pop()
        self._stretches.append((first, after, step_seconds))
        self.steps = after

    def keep(self, step: int) -> None:
        """Says that no step up to this one can be lost any more."""
        while self._stretches and self._stretches[0][1] <= step:
            self._stretches.popleft()

    def lose(self, step: int) -> None:
        """Goes back to the state after a step."""
        self.lost_steps += self.steps - step
        while self._stretches and self._stretches[-1][1] > step:
            first, after, seconds = self._stretches.pop()
            begin = max(first, step)
            self.productive -= (after - begin) * seconds
            self.lost += (after - begin) * seconds
            if first < step:
                self._stretches.append((first, step, seconds))
        self.steps = step

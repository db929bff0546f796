"""Running time: wall-clock time without the stops between the jobs of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resilient.telemetry import Event


@dataclass(frozen=True)
class Stop:
    """A time in which no job ran.

    Attributes:
        start: When the job before wrote last, in seconds since 1970.
        end: When the next one wrote first.
    """

    start: float
    end: float


class RunClock:
    """Maps wall-clock time to running time, which stands still while no job runs.

    Attributes:
        stops: The stops between jobs, in order.
        total_seconds: Running time from the first event to the last.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        """Finds the stops: before each later `run_start`, the longest time without any event."""
        times = np.sort(np.array([event["time"] for event in events], dtype=float))
        self.stops: list[Stop] = []
        job_did = None  # when the job before took its last step or ended
        for event in events:
            if event["event"] == "run_start" and job_did is not None and event["time"] > job_did:
                between = times[(times >= job_did) & (times <= event["time"])]
                longest = int(np.argmax(np.diff(between)))
                self.stops.append(Stop(float(between[longest]), float(between[longest + 1])))
            if event["event"] in ("step", "run_end"):
                job_did = event["time"]
        knots = [(float(times[0]), 0.0)]
        for stop in self.stops:
            time, running = knots[-1]
            at_stop = running + stop.start - time
            knots += [(stop.start, at_stop), (stop.end, at_stop)]
        time, running = knots[-1]
        knots.append((float(times[-1]), running + float(times[-1]) - time))
        self._wall, self._running = np.array(knots).T
        self.total_seconds = float(self._running[-1])

    def __call__(self, times: ArrayLike) -> NDArray[np.float64]:
        """Returns the running time, in seconds from the first event, at wall-clock `times`."""
        running: NDArray[np.float64] = np.interp(
            np.asarray(times, dtype=float), self._wall, self._running
        )
        return running

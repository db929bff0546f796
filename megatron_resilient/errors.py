"""Named errors. Each message says what is wrong, where, and what to do about it."""


class ResilientError(Exception):
    """Base of all errors that this package raises on purpose.

    Attributes:
        ends_job: it is one of the whole elastic job: processes that start again cannot help.
    """

    ends_job = False


class ConfigError(ResilientError, ValueError):
    """A flag, a file or a combination of both that cannot work; raised before any state changes."""


class PatchError(ResilientError):
    """A patch cannot be declared, applied or reverted."""


class PatchDriftError(PatchError):
    """Upstream code that a patch targets or relies on is not the code that was locked."""


class TelemetryError(ResilientError, ValueError):
    """An event that cannot be written, or a file of events that cannot be read."""


class CheckpointError(ResilientError):
    """A checkpoint that cannot be written, or cannot be loaded into this model."""


class HostMemoryError(CheckpointError):
    """One snapshot takes more of the host's memory than snapshots may have."""


class DataError(ResilientError, ValueError):
    """Training data that cannot be read or tokenised as asked."""


class PlanError(ResilientError, ValueError):
    """Loads, replica counts, a topology or a placement that do not fit together."""


class UnrecoverablePlanError(PlanError):
    """The cluster has too few replica slots to hold every expert once."""


class ProfileError(ResilientError, ValueError):
    """Measured times, or a file of them, that no cost model can be made of."""


class TraceError(ResilientError, ValueError):
    """Failures, or a file of them, that no cluster can have had, or that cannot be read."""


class NonFiniteRouterError(ResilientError, FloatingPointError):
    """A router gave NaN or infinite probabilities; the step is refused before tokens are sent."""


class HookError(ResilientError, TypeError):
    """A hook into an MoE layer returned what the layer cannot go on with."""


class PlanMismatchError(ResilientError):
    """Ranks that must plan the same planned differently."""


class ReplicaMismatchError(ResilientError):
    """Replicas of one expert, which must be equal bit by bit, are not."""


class ProtocolError(ResilientError, ValueError):
    """What came over a connection is no message of ours, or too long for one."""


class RefusedError(ResilientError):
    """The coordinator does not take this process: the token, its settings, or its past."""


class CoordinatorLostError(ResilientError):
    """The coordinator stayed away longer than the limit."""

    ends_job = True


class TooFewNodesError(ResilientError):
    """Fewer nodes than the minimum stayed, and none came in time."""

    ends_job = True


class PartitionError(ResilientError):
    """This side of a cut network is the smaller one, or cannot know that it is not."""

    ends_job = True


class FencedError(ResilientError):
    """The job went on without this process while it was silent: what it holds is out of date."""


class HangError(ResilientError):
    """The main thread of this process did not come out of what it was in."""


class LostStateError(ResilientError):
    """No live rank has some of the training state, and no checkpoint can give it back."""

    ends_job = True

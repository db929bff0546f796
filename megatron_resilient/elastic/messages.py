"""The messages between the coordinator and those that connect to it, one dataclass each.

`type` on the wire is the class's `TYPE`; one name may mean another message in the other direction.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_resilient.elastic.world import HeldWorld, World

WORKER, AGENT, CLIENT = "worker", "agent", "client"

# Bits of what is asked of the next step boundary.
MEMBERSHIP_CHANGES = 1
SAVE_AND_END = 2


@dataclass(frozen=True)
class Challenge:
    """Server, first of all: prove that you know the token."""

    TYPE: ClassVar[str] = "challenge"
    nonce: str


@dataclass(frozen=True)
class Hello:
    """Client: who I am, and the proof (`mac`, filled in by `connection.connect`).

    Attributes:
        role: `worker`, `agent` or `client` (a command of a user).
        node: The node's id; empty for a client.
        id: Random, chosen once by a process: it tells a process that reconnects from a new one.
        local_rank: A worker's number on its node, from 0.
        local_world: How many workers the node has.
        pid: Process id, for people.
        world: The newest generation in which a worker was given a seat; None for none.
        nonce: Chosen by the client: the server's proof covers it.
        mac: HMAC-SHA256 of the challenge and all other fields.
    """

    TYPE: ClassVar[str] = "hello"
    role: str
    node: str
    id: str
    local_rank: int = 0
    local_world: int = 1
    pid: int = 0
    world: HeldWorld | None = None
    nonce: str = ""
    mac: str = ""


@dataclass(frozen=True)
class Welcome:
    """Server: you are known; `mac` proves that the server knows the token as well."""

    TYPE: ClassVar[str] = "welcome"
    mac: str


@dataclass(frozen=True)
class Refused:
    """Server, before it closes the connection: why."""

    TYPE: ClassVar[str] = "refused"
    error: str


@dataclass(frozen=True)
class Ready:
    """Worker: my main thread is out of any generation, has this state, and waits for a seat.

    To be sent again after a reconnect, as long as it waits.

    Attributes:
        state: What the process holds; goes into its seat.
        settings: What must be equal in all processes.
        after: The newest generation in which it was given a seat, whether it took it or not; 0 for
            none. It tells a `ready` that crosses a `world` from one that comes after it. None: not
            said, and taken to be the latest.
    """

    TYPE: ClassVar[str] = "ready"
    state: dict[str, Any]
    settings: dict[str, Any]
    after: int | None = None


@dataclass(frozen=True)
class Evidence:
    """Worker: something is wrong with this generation."""

    TYPE: ClassVar[str] = "evidence"
    generation: int
    cause: str


@dataclass(frozen=True)
class Beat:
    """Worker or agent: my watchdog lives.

    Attributes:
        generation: The worker's generation; 0 for none, and for an agent.
        progress: A count that grows while the main thread gets on.
        busy: Share of samples of the main thread outside collectives, 0 to 1; None: not measured.
        report: The latest facts, for `status`.
    """

    TYPE: ClassVar[str] = "beat"
    generation: int = 0
    progress: int = 0
    busy: float | None = None
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Paused:
    """Worker: I stand at the step boundary that was asked for, with this state, handed over.

    Attributes:
        state: As in `Ready`.
        leaving: Nodes whose state was handed over to those that stay.
    """

    TYPE: ClassVar[str] = "boundary"
    state: dict[str, Any]
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finish:
    """Worker: training is done (0), or this process ends by itself with that exit code.

    Attributes:
        exit: Exit code.
        error: Name of an error with which the whole job has to end; empty for none.
        message: What the error says.
    """

    TYPE: ClassVar[str] = "finish"
    exit: int
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class Whereabouts:
    """Worker: where my main thread is."""

    TYPE: ClassVar[str] = "where"
    in_collective: bool
    at: str


@dataclass(frozen=True)
class WorkerExit:
    """Agent: a worker has ended.

    Attributes:
        status: Its exit code; minus the signal's number if a signal ended it.
    """

    TYPE: ClassVar[str] = "worker_exit"
    local_rank: int
    status: int
    pid: int


@dataclass(frozen=True)
class Leave:
    """Agent (of its own node), or a client (of that node): it will leave at the next boundary."""

    TYPE: ClassVar[str] = "leave"
    node: str | None = None


@dataclass(frozen=True)
class StatusQuery:
    """Client: how is the job?"""

    TYPE: ClassVar[str] = "status"


@dataclass(frozen=True)
class Fence:
    """Server: that generation is over.

    Attributes:
        at: Seconds since 1970 when the coordinator first heard of the cause.
    """

    TYPE: ClassVar[str] = "fence"
    generation: int
    cause: str
    at: float


@dataclass(frozen=True)
class Seated(World):
    """Server: your generation and your rank in it."""

    TYPE: ClassVar[str] = "world"


@dataclass(frozen=True)
class BoundaryOrder:
    """Server: stop at the next step boundary. A later one says more, until a member has paused.

    Attributes:
        bits: What for; see `MEMBERSHIP_CHANGES` and `SAVE_AND_END`. 0: no longer wanted.
        leaving: Nodes that leave then.
    """

    TYPE: ClassVar[str] = "boundary"
    bits: int
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exit:
    """Server: end yourself.

    Attributes:
        code: Exit code.
        error: Name of the error in `megatron_resilient.errors`; empty for none.
        message: Its text.
    """

    TYPE: ClassVar[str] = "exit"
    code: int
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class WhereQuery:
    """Server: where is your main thread? Answered by the watchdog."""

    TYPE: ClassVar[str] = "where"


@dataclass(frozen=True)
class Stop:
    """Server to an agent: end your workers and then yourself, with that exit code.

    Attributes:
        message: Why, if it is an error.
    """

    TYPE: ClassVar[str] = "stop"
    code: int
    message: str = ""


@dataclass(frozen=True)
class Answer:
    """Server to a client: the answer to what it asked.

    Attributes:
        body: The status, or what was done.
        error: Why it cannot be done; empty if it can.
    """

    TYPE: ClassVar[str] = "answer"
    body: dict[str, Any]
    error: str = ""


ToServer = (
    Hello
    | Ready
    | Evidence
    | Beat
    | Paused
    | Finish
    | Whereabouts
    | WorkerExit
    | Leave
    | StatusQuery
)
FromServer = (
    Challenge
    | Welcome
    | Refused
    | Fence
    | Seated
    | BoundaryOrder
    | Exit
    | WhereQuery
    | Stop
    | Answer
)

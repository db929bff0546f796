"""What an agent tells its workers: the environment variables of a training process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from megatron_resilient.elastic.protocol import TOKEN_VARIABLE, read_token, split_address
from megatron_resilient.errors import ConfigError

COORDINATOR = "MEGATRON_RESILIENT_COORDINATOR"
NODE = "MEGATRON_RESILIENT_NODE"
MIN_NODES = "MEGATRON_RESILIENT_MIN_NODES"
HEARTBEAT = "MEGATRON_RESILIENT_HEARTBEAT"
FENCE_TIMEOUT = "MEGATRON_RESILIENT_FENCE_TIMEOUT"
COORDINATOR_TIMEOUT = "MEGATRON_RESILIENT_COORDINATOR_TIMEOUT"


@dataclass(frozen=True)
class WorkerEnvironment:
    """How a training process reaches the coordinator, and what is expected of it.

    Attributes:
        host: where the coordinator listens.
        port: its TCP port.
        token: the secret that all processes of the job share.
        node: id of this node.
        local_rank: this process's number on its node.
        local_world: processes of the node.
        min_nodes: the fewest nodes that may train.
        heartbeat_interval: seconds between two signs of life.
        heartbeat_timeout: silence in seconds after which a process is no longer a member.
        fence_timeout: seconds that a process has to leave a generation that is over.
        coordinator_timeout: seconds that training goes on without a coordinator.
    """

    host: str
    port: int
    token: bytes = field(repr=False)
    node: str
    local_rank: int
    local_world: int
    min_nodes: int
    heartbeat_interval: float
    heartbeat_timeout: float
    fence_timeout: float
    coordinator_timeout: float

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Self | None:
        """Reads the variables; None if no agent started this process.

        Raises:
            ConfigError: a variable is missing or cannot be read.
        """
        if COORDINATOR not in environ:
            return None
        try:
            host, port = split_address(environ[COORDINATOR])
            interval, _, timeout = environ.get(HEARTBEAT, "1:6").partition(":")
            return cls(
                host=host,
                port=port,
                token=read_token(environ),
                node=environ[NODE],
                local_rank=int(environ["LOCAL_RANK"]),
                local_world=int(environ["LOCAL_WORLD_SIZE"]),
                min_nodes=int(environ.get(MIN_NODES, "1")),
                heartbeat_interval=float(interval),
                heartbeat_timeout=float(timeout),
                fence_timeout=float(environ.get(FENCE_TIMEOUT, "30")),
                coordinator_timeout=float(environ.get(COORDINATOR_TIMEOUT, "300")),
            )
        except KeyError as missing:
            raise ConfigError(
                f"{COORDINATOR} is set but {missing.args[0]} is not: start training with "
                "`megatron-resilient run`"
            ) from None
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"environment of the agent: {error}") from None

    def variables(self) -> dict[str, str]:
        """Returns the variables that `read` reads."""
        return {
            COORDINATOR: format_address(self.host, self.port),
            TOKEN_VARIABLE: self.token.decode(),
            NODE: self.node,
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            MIN_NODES: str(self.min_nodes),
            HEARTBEAT: f"{self.heartbeat_interval:g}:{self.heartbeat_timeout:g}",
            FENCE_TIMEOUT: f"{self.fence_timeout:g}",
            COORDINATOR_TIMEOUT: f"{self.coordinator_timeout:g}",
        }


def format_address(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

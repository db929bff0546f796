"""The store of a generation: torch's TCPStore server, on the coordinator's interface only."""

import contextlib
import socket
from dataclasses import dataclass
from typing import Any


@dataclass
class StoreServer:
    """A server that lives as long as this object is open.

    Attributes:
        port: Where it listens.
    """

    port: int
    _store: Any

    def close(self) -> None:
        """Ends the server; clients of it get errors from now on."""
        self._store = None


def open_torch_store(host: str) -> StoreServer:
    """Starts a TCPStore server on a free port. Imports torch, which takes seconds the first time.

    torch's store has no authentication: whoever can reach the port can read and write it.

    Args:
        host: The address to bind to.

    Raises:
        OSError: The address cannot be bound.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as undo:
        listener = socket.socket(family, socket.SOCK_STREAM)
        undo.callback(listener.close)
        listener.bind((host, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        # Without a descriptor of ours it would listen on all interfaces.
        store = TCPStore(
            own,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
            use_libuv=True,
        )
        listener.detach()  # the server closes it
        undo.pop_all()
    return StoreServer(port, store)

"""The process's TCP sockets, and how to cut those of a generation.

A thread that waits in gloo for a peer comes back when the connection ends, and a peer that still
waits for us hears of it too. Sockets are known by their inode: the number of a descriptor is soon
that of another file.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator

_DESCRIPTORS = "/proc/self/fd"


def tcp_inodes() -> frozenset[int]:
    """Returns the inodes of all TCP sockets of this process that do not listen."""
    return frozenset(os.fstat(sock.fileno()).st_ino for sock in _tcp_sockets())


def cut_sockets(spare: Collection[int]) -> int:
    """Ends both directions of the TCP connections of this process.

    The descriptors stay: their owners close them. For any thread.

    Args:
        spare: inodes of those to leave alone: `tcp_inodes()` from before the generation, and
            `Member.spared_inodes()`.

    Returns:
        How many were cut.
    """
    cut = 0
    for sock in _tcp_sockets():
        if os.fstat(sock.fileno()).st_ino not in spare:
            with contextlib.suppress(OSError):  # not connected any more
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yields duplicates of the TCP sockets that do not listen; each is closed after its turn."""
    for name in os.listdir(_DESCRIPTORS):
        # A duplicate first: what it is then stays so, whatever its owner does meanwhile.
        try:
            descriptor = os.dup(int(name))
        except OSError:  # closed since
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as sock:
            internet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if (
                internet
                and sock.type == socket.SOCK_STREAM
                and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ):
                yield sock

"""Namespaces of its own for a program, which end with it however it ends.

The kernel does the cleaning: the program is process 1 of a new process namespace, so all that it
started is killed with it, and it is killed with the process that made it. Networks and mounts that
no process uses are then taken down.
"""

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_NETNS = Path("/run/netns")
_NAMESPACES = "CLONE_NEWNS", "CLONE_NEWNET", "CLONE_NEWPID"


def obstacle() -> str | None:
    """Says in one line why no testbed can be built here, and what to do; None if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux: run the testbed in a Linux machine"
    if os.geteuid() != 0:
        return "network namespaces need root: run it with sudo, or as root in a container"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)"
    pid = os.fork()
    if pid == 0:
        try:
            _unshare()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        return (
            f"namespaces are not allowed here ({os.strerror(status)}): in a container, start it "
            "with --privileged (CAP_SYS_ADMIN and CAP_NET_ADMIN)"
        )
    return None


def confine(body: Callable[[], int], hosts: str) -> int:
    """Runs `body` in new mount, network and process namespaces and returns its status.

    SIGTERM, SIGINT and SIGHUP are passed on to it as they come; SIGKILL to the caller ends it too.
    The caller itself is left in the new mount and network namespaces: it should end afterwards.

    Args:
        body: runs as process 1; returns an exit status.
        hosts: what /etc/hosts says in there: torch asks for the names of addresses, and warns.

    Returns:
        What `body` returned, or 128 and the signal that ended it.

    Raises:
        OSError: the namespaces cannot be made; see `obstacle`.
    """
    # Only this process has the write end: it ends, the pipe ends.
    alive, token = os.pipe()
    _unshare()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(_first_process(body, hosts, alive, token))
    os.close(alive)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(token)
    return status if status >= 0 else 128 - status


def _unshare() -> None:
    flags = 0
    for name in _NAMESPACES:
        flags |= getattr(os, name)
    os.unshare(flags)


def _first_process(body: Callable[[], int], hosts: str, alive: int, token: int) -> int:
    """What process 1 of the new namespaces does; its end is theirs."""
    try:
        os.close(token)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.set_blocking(alive, False)
        try:
            os.read(alive, 1)
        except BlockingIOError:
            pass
        else:
            return 1  # it was killed before it could take us along
        os.setsid()  # a Ctrl-C at the terminal comes once, from the caller
        _mount(libc, "none", "/", None, _MS_REC | _MS_PRIVATE)
        _mount(libc, "proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        _NETNS.mkdir(parents=True, exist_ok=True)
        _mount(libc, "tmpfs", str(_NETNS), "tmpfs", 0)
        own = _NETNS / ".hosts"
        own.write_text(hosts, encoding="ascii")
        _mount(libc, str(own), "/etc/hosts", None, _MS_BIND)
        return body()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int) -> None:
    if libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'private'}: {os.strerror(number)}", target)

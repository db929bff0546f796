"""Child processes that die with their parent, by fork alone or by fork and exec."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def fork(
    body: Callable[[], NoReturn], *, stdout: int | None = None, stderr: int | None = None
) -> int:
    """Runs `body` in a child, which is killed when the calling thread's process dies.

    The child has a process group of its own: a Ctrl-C at the terminal reaches its parent alone, and
    what the child starts can be killed with it.

    Args:
        body: never returns; see `execute` and `call`.
        stdout: descriptor to become its standard output.
        stderr: and its standard error.

    Returns:
        The child's pid, which is also its process group.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child did it already, or has gone
            os.setpgid(pid, pid)
        return pid
    try:
        _prepare(parent, stdout, stderr)
        body()
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
    finally:
        os._exit(1)


def execute(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes another program, looked up on PATH."""
    os.execvpe(command[0], list(command), dict(environment))


def call(function: Callable[[], object]) -> NoReturn:
    """Ends the process with what `function` does, as Python ends a script."""
    status = 0
    try:
        function()
    except SystemExit as leaving:
        status = _status(leaving)
    except BaseException:
        status = 1
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as leaving:  # a hook of ours says one line and a status
            status = _status(leaving)
    with contextlib.suppress(BaseException):  # what remains must not keep the process
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signals the process group of a child: itself, and what it started."""
    with contextlib.suppress(ProcessLookupError):  # all have gone
        os.killpg(pid, number)


def poll(pid: int) -> int | None:
    """Returns how a child ended, minus the signal's number if one ended it; None if it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _prepare(parent: int, stdout: int | None, stderr: int | None) -> None:
    os.setpgid(0, 0)
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for descriptor, own in ((stdout, 1), (stderr, 2)):
        if descriptor is not None:
            os.dup2(descriptor, own)


def _status(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1

"""How errors of ours end a training process: one line on stderr and a status that says so."""

import os
import sys
from types import TracebackType

from megatron_resilient.errors import ConfigError, ResilientError

DEBUG_VARIABLE = "MEGATRON_RESILIENT_DEBUG"
# Exit statuses of a training process; its agent starts it again after any other but 0.
WRONG_USAGE = 2
JOB_IS_OVER = 3


def exit_code(error: ResilientError) -> int:
    """Returns the exit status for an error: of usage, of an elastic job as a whole, or else 1."""
    if isinstance(error, ConfigError):
        return WRONG_USAGE
    return JOB_IS_OVER if error.ends_job else 1


def wants_traceback() -> bool:
    """Tells whether MEGATRON_RESILIENT_DEBUG asks for tracebacks."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def say(error: ResilientError) -> None:
    """Writes the error to stderr, with the rank; wrong usage, the same everywhere, once a node."""
    if isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    script = os.path.basename(sys.argv[0])
    where = "" if isinstance(error, ConfigError) else f" rank {os.environ.get('RANK', '0')}:"
    print(f"{script}:{where} {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def show_uncaught() -> None:
    """Has an uncaught error of ours, at the top of a script, end the process in the same way."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ResilientError) or wants_traceback():
            previous(kind, error, trace)
            return
        say(error)
        sys.exit(exit_code(error))

    sys.excepthook = hook

"""`run`: the user's main function, again for each generation of an elastic run."""

import sys
from collections.abc import Callable
from typing import Any

from megatron_resilient import error_report
from megatron_resilient.errors import ResilientError
from megatron_resilient.mcore.elastic_arguments import is_elastic


def run(main: Callable[[], Any]) -> None:
    """Runs `main`, which parses the command line and calls Megatron's `pretrain`.

    Where an agent started this process (`megatron-resilient run`), `main` is called anew whenever
    the set of nodes has changed, and training goes on from memory.

    An error of ours ends the process with one line on stderr and a non-zero status: 2 for wrong
    usage, 3 if an elastic job is over, 1 for anything else. MEGATRON_RESILIENT_DEBUG=1 shows the
    traceback as well. Other exceptions pass through.
    """
    exit_code = 1
    try:
        _train(main)
        exit_code = 0
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    except ResilientError as error:
        exit_code = error_report.exit_code(error)
        if error_report.wants_traceback():
            raise
        error_report.say(error)
        sys.exit(exit_code)
    finally:
        _close_record(exit_code)


def _train(main: Callable[[], Any]) -> None:
    if not is_elastic():
        main()
        return
    from megatron_resilient.elastic.member import Member
    from megatron_resilient.mcore.recovery.session import Session

    member = Member.from_environment()
    assert member is not None
    Session(member).run(main)


def _close_record(exit_code: int) -> None:
    hooks = sys.modules.get("megatron_resilient.mcore.train_hooks")
    if hooks is not None:
        hooks.close(exit_code)

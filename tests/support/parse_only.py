"""Parses command lines of scripts that would take long: reads [[program, flags], ...] from stdin.

Prints a JSON line for each, null if the flags are right, else what is wrong with them. One process
does all of them: what they import is imported once.
"""

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

_parse_args = argparse.ArgumentParser.parse_args


class Parsed(BaseException):
    """The flags are right; nothing more is to happen."""


def parse_and_stop(self, args=None, namespace=None):
    """Takes the place of parse_args in the scripts."""
    _parse_args(self, args, namespace)
    raise Parsed


def script(path: str, flags: list[str]) -> None:
    if "parse_args" not in Path(path).read_text(encoding="utf-8"):
        raise SystemExit(f"{path} does not parse its command line")  # and would do its work
    sys.argv = [path, *flags]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
        raise SystemExit(f"{path} does not parse its command line first")
    finally:
        sys.path.pop(0)


def training(flags: list[str]) -> None:
    """Flags of a training script: Megatron's and ours, without --help's texts."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    from megatron_resilient.config import add_flags

    ArgumentGroupFactory._get_field_docstrings = lambda self, config: dict.fromkeys(
        config.__dataclass_fields__, ""
    )
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_flags(parser)
    parse_and_stop(parser, flags)


def torchrun(flags: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    args = _parse_args(get_args_parser(), flags)
    if not Path(args.training_script).is_file():
        raise SystemExit(f"{args.training_script}: no such script")
    training(args.training_script_args)


if __name__ == "__main__":
    answers = sys.stdout
    argparse.ArgumentParser.parse_args = parse_and_stop
    for program, flags in json.load(sys.stdin):
        said = io.StringIO()
        wrong: str | None = None
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                known = {"torchrun": torchrun, "training": training}
                known[program](flags) if program in known else script(program, flags)
            except Parsed:
                pass
            except SystemExit as stop:
                wrong = f"{stop}: {said.getvalue()[-500:]}"
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
        print(json.dumps(wrong), file=answers, flush=True)

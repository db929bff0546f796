"""Runs a training script on emulated nodes: network namespaces with shaped links.

    sudo .venv/bin/python tools/testbed.py run --nodes 2 --ranks-per-node 2 \
        --inter-mbit 100 --intra-mbit 400 -- SCRIPT ARGS...

Each rank gets the variables that torchrun sets, gloo's interface, and MEGATRON_RESILIENT_NODE_MAP,
the node of each rank (`0,0,1,1`). What ranks print has their name before it. The status is that of
the first rank that failed; the others are then ended. Nothing is left of it, even after SIGKILL.

Needs root and iproute2. `check` says whether it can run here: status 0 if so. docs/testbed.md tells
what can be measured on it, and what not.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed_jail import confine, obstacle
from testbed_links import Layout, commands, hosts
from testbed_ranks import python_command, run_ranks


def build(layout: Layout) -> str | None:
    """Builds the network in this namespace; returns what went wrong in one line, or None."""
    for command in commands(layout):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"status {done.returncode}"
            return (
                f"`{' '.join(command)}` failed: {said}; it needs iproute2 and a kernel with veth, "
                "bridge and tbf (modprobe sch_tbf)"
            )
    return None


def run(layout: Layout, command: Sequence[str]) -> int:
    """Builds the network and runs the command in each of its namespaces; returns the status."""
    error = build(layout)
    if error is not None:
        print(f"testbed.py: {error}", file=sys.stderr)
        return 2
    return run_ranks(layout, command)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; what cannot work ends with status 2."""
    default = Layout()
    parser = argparse.ArgumentParser(prog="testbed.py", description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("check", help="say whether the testbed can run here")
    runner = actions.add_parser("run", help="run a Python script on the emulated nodes")
    runner.add_argument("--nodes", type=int, default=default.nodes, help="default: %(default)s")
    runner.add_argument(
        "--ranks-per-node", type=int, default=default.ranks_per_node, help="default: %(default)s"
    )
    for name, what in (("inter", "to other nodes"), ("intra", "inside its node")):
        runner.add_argument(
            f"--{name}-mbit",
            type=float,
            default=getattr(default, f"{name}_mbit"),
            help=f"Mbit/s of a rank's link {what}, each way; default: %(default)s",
        )
    runner.add_argument("script", help="Python script; put -- before it")
    runner.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.action == "run":
        try:
            options.layout = Layout(
                options.nodes, options.ranks_per_node, options.inter_mbit, options.intra_mbit
            )
        except ValueError as error:
            parser.error(str(error))
        if not Path(options.script).is_file():
            parser.error(f"no such script: {options.script}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    found = obstacle()
    if found is not None:
        print(f"testbed.py: {found}", file=sys.stderr)
        return 2
    if options.action == "check":
        print("the testbed can run here")
        return 0
    command = python_command(options.script, options.arguments)
    return confine(lambda: run(options.layout, command), hosts(options.layout))


if __name__ == "__main__":
    sys.exit(main())

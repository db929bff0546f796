"""A trace of failures, sped up, played against real processes: ours and restart from checkpoints.

    .venv/bin/python benchmarks/replay.py                 # Bamboo's P3 trace, if it is there
    .venv/bin/python benchmarks/replay.py --generated     # exponential failures

Ten emulated nodes of one rank on this machine, whose steps also sleep, so that they seem to compute
side by side (benchmarks/replay_script.py). Both systems train the same small model on the same
global batch, and see the same events at the same seconds: SIGKILL to a node for each loss, a new
one for each arrival. Samples that count are the steps that are kept, times the batch: one that is
lost and done again counts once. The clock of each starts at the end of its third step.

First, runs of their own (not those that are judged) measure what steps, losses, joins, starts and
saves cost each system; the simulator then predicts both from these costs and the trace, and chooses
how often they save: as pays for restart, which goes back to what is saved. Ends with status 1 if a
prediction is more than 15 % off what was then measured. Everything is on the CPU: nothing here says
how fast a GPU would be.

Writes samples.csv, replay.png, results.json, and the costs as calibration files.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.replay_accounts import sped_up, without_notice
from benchmarks.replay_calibrate import calibrate_ours, calibrate_restart
from benchmarks.replay_costs import best_interval, predict
from benchmarks.replay_report import Judged, console, show, show_costs, write
from benchmarks.replay_run import replay
from benchmarks.replay_systems import BATCH, GROUP, NODES, Ours, Restart
from megatron_resilient.commands.flag_types import above_0, count, folder
from megatron_resilient.errors import ConfigError
from megatron_resilient.simulation.costs import Costs, read_costs, write_costs
from megatron_resilient.simulation.failures import draw_failures
from megatron_resilient.simulation.trace import Trace
from megatron_resilient.simulation.trace_files import read_trace
from tools.reproduce.spot_segment import MINUTES, add_trace_flag, ten_of

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.15
MTBF_MINUTES = 8.0  # as tools/reproduce/lazarus_spot.py draws where there is no trace
REPAIR_MINUTES = 10.0
NODES_PER_FAILURE = 1.5
# In this order: how often both save follows from the costs of restart.
SYSTEMS = {"restart": Restart, "ours": Ours}
CALIBRATE = {"restart": calibrate_restart, "ours": calibrate_ours}
CALIBRATION_SECONDS = 600  # no calibration takes longer, nor what a replay does beside its trace


def trace_of(args: argparse.Namespace) -> Trace:
    """Returns the events that are played, not yet sped up."""
    if args.trace and not args.generated:
        whole = read_trace(args.trace).window(0.0, 60 * args.minutes)
        return ten_of(whole, args.seed)
    return draw_failures(
        NODES,
        60 * MTBF_MINUTES,
        60 * args.minutes,
        seed=args.seed,
        repair_seconds=60 * REPAIR_MINUTES,
        nodes_per_failure=NODES_PER_FAILURE,
    )


def one(name: str, trace: Trace, args: argparse.Namespace, scratch: Path) -> None:
    """Calibrates a system, predicts, and plays the trace right after that.

    Writes NAME.json, its costs, and NAME-judged.json into the folder of results.
    """
    path = args.out / f"{name}.json"
    if args.costs is None:
        console.print(f"calibrating {name}")
        signal.alarm(CALIBRATION_SECONDS)
        kept = args.out / f"{name}-calibration.json"
        write_costs(CALIBRATE[name](scratch / f"calibrate-{name}", kept), path)
        signal.alarm(0)
    elif args.costs.resolve() != args.out.resolve():
        shutil.copyfile(args.costs / path.name, path)
    if not args.calibrate_only:
        of_restart = read_costs((args.costs or args.out) / "restart.json")
        interval = best_interval("restart", without_notice(trace), of_restart)
        found = judge(name, trace, read_costs(path), interval, scratch)
        found.write(args.out / f"{name}-judged.json")


def judge(name: str, trace: Trace, costs: Costs, interval: int, scratch: Path) -> Judged:
    """Predicts, then plays the trace."""
    seen = without_notice(trace) if name == "restart" else trace
    result = predict(name, seen, costs, interval)
    console.print(
        f"{name}: predicted {BATCH * result.steps} samples, a save every {interval} steps; playing "
        f"{trace.seconds:.0f} s"
    )
    signal.alarm(int(trace.seconds) + CALIBRATION_SECONDS)
    with SYSTEMS[name](scratch / name, interval) as system:
        marks = replay(system, trace)
        load = os.getloadavg()[0]
    signal.alarm(0)
    found = Judged(BATCH * result.steps, marks, costs.step_seconds, interval, load)
    console.print(f"{name}: {found.samples:.0f} samples")
    return found


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, Trace]:
    """Returns flags and the trace; what cannot be played ends with status 2, before any process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_trace_flag(parser)
    parser.add_argument("--generated", action="store_true", help="draw failures instead")
    parser.add_argument("--seed", type=count(0), default=0, help="of what is drawn; default: 0")
    parser.add_argument(
        "--minutes",
        type=above_0(),
        default=float(MINUTES),
        help="of the trace; default: %(default)g",
    )
    parser.add_argument(
        "--speed-up", type=above_0(), default=20.0, help="of its time; default: %(default)g"
    )
    parser.add_argument(
        "--out", type=folder, default=ROOT / "runs" / "replay", help="default: %(default)s"
    )
    parser.add_argument("--costs", type=Path, help="folder of an earlier call: its costs")
    parser.add_argument("--calibrate-only", action="store_true", help="write costs, play nothing")
    parser.add_argument(
        "--system",
        choices=list(SYSTEMS),
        help="play this one only; what an earlier call with this --out knows of the other is used",
    )
    args = parser.parse_args(arguments)
    if args.calibrate_only and args.costs:
        parser.error("--calibrate-only and --costs: costs are measured, or those of a folder")
    played = [args.system] if args.system else list(SYSTEMS)
    # How often both save follows from the costs of restart, which must be known by then.
    known = {*played, "restart"} if args.costs else {"restart"} - set(played)
    for name in sorted(known) if not args.calibrate_only else ():
        try:
            read_costs((args.costs or args.out) / f"{name}.json")
        except (ConfigError, OSError) as error:
            parser.error(f"no costs of {name}: {error}: calibrate it first")
    trace = sped_up(trace_of(args), args.speed_up)
    if len(trace.start) < GROUP:
        parser.error(f"{trace.source}: begins with {len(trace.start)} nodes: {GROUP} are needed")
    return args, trace


def main() -> int:
    """Calibrates, predicts, plays, and compares."""
    args, trace = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    # Whatever ends the benchmark unwinds the stack, and with it ends the jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("replay: it took too long"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        try:
            for name in [args.system] if args.system else SYSTEMS:
                one(name, trace, args, Path(scratch))
        except (RuntimeError, TimeoutError):
            # The logs tell why: they stay, and the error goes on.
            shutil.copytree(scratch, args.out / "failed", dirs_exist_ok=True)
            raise
    if not all((args.out / f"{name}.json").exists() for name in SYSTEMS):
        console.print(f"{args.out}: the other system is still to be played")
        return 0
    costs = {name: read_costs(args.out / f"{name}.json") for name in ("ours", "restart")}
    show_costs(costs)
    if args.calibrate_only:
        return 0
    if not all((args.out / f"{name}-judged.json").exists() for name in SYSTEMS):
        console.print(f"{args.out}: the other system is still to be played")
        return 0
    judged = {name: Judged.read(args.out / f"{name}-judged.json") for name in costs}
    write(args.out, judged, trace)
    is_p3 = bool(args.trace) and not args.generated
    show(judged, trace, costs, is_p3, args.speed_up)
    console.print(f"{time.monotonic() - started:.0f} s; {args.out}")
    return 0 if all(abs(own.off) <= BAR for own in judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

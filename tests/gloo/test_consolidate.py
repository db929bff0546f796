"""Checkpoints with a file for each expert made into stock's: stock Megatron goes on from them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_resilient import cli
from megatron_resilient.mcore.checkpointing.consolidation_ranks import ranks_of
from tests.gloo.test_expert_checkpoints import (
    END,
    MODEL,
    PARTIAL,
    REPLICAS,
    SAVED,
    expert_file,
    flip,
    manifest,
)
from tests.support.layouts import DISTOPT, EP2, EP4, PP2, TP2, VPP2
from tests.support.processes import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TIED = {"untie_embeddings_and_output_weights": False}
LAYOUTS = {
    "EP4 shared expert": EP4 | {"moe_shared_expert_intermediate_size": 64},
    "EP2 TP2 PP2 distopt": EP2 | TP2 | PP2 | DISTOPT,
    "EP2 VPP2 bf16 distopt tied dropout": EP2
    | VPP2
    | DISTOPT
    | TIED
    | {"bf16": True, "hidden_dropout": 0.1},
}


def stock(model: dict) -> dict:
    return {name: value for name, value in model.items() if not name.startswith("resilient")}


def consolidate(pools, directory, output):
    """Runs the ranks of the command in a pool, which has imported Megatron already."""
    output.mkdir()
    return pools.plugin.call(
        "megatron_resilient.mcore.checkpointing.consolidation:consolidate",
        world=ranks_of(manifest(directory, SAVED).model),
        directory=str(directory),
        step=SAVED,
        newest=False,
        folder=str(output),
    )[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_stock_goes_on_with_the_same_losses(pools, tmp_path, name):
    layout = MODEL | LAYOUTS[name]
    whole = pools.plugin.run(**layout, save=tmp_path / "ours").ok()
    found = consolidate(pools, tmp_path / "ours", tmp_path / "stock")
    assert (found["step"], found["exact"], found["warnings"]) == (SAVED, True, [])
    model = stock(layout) | {"load": tmp_path / "stock"}
    # Stock's distributed optimizer loads nothing without Apex or Transformer Engine; ours does.
    plain = pools.stock.run(**(model | {"use_distributed_optimizer": False})).ok()
    distributed = pools.plugin.run(**(model | DISTOPT)).ok()
    same, other = (distributed, plain) if "distopt" in name else (plain, distributed)
    assert same.numbers == whole.numbers[SAVED:]
    assert other.losses == pytest.approx(whole.losses[SAVED:], rel=1e-5)


def test_the_command_killed_and_run_again(pools, tmp_path):
    """Partial, with replicas and a damaged expert; then at another size."""
    ours, out = tmp_path / "ours", tmp_path / "out"
    model = MODEL | PARTIAL | REPLICAS
    pools.plugin.run(**model, save=ours).ok()
    expert, _ = next(e for e in manifest(ours, END).experts().items() if e[1] == END)
    flip(expert_file(ours, END, expert))
    command = [sys.executable, "-m", "megatron_resilient.cli", "checkpoint", "consolidate"]
    command += [str(ours), str(out), "--json"]

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    staged = tmp_path / ".out.consolidating"
    until(lambda: any(staged.glob("iter_*")) or first.poll() is not None, seconds=120)
    assert first.poll() is None
    first.kill()
    first.wait()
    until(lambda: not processes_that_name(staged), seconds=120)
    assert not out.exists()
    assert not (staged / "latest_checkpointed_iteration.txt").exists()

    second = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert second.returncode == 0, second.stderr
    document = json.loads(second.stdout)
    assert (document["step"], document["exact"], document["experts"]) == (END, False, 16)
    assert f"WARNING: {document['stale_experts']} of 16 experts are of older steps" in second.stderr
    assert f"the version of step {END} is damaged" in second.stderr
    assert not staged.exists()
    assert len(list(out.iterdir())) == 2
    assert cli.main(["checkpoint", "consolidate", str(ours), str(out)]) == 2

    model |= {"train_iters": END + 2, "override_opt_param_scheduler": True}
    expected = pools.plugin.run(**model, load=ours).ok()
    resumed = pools.stock.run(**stock(model), load=out).ok()
    assert len(resumed.losses) == 2
    assert resumed.losses == pytest.approx(expected.losses, rel=1e-5)
    again = pools.plugin.run(**(model | EP2), load=out, save=tmp_path / "new").ok()
    assert again.losses == pytest.approx(expected.losses, rel=1e-5)

    flip(expert_file(ours, END, None))
    command[-2:] = [str(tmp_path / "other"), "--step", str(END)]
    third = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert third.returncode == 1
    assert f"step_{END:08d}.json" in third.stderr
    assert third.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*other*"))


def processes_that_name(path) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path).encode() in each.read_bytes():
                found.append(each.parent.name)
        except OSError:  # it ended
            continue
    return found

"""Each upstream defect that a patch of group `fixes` mends: stock fails so, ours does not.

Stock here is the plugin without the one patch in question, so that only one defect shows.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_resilient.patches import REGISTRY

from tests.support.pretrain_pool import TINY

SAVED, END = 3, 6
MODEL = TINY | {"lr": 3e-3, "save_interval": SAVED, "train_iters": END}
DISTOPT = {"use_distributed_optimizer": True}
RESHARDABLE = DISTOPT | {"dist_ckpt_optim_fully_reshardable": True}
EP1, EP2, EP4 = ({"expert_model_parallel_size": size} for size in (1, 2, 4))
KINDS = {
    "EP1": EP1,
    "EP4": EP4,
    "EP1 reshardable": EP1 | RESHARDABLE,
    "EP4 reshardable": EP4 | RESHARDABLE,
    "EP2 distopt": EP2 | DISTOPT,
    "EP2 reshardable": EP2 | RESHARDABLE,
}
TRACKER = "latest_checkpointed_iteration.txt"
STEPS = "tests.support.adam_steps:step_counts"

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Saved:
    """Runs of six steps that saved after the third, one per kind of KINDS."""

    def __init__(self, pools, folder: Path):
        self._pools, self._folder, self._runs = pools, folder, {}

    def path(self, kind):
        """Returns the folder of the checkpoints of a kind."""
        self.run(kind)
        return self._folder / kind

    def run(self, kind):
        """Returns the run itself, which was not interrupted."""
        if kind not in self._runs:
            flags = MODEL | KINDS[kind] | {"save": self._folder / kind}
            self._runs[kind] = self._pools.plugin.run(**flags, inspect=STEPS).ok()
        return self._runs[kind]

    def resume(self, kind, saved_by=None, **options):
        """Does the last three steps again, with the flags of `kind`."""
        load = {"load": self.path(saved_by or kind), "ckpt_step": SAVED}
        return self._pools.plugin.run(**(MODEL | KINDS[kind] | load), **options)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    return Saved(pools, tmp_path_factory.mktemp("saved"))


def assert_goes_on(resumed, whole):
    assert resumed.ok().numbers == whole.numbers[SAVED:]


def assert_wrong_from_the_second_step_on(resumed, whole):
    """No error, and numbers that look like training but are not."""
    losses, expected = resumed.ok().losses, whole.losses[SAVED:]
    assert losses[0] == expected[0]
    for loss, right in zip(losses[1:], expected[1:], strict=True):
        assert abs(loss - right) > 1e-3, (losses, expected)
        assert abs(loss - right) < 0.5, (losses, expected)


def test_every_fix_has_a_test_here():
    """Found by the ids in this file: a new fix has to come with a test."""
    text = Path(__file__).read_text()
    fixes = {patch.id for patch in REGISTRY.patches if patch.group == "fixes"}
    assert fixes == set(re.findall(r'"(fixes\.[a-z-]+)"', text))


def test_compile_helpers_exits():
    program = """
import sys
from megatron.core.datasets import utils
from megatron_resilient.patching import apply

try:
    utils.compile_helpers()
except SystemExit as stop:
    print("stock exits with", stop.code)
fix = apply.default_registry().by_id["fixes.compile-helpers"]
with apply.patched(("fixes",), registry=type(apply.default_registry())((fix,))):
    utils.compile_helpers()
from megatron.core.datasets import helpers_cpp
print("ours has", helpers_cpp.build_sample_idx_int32.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "stock exits with 1" in done.stdout
    assert "ours has build_sample_idx_int32" in done.stdout
    assert "make" in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["EP2 distopt", "EP2 reshardable"])
class TestDistributedOptimizerWithTorchsAdamW:
    def test_ours(self, saved, kind):
        resumed = saved.resume(kind, inspect=STEPS)
        assert_goes_on(resumed, saved.run(kind))
        assert resumed.inspected == saved.run(kind).inspected == [[END]] * 4

    def test_fresh_optimizer_has_no_step_to_assert(self, saved, kind):
        resumed = saved.resume(kind, without={"fixes.adam-state-before-load"})
        assert "assert len(steps) == 1" in resumed.error

    def test_step_is_shared(self, saved, kind):
        resumed = saved.resume(kind, without={"fixes.adam-step-shared"}, inspect=STEPS)
        assert_wrong_from_the_second_step_on(resumed, saved.run(kind))
        # Counted up once per parameter of the rank.
        assert all(max(steps) > 2 * END for steps in resumed.inspected)

    def test_state_is_copied_wrong(self, saved, kind):
        resumed = saved.resume(kind, without={"fixes.optimizer-state-copy"})
        expected = {
            "EP2 distopt": "a view of a leaf Variable that requires grad is being used in an "
            "in-place operation",
            "EP2 reshardable": "KeyError: 'step'",
        }
        assert expected[kind] in resumed.error


def test_step_is_cut_like_a_shard(pools, saved, tmp_path):
    without = {"fixes.adam-step-in-buckets"}
    flags = MODEL | KINDS["EP2 distopt"]
    whole = pools.plugin.run(**flags, save=tmp_path, without=without).ok()
    load = {"load": tmp_path, "ckpt_step": SAVED, "inspect": STEPS}
    stock = pools.plugin.run(**flags, **load, without=without)
    assert_wrong_from_the_second_step_on(stock, whole)
    assert stock.inspected == [[END - SAVED]] * 4  # counted from 0 again
    # The checkpoint was whole: with the fix it loads right.
    ours = pools.plugin.run(**flags, **load)
    assert_goes_on(ours, whole)
    assert ours.inspected == [[END]] * 4


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        ("EP4", "EP1", "Could not find parameter group with key"),
        ("EP1", "EP4", "Expected 2 entries in state dict, but got"),
        ("EP4 reshardable", "EP1 reshardable", "KeyError: 'optimizer'"),
        ("EP1 reshardable", "EP4 reshardable", "Expected 2 entries in state dict, but got"),
    ],
)
def test_optimizers_are_chained_only_with_expert_parallelism(saved, written, read, message):
    stock = saved.resume(read, saved_by=written, without={"fixes.optimizer-layout"})
    assert message in stock.error
    ours = saved.resume(read, saved_by=written, inspect=STEPS).ok()
    assert ours.inspected == [[END]] * 4
    for step, expected in zip(ours.numbers, saved.run(written).numbers[SAVED:], strict=True):
        assert step == pytest.approx(expected, rel=1e-6)


def test_malformed_tracker_file_is_no_success(pools, saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved.path("EP4"), folder)
    (folder / TRACKER).write_text("iter_0000")
    run = MODEL | EP4 | {"load": folder, "as_script": True}
    stock = pools.plugin.run(**run, without={"fixes.tracker-malformed"})
    assert (stock.exits, stock.losses) == ([None] * 4, [])  # sys.exit(): status 0, nothing trained
    assert all("exit" in answer for answer in stock.answers)
    ours = pools.plugin.run(**run)
    assert ours.exits == [1] * 4
    assert f"{folder / TRACKER} holds 'iter_0000', not an iteration" in ours.outputs[0]
    assert "iter_0000003, iter_0000006" in ours.outputs[0]


def test_checkpoints_without_a_tracker_file_are_not_passed_over(pools, saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved.path("EP4"), folder)
    (folder / TRACKER).unlink()
    run = MODEL | EP4 | {"load": folder, "as_script": True}
    stock = pools.plugin.run(**run, without={"fixes.load-checkpoint"}).ok()
    assert (
        stock.numbers == saved.run("EP4").numbers
    )  # from random weights, as if for the first time
    ours = pools.plugin.run(**run)
    assert ours.exits == [1] * 4
    assert f"{folder}: checkpoints without {TRACKER}" in ours.outputs[0]


def test_load_folder_without_a_checkpoint(pools, saved, tmp_path):
    """A mistyped --load is an error; a first start with --load and --save on one folder is none."""
    run = MODEL | EP4 | {"train_iters": 1, "load": tmp_path / "typo", "as_script": True}
    stock = pools.plugin.run(**run, without={"fixes.load-checkpoint"}).ok()
    assert stock.numbers == saved.run("EP4").numbers[:1]
    ours = pools.plugin.run(**run)
    assert ours.exits == [1] * 4
    assert f"--load {tmp_path / 'typo'}: there is no checkpoint" in ours.outputs[0]
    first = pools.plugin.run(**run, save=tmp_path / "typo").ok()
    assert first.numbers == stock.numbers


def test_expert_stream_of_rank_0_is_not_everybodys(pools, tmp_path):
    def streams(folder, **options):
        model = TINY | EP4 | {"save_interval": 1, "override_opt_param_scheduler": True}
        options["inspect"] = "tests.support.rng_streams:expert_stream"
        saved = pools.plugin.run(**model, train_iters=1, save=folder, **options).ok()
        loaded = pools.plugin.run(**model, train_iters=2, load=folder, **options).ok()
        assert len(set(saved.inspected)) == 4
        return saved.inspected, loaded.inspected

    saved, loaded = streams(
        tmp_path / "stock", without={"fixes.expert-rng", "fixes.load-checkpoint"}
    )
    assert loaded == [saved[0]] * 4
    saved, loaded = streams(tmp_path / "ours")
    assert loaded == saved


def test_checkpoints_of_stock_and_of_the_plugin_are_exchanged(pools, tmp_path):
    """Stock reads what the plugin wrote, and the plugin what stock wrote, with EP1 and AdamW."""
    model = MODEL | EP4
    for writer, reader in ((pools.stock, pools.plugin), (pools.plugin, pools.stock)):
        folder = tmp_path / ("stock" if writer is pools.stock else "plugin")
        whole = writer.run(**model, save=folder).ok()
        resumed = reader.run(**model, load=folder, ckpt_step=SAVED)
        assert_goes_on(resumed, whole)

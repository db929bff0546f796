"""Checkpoints with a file for each expert, through pretrain(): whole, partial, damaged, refused."""

import os
import re
import signal
from pathlib import Path

import pytest

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.lock import RunLock
from tests.support.layouts import DISTOPT, EP2, EP4, ETP2, PP2, TP2, VPP2
from tests.support.pretrain_pool import TINY
from tests.support.telemetry import events_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SAVED, END = 3, 6
FORMAT = {"resilient_checkpoint_format": "experts", "resilient_checkpoint_keep": 0}
MODEL = TINY | FORMAT | {"lr": 3e-3, "save_interval": SAVED, "train_iters": END}
# A window of loads ends with the save: the resumed run plans from the same ones.
REPLICAS = {
    "resilient_slots_per_rank": 4,
    "resilient_rebalance_interval": SAVED,
    "resilient_rebalance_threshold": 0,
}
LAYOUTS = {
    "EP4": EP4,
    "EP2 distopt": EP2 | DISTOPT,
    "EP4 replicas": EP4 | REPLICAS,
    "EP4 replicas distopt bf16": EP4 | REPLICAS | DISTOPT | {"bf16": True},
    "EP2 TP2 PP2 distopt": EP2 | TP2 | PP2 | DISTOPT,
    "EP2 TP2 as experts": EP2 | ETP2,
    "EP2 VPP2": EP2 | VPP2,
    "EP4 dropout": EP4 | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    # A buffer that changes before the optimizer steps, when a copy may not be complete.
    "EP4 expert bias": EP4
    | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}
PARTIAL = EP4 | {"resilient_checkpoint_experts": 2, "save_interval": 1}


def manifest(folder: Path, step: int):
    return places.read_manifest(places.manifest_path(folder, step))


def expert_file(folder: Path, step: int, expert: tuple[int, int]) -> Path:
    files = manifest(folder, step).files_by_expert()[expert]
    return folder / files[0].path


def flip(path: Path, where: float = 0.9) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_bitwise_exact(pools, tmp_path, name):
    layout = MODEL | LAYOUTS[name]
    whole = pools.plugin.run(**layout, save=tmp_path, digest=True).ok()
    assert len(whole.numbers) == END
    resumed = pools.plugin.run(**layout, load=tmp_path, ckpt_step=SAVED, digest=True).ok()
    assert resumed.numbers == whole.numbers[SAVED:]
    parameters = [[answer["parameters"] for answer in run.answers] for run in (whole, resumed)]
    assert parameters[0] == parameters[1]
    assert manifest(tmp_path, SAVED).exact


@pytest.mark.parametrize("optimizer", [{}, DISTOPT], ids=["plain", "distopt"])
def test_resume_with_other_expert_parallel_sizes(pools, tmp_path, optimizer):
    """EP 4 -> 2 -> 1 -> 4, on 4, 2, 1 and 4 ranks: as if the first had gone on."""
    sizes = (4, 2, 1, 4)
    model = MODEL | optimizer | {"override_opt_param_scheduler": True}
    whole = pools.plugin.run(**(model | EP4 | {"train_iters": 2 * len(sizes)})).ok()
    numbers = []
    for count, size in enumerate(sizes, start=1):
        part = pools.plugin.run(
            size,
            **(model | {"expert_model_parallel_size": size, "train_iters": 2 * count}),
            save=tmp_path,
            load=tmp_path,
        ).ok()
        assert len(part.numbers) == 2
        numbers += part.numbers
    for step, (part, expected) in enumerate(zip(numbers, whole.numbers, strict=True), start=1):
        assert part == pytest.approx(expected, rel=1e-5), f"step {step}"


def test_from_a_checkpoint_of_stock_megatron(pools, tmp_path):
    model = {key: value for key, value in MODEL.items() if key not in FORMAT} | EP4
    whole = pools.stock.run(**model, save=tmp_path / "stock").ok()
    resumed = pools.plugin.run(
        **MODEL, **EP4, load=tmp_path / "stock", ckpt_step=SAVED, save=tmp_path / "ours"
    ).ok()
    assert resumed.losses == whole.losses[SAVED:]
    assert manifest(tmp_path / "ours", END).exact


def test_partial_saves_rotate_and_say_what_a_restore_lost(pools, tmp_path):
    whole = pools.plugin.run(**(MODEL | PARTIAL), save=tmp_path, resilient_run_dir=tmp_path).ok()
    saves = [manifest(tmp_path, step) for step in range(1, END + 1)]
    assert saves[0].exact
    assert not saves[-1].exact
    for save in saves:
        assert all(f.step == save.step for f in save.files_by_expert()[None])
    newest = saves[-1].experts()
    for layer in (1, 2):
        steps = [step for (number, _), step in newest.items() if number == layer]
        assert sorted(steps)[-2:] == [END, END]
        assert len(set(steps)) > 2
    sizes = [event["bytes"] for event in events_of(tmp_path, "checkpoint_saved")]
    assert len(sizes) == END
    # Eq. 6 of MoC-System: all that is no expert, and 2 of 8 experts.
    element_bytes = {"F32": 4, "U8": 1, "I64": 8}
    of_arrays = {
        key: info.size * sum(element_bytes[dtype] for dtype in info.kinds.values())
        for key, info in saves[0].arrays.items()
    }
    experts = sum(size for key, size in of_arrays.items() if key.startswith("expert/"))
    expected = sum(of_arrays.values()) - experts + experts / 4
    assert sizes[-1] == pytest.approx(expected, rel=0.02)

    model = MODEL | PARTIAL | {"train_iters": END + 2, "override_opt_param_scheduler": True}
    model |= {"resilient_checkpoint_lost_tokens": 0}  # K stays
    longer = pools.plugin.run(**(model | {"save_interval": 100})).ok()
    assert longer.losses[:END] == whole.losses
    resumed = pools.plugin.run(**model, load=tmp_path, save=tmp_path).ok()
    assert resumed.losses == pytest.approx(longer.losses[END:], rel=0.02)
    said = re.search(r"the updates of ([\d,]+) token-expert pairs are lost", resumed.outputs[0])
    tokens = END * MODEL["global_batch_size"] * MODEL["seq_length"] * 2
    assert 0 < int(said[1].replace(",", "")) < 2 * tokens
    # What was lost is lost once; the rotation goes on where it was.
    assert manifest(tmp_path, END + 2).state["saves"] == END + 2
    again = manifest(tmp_path, END + 1)
    assert not again.exact
    assert all(step <= END for expert, step in again.experts().items() if step != END + 1)


def test_more_experts_are_saved_when_too_many_tokens_were_lost(pools, tmp_path):
    pools.plugin.run(**(MODEL | PARTIAL), save=tmp_path).ok()
    model = MODEL | PARTIAL | {"train_iters": END + 1, "override_opt_param_scheduler": True}
    resumed = pools.plugin.run(**model, load=tmp_path, save=tmp_path).ok()
    raised = re.search(r"partial saves write (\d+) experts of each layer", resumed.outputs[0])
    assert int(raised[1]) > 2
    assert manifest(tmp_path, END + 1).state["dynamic_k"]["k"] == int(raised[1])


def test_with_all_masters_only_moments_grow_old(pools, tmp_path):
    model = MODEL | PARTIAL | {"resilient_checkpoint_masters": "all"}
    pools.plugin.run(**model, save=tmp_path).ok()
    save = manifest(tmp_path, END)
    steps = {"main": set(), "exp_avg": set()}
    for file in save.files:
        for stretch in file.stretches:
            if stretch.key.startswith("expert/") and stretch.kind in steps:
                steps[stretch.kind].add(file.step)
    assert steps["main"] == {END}
    assert len(steps["exp_avg"]) > 2
    pools.plugin.run(
        **(model | {"train_iters": END + 1}), load=tmp_path, override_opt_param_scheduler=True
    ).ok()


def test_load_aware_saves_take_those_with_most_unsaved_tokens(pools, tmp_path):
    model = MODEL | PARTIAL | {"resilient_checkpoint_selection": "load-aware"}
    pools.plugin.run(**model, save=tmp_path).ok()
    before, after = (manifest(tmp_path, step) for step in (END - 1, END))
    tokens = after.state["tokens"]["routed"]
    for number, layer in enumerate((1, 2)):
        written = {e for (n, e), step in after.experts().items() if (n, step) == (layer, END)}
        # At the save of step 6 that of step 5 may have been on its way: counted as saved.
        marks = before.state["tokens"]["persist"][number]
        unsaved = [now - mark for now, mark in zip(tokens[number], marks, strict=True)]
        most = sorted(range(len(unsaved)), key=lambda e: (-unsaved[e], e))[:2]
        assert written == set(most)


@pytest.mark.parametrize("last", [11, 12])
def test_saves_come_as_often_as_pays(pools, tmp_path, last):
    """A fault is expected every ten milliseconds: saves come as fast as storage takes them."""
    model = MODEL | EP4 | {"save": tmp_path, "save_interval": 2, "train_iters": last}
    run = pools.plugin.run(**model, resilient_checkpoint_mtbf_seconds=0.01).ok()
    said = re.findall(r"a save every (\d+) steps from now on: .* every 0.01 s", run.outputs[0])
    *made, newest = sorted(places.manifests(tmp_path))
    assert (made[0], newest) == (2, last)
    chosen = {2, *map(int, said)}
    assert all(any(step % each == 0 for each in chosen) for step in made)


@pytest.mark.parametrize("what", ["expert", "dense", "manifest", "missing"])
def test_a_damaged_exact_checkpoint_is_passed_over(pools, tmp_path, what):
    whole = pools.plugin.run(**MODEL, **EP4, save=tmp_path, digest=True).ok()
    file = expert_file(tmp_path, END, (1, 5) if what in ("expert", "missing") else None)
    if what == "missing":
        file.unlink()
    else:
        flip(places.manifest_path(tmp_path, END) if what == "manifest" else file)
    resumed = pools.plugin.run(**MODEL, **EP4, load=tmp_path, save=tmp_path, digest=True).ok()
    assert resumed.numbers == whole.numbers[SAVED:]
    assert "checkpoint passed over" in resumed.outputs[0]
    assert f"step_{END:08d}.json" in resumed.outputs[0]
    # The damaged one was put aside, and saved again.
    again = pools.plugin.run(**MODEL, **EP4, load=tmp_path).ok()
    assert again.losses == []
    assert "passed over" not in again.outputs[0]


def test_a_damaged_expert_of_a_partial_checkpoint_comes_from_an_older_one(pools, tmp_path):
    pools.plugin.run(**(MODEL | PARTIAL), save=tmp_path).ok()
    expert, step = next((e, s) for e, s in manifest(tmp_path, END).experts().items() if s == END)
    flip(expert_file(tmp_path, END, expert))
    model = MODEL | PARTIAL | {"train_iters": END + 1, "override_opt_param_scheduler": True}
    resumed = pools.plugin.run(**model, load=tmp_path, save=tmp_path).ok()
    assert len(resumed.losses) == 1
    layer, number = expert
    said = f"expert {number} of layer {layer}: the version of step {step} is damaged"
    assert said in resumed.outputs[0]
    assert manifest(tmp_path, END + 1).experts()[expert] in (END + 1, *range(1, END))


def test_nothing_usable_ends_with_a_named_error(pools, tmp_path):
    pools.plugin.run(**MODEL, **EP4, save=tmp_path).ok()
    for step in (SAVED, END):
        flip(expert_file(tmp_path, step, None))
    resumed = pools.plugin.run(**MODEL, **EP4, load=tmp_path, as_script=True)
    assert set(resumed.exits) == {1}
    assert "no checkpoint can be used" in resumed.outputs[0]
    assert f"step_{SAVED:08d}.json" in resumed.outputs[0]


def test_another_model_is_refused_by_name(pools, tmp_path):
    pools.plugin.run(**MODEL, **EP4, save=tmp_path).ok()
    other = MODEL | EP4 | {"num_layers": 4}
    resumed = pools.plugin.run(**other, load=tmp_path, as_script=True)
    assert set(resumed.exits) == {1}
    assert "num_layers is 2 there, 4 here" in resumed.outputs[0]


def test_a_run_that_begins_before_the_saves_of_its_folder_is_refused(pools, tmp_path):
    """Its own saves would be the oldest there, and the first to go."""
    pools.plugin.run(**MODEL, **EP4, save=tmp_path).ok()
    before = places.manifests(tmp_path)
    refused = pools.plugin.run(**MODEL, **EP4, save=tmp_path, as_script=True)
    assert set(refused.exits) == {1}
    assert f"has a save of step {END}, and this run begins at step 0" in refused.outputs[0]
    assert places.manifests(tmp_path) == before


def test_a_step_that_is_saved_twice_is_saved_once(pools, tmp_path):
    """A growing batch saves where its size changes, and so does the interval."""
    growing = {"rampup_batch_size": [4, 4, 16], "global_batch_size": 8, "train_samples": 40}
    by_samples = {"train_iters": None, "lr_decay_iters": None, "lr_warmup_iters": None}
    run = MODEL | EP4 | growing | by_samples | {"save_interval": 4}
    pools.plugin.run(**run, save=tmp_path, resilient_run_dir=tmp_path / "run").ok()
    saved = [event["path"] for event in events_of(tmp_path / "run", "checkpoint_saved")]
    assert len(saved) == len(set(saved))
    assert str(places.manifest_path(tmp_path, 4)) in saved
    there = [str(places.manifest_path(tmp_path, step)) for step in places.manifests(tmp_path)]
    assert sorted(saved) == sorted(there)


def test_two_runs_do_not_write_into_one_folder(pools, tmp_path):
    with RunLock.begin(tmp_path, "another"):
        refused = pools.plugin.run(**MODEL, **EP4, save=tmp_path, as_script=True)
    assert set(refused.exits) == {1}
    assert f"held by run another (host {os.uname().nodename}" in refused.outputs[0]


def test_saves_that_fail_are_said_on_every_rank_and_the_next_one_is_there(pools, tmp_path):
    model = MODEL | EP4 | {"save_interval": 1, "resilient_run_dir": tmp_path / "run"}
    whole = pools.plugin.run(**model).ok()
    broken = "tests.support.broken_saves:"
    pools.plugin.call(f"{broken}break_saves", rank=2, how={"2": "gone", "4": "killed"})
    try:
        saved = pools.plugin.run(**model, save=tmp_path / "save").ok()
    finally:
        pools.plugin.call(f"{broken}mend_saves")
    assert saved.losses == whole.losses
    assert places.manifests(tmp_path / "save") == [6, 5, 3, 1]
    for output in saved.outputs:
        failed = re.findall(r"the save of step (\d+) has failed, training goes on: (.*)", output)
        assert [step for step, _ in failed] == ["2", "4"]
        assert re.match(r"rank .*: No such file or directory: its folder has gone", failed[0][1])
        assert "rank 2: " in failed[1][1]
        assert "the writer's process was killed" in failed[1][1]
    assert len(events_of(tmp_path / "run", "checkpoint_failed")) == 2
    resumed = pools.plugin.run(**model, load=tmp_path / "save", ckpt_step=5).ok()
    assert resumed.losses == whole.losses[5:]


@pytest.mark.parametrize(
    ("hook", "call", "number", "last"),
    [
        ("setup", 1, signal.SIGTERM, 1),
        ("train_step", 4, signal.SIGUSR1, 4),
        ("evaluate", 1, signal.SIGTERM, 2),
        ("save_checkpoint", 1, signal.SIGUSR1, 3),
    ],
    ids=["warm-up", "step", "evaluation", "save"],
)
def test_a_signal_gives_one_checkpoint_and_a_clean_end(pools, tmp_path, hook, call, number, last):
    evaluation = {"eval_interval": 2, "eval_iters": 1, "split": "80,20,0", "save_interval": 2}
    model = MODEL | EP4 | evaluation
    whole = pools.plugin.run(**model).ok()
    arguments = {"rank": 1, "hook": hook, "call": call, "number": int(number)}
    pools.plugin.call("tests.support.signalled:signal_at", **arguments)
    try:
        ended = pools.plugin.run(**model, save=tmp_path)
    finally:
        pools.plugin.call("tests.support.signalled:no_signals")
    assert set(ended.exits) == {0}
    assert len(ended.losses) == last
    assert places.manifests(tmp_path)[0] == last
    resumed = pools.plugin.run(**model, load=tmp_path, save=tmp_path).ok()
    assert ended.losses + resumed.losses == whole.losses

"""What a collector takes and what it leaves, killed wherever it may be."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint import gc
from megatron_resilient.checkpoint.choose import adopt, choose
from megatron_resilient.checkpoint.lock import RunLock, holder
from megatron_resilient.checkpoint.manifest import Expert, Manifest
from megatron_resilient.checkpoint.verify import damage
from megatron_resilient.errors import CheckpointError
from tests.support.checkpoints import ALL, MODEL, file_of, manifest_of, save, series, write_data


def files_below(directory: Path) -> set[str]:
    paths = (directory / "data").rglob("*")
    return {str(path.relative_to(directory)) for path in paths if path.is_file()}


def needed(directory: Path) -> set[str]:
    read = [
        places.read_manifest(places.manifest_path(directory, step))
        for step in places.manifests(directory)
    ]
    return {file.path for manifest in read for file in manifest.files}


def assert_all_whole(directory: Path) -> None:
    for step in places.manifests(directory):
        manifest = places.read_manifest(places.manifest_path(directory, step))
        assert not damage(directory, manifest)


def test_without_a_number_only_what_nobody_needs_goes(tmp_path):
    series(tmp_path)
    write_data(tmp_path, 40, "abandoned")
    write_data(tmp_path, 50, "abandoned", [(1, 0)])
    (tmp_path / "manifests" / "step_00000050.json.12ab.tmp").write_text("{")
    before = files_below(tmp_path)
    planned = gc.plan(tmp_path, held=False)
    assert files_below(tmp_path) == before
    assert gc.collect(tmp_path) == planned
    assert (planned.manifests, planned.kept) == ((), (40, 30, 20, 10))
    assert len(planned.files) == 10 + 3 + 1
    assert planned.bytes > 0
    assert files_below(tmp_path) == needed(tmp_path)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        f"step_{step:08d}.n{step}" for step in (10, 20, 30, 40)
    ]
    assert [path.suffix for path in (tmp_path / "manifests").iterdir()] == [".json"] * 4
    assert gc.collect(tmp_path).files == ()


def test_files_of_old_saves_stay_as_long_as_they_are_needed(tmp_path):
    first, second, third, fourth = series(tmp_path)
    planned = gc.collect(tmp_path, keep_last=1)
    assert planned.manifests == (10, 20, 30)
    assert places.manifests(tmp_path) == [40]
    assert files_below(tmp_path) == {file.path for file in fourth.files}
    # Experts 2 and 3 of both layers are still those of step 30, and nothing of 10 and 20 is left.
    assert {Path(path).parent.name for path in files_below(tmp_path)} == {
        "step_00000040.n40",
        "step_00000030.n30",
    }
    assert not damage(tmp_path, fourth)
    assert len(first.files) == len(second.files) == len(third.files)


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ({"keep_last": 1}, [60]),
        ({"keep_last": 3}, [60, 50, 40]),
        ({"keep_last": 9}, [60, 50, 40, 30, 20, 10]),
        ({"keep_every": 20}, [60, 40, 20]),
        ({"keep_every": 25}, [60, 50]),
        ({"keep_last": 2, "keep_every": 30}, [60, 50, 30]),
    ],
)
def test_what_the_user_said_to_keep_is_kept(tmp_path, numbers, kept):
    series(tmp_path, steps=6, each=1)
    gc.collect(tmp_path, **numbers)
    assert places.manifests(tmp_path) == kept
    assert files_below(tmp_path) == needed(tmp_path)
    assert_all_whole(tmp_path)


@pytest.mark.parametrize("number", [0, -1])
def test_none_is_no_number_to_keep(tmp_path, number):
    save(tmp_path, 10)
    for numbers in ({"keep_last": number}, {"keep_every": number}):
        with pytest.raises(CheckpointError, match="keep at least one"):
            gc.collect(tmp_path, **numbers)


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "step_00000001.a").mkdir()
    for collect in (gc.plan, gc.collect):
        with pytest.raises(CheckpointError, match="is no checkpoint directory of ours"):
            collect(tmp_path, keep_last=1)
    assert not (tmp_path / "lock").exists()


def test_what_is_not_ours_in_the_folder_stays(tmp_path):
    made = save(tmp_path, 10)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (tmp_path / "data" / "notes").mkdir()
    (tmp_path / "data" / "notes" / "precious").write_text("x")
    (tmp_path / "data" / "step_00000005.link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "manifests" / "precious.json").write_text("x")
    before = set(tmp_path.rglob("*"))
    gc.collect(tmp_path, keep_last=1)
    assert set(tmp_path.rglob("*")) == before | {tmp_path / "lock"}
    assert not damage(tmp_path, made)


def test_checkpoints_that_miss_a_file_do_not_count(tmp_path):
    """The newest is broken: with `keep_last` 1 the one before must not go."""
    _, _, third, fourth = series(tmp_path)
    (tmp_path / file_of(fourth, None).path).unlink()
    gc.collect(tmp_path, keep_last=1)
    assert places.manifests(tmp_path) == [40, 30]
    assert choose(tmp_path, MODEL).manifest == third


def test_what_an_unreadable_manifest_may_need_stays(tmp_path):
    series(tmp_path, steps=6, each=1)
    places.manifest_path(tmp_path, 30).write_bytes(b"damaged")
    write_data(tmp_path, 20, "other")
    write_data(tmp_path, 50, "abandoned")
    before = files_below(tmp_path)
    planned = gc.collect(tmp_path, keep_last=1)
    assert places.manifests(tmp_path) == [60, 30]
    (note,) = planned.notes
    assert "data up to step 30 stays" in note
    assert "step_00000030.json: is no manifest of ours" in note
    gone = before - files_below(tmp_path)
    assert gone
    assert all(int(path.split("/")[1][5:13]) > 30 for path in gone)


def test_a_save_in_progress_stays_while_a_run_is_there(tmp_path):
    newest = series(tmp_path)[-1]
    with RunLock.begin(tmp_path, "run") as lock:
        lock.ready()
        write_data(tmp_path, 30, "abandoned")
        files = write_data(tmp_path, 50, "now", [(1, 0)])
        places.create_save(tmp_path, 60, "begun")
        planned = gc.collect(tmp_path, keep_last=1)
        assert "data of step 50 stays" in " ".join(planned.notes)
        assert not [path for path in files_below(tmp_path) if "abandoned" in path]
        assert (tmp_path / "data" / "step_00000060.begun").is_dir()
        made = manifest_of(50, files, newest)
        places.write_manifest(tmp_path, made)
        assert not damage(tmp_path, made)
    places.manifest_path(tmp_path, 50).unlink()
    gc.collect(tmp_path, keep_last=1)
    assert not [path for path in files_below(tmp_path) if "now" in path]
    assert not (tmp_path / "data" / "step_00000060.begun").exists()
    assert not damage(tmp_path, newest)


def test_nothing_is_collected_while_a_run_looks_for_what_it_can_restore(tmp_path):
    series(tmp_path)
    before = files_below(tmp_path)
    with RunLock.begin(tmp_path, "run-7") as lock:
        with pytest.raises(CheckpointError, match=r"run run-7 .* looks for what it can restore"):
            gc.collect(tmp_path, keep_last=1)
        assert (files_below(tmp_path), places.manifests(tmp_path)) == (before, [40, 30, 20, 10])
        lock.ready()
        gc.collect(tmp_path, keep_last=1)
    assert places.manifests(tmp_path) == [40]


def test_refused_manifests_go_once_they_are_old(tmp_path):
    third, fourth = series(tmp_path)[-2:]
    (tmp_path / file_of(fourth, None).path).unlink()
    adopt(tmp_path, choose(tmp_path, MODEL))
    refused = tmp_path / "manifests" / "step_00000040.json.refused"
    with RunLock.begin(tmp_path, "run") as lock:
        lock.ready()
        gc.collect(tmp_path)
        assert refused.exists()
        save(tmp_path, 45, previous=third)
        gc.collect(tmp_path)
        assert not refused.exists()
    assert_all_whole(tmp_path)
    assert files_below(tmp_path) == needed(tmp_path)


def test_manifests_go_before_their_files(tmp_path):
    series(tmp_path)
    gone: list[str] = []
    gc.collect(tmp_path, keep_last=2, gone=gone.append)
    kinds = [path.split("/")[0] for path in gone]
    assert kinds == ["manifests"] * 2 + ["data"] * (len(gone) - 2)
    assert gone[:2] == ["manifests/step_00000010.json", "manifests/step_00000020.json"]


def test_what_cannot_be_deleted_is_named(tmp_path, monkeypatch):
    series(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(CheckpointError, match=r"step_00000010\.json: cannot be deleted: Operation"):
        gc.collect(tmp_path, keep_last=1)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, but what a kernel would do does."""


EXPERT_SETS = st.sets(st.sampled_from(ALL), max_size=3)
KEEP = st.tuples(st.one_of(st.none(), st.integers(1, 3)), st.one_of(st.none(), st.integers(2, 3)))
ACTIONS = st.one_of(
    # experts, what is collected while it writes, whether it gets as far as its manifest
    st.tuples(st.just("save"), EXPERT_SETS, st.one_of(st.none(), KEEP), st.sampled_from("yyyn")),
    # what is kept, after how many deletions it is killed
    st.tuples(st.just("collect"), KEEP, st.one_of(st.none(), st.integers(0, 30))),
    # whether somebody collects before the next run
    st.tuples(st.just("crash"), st.booleans()),
    # which checkpoint, the newest first; which of its files; how
    st.tuples(
        st.just("harm"),
        st.integers(0, 2),
        st.one_of(st.none(), st.sampled_from(ALL)),
        st.sampled_from(["missing", "flipped"]),
    ),
)


class Life:
    """A directory through saves, collections, kills, damage and restarts, with what must hold."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.step = 0
        self.base: Manifest | None = None
        self.nonce = 0
        self.lock: RunLock | None = None
        self.start()

    def start(self) -> None:
        """A run begins: it restores what it can, or begins anew."""
        self.lock = RunLock.begin(self.directory, f"run{self.nonce}")
        self.base, self.step = None, 0
        try:
            chosen = choose(self.directory, MODEL)
        except CheckpointError:
            for step in places.manifests(self.directory):
                places.retire_manifest(self.directory, step)
        else:
            adopt(self.directory, chosen)
            self.base, self.step = chosen.manifest, chosen.manifest.step
        self.lock.ready()

    def save(self, experts: set, keep: tuple | None, finishes: str) -> None:
        self.step += 1
        self.nonce += 1
        chosen = sorted(experts) if self.base is not None else ALL
        files = write_data(self.directory, self.step, f"n{self.nonce}", chosen)
        if keep is not None:
            self.collect(keep, None)
        if finishes == "y":
            made = manifest_of(self.step, files, self.base)
            # Refused if anything is missing: what it builds on, or what it has just written.
            places.write_manifest(self.directory, made)
            assert not damage(self.directory, made)
            self.base = made

    def collect(self, keep: tuple, dies_after: int | None) -> None:
        keep_last, keep_every = keep
        before, there = self.whole(), self.whole(deep=False)
        left = [dies_after]

        def gone(_: str) -> None:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

        try:
            planned = gc.collect(self.directory, keep_last, keep_every, gone)
            assert set(planned.kept) == set(places.manifests(self.directory))
        except Killed:
            pass
        after = set(places.manifests(self.directory))
        # What was whole and is still there is whole, and what was to be kept is still there.
        assert before & after <= self.whole()
        if keep_last is not None:
            assert set(sorted(there, reverse=True)[:keep_last]) <= after
        if keep_every is not None:
            assert {step for step in before if step % keep_every == 0} <= after
        if keep_last is None and keep_every is None:
            assert before <= after
        if self.base is not None:
            assert self.base.step in after

    def crash(self, collects: bool) -> None:
        assert self.lock is not None
        self.lock.release()
        if collects:
            gc.collect(self.directory)
            assert files_below(self.directory) <= needed(self.directory)
        self.nonce += 1
        self.start()

    def harm(self, which: int, expert: Expert | None, how: str) -> None:
        """A file of a checkpoint is damaged; the run ends, and the next one finds it."""
        steps = places.manifests(self.directory)
        if not steps:
            return
        manifest = places.manifest_path(self.directory, steps[which % len(steps)])
        path = self.directory / file_of(places.read_manifest(manifest), expert).path
        if how == "missing" or not path.exists():
            path.unlink(missing_ok=True)
        else:
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        self.crash(False)

    def whole(self, deep: bool = True) -> set[int]:
        return {
            step
            for step in places.manifests(self.directory)
            if not damage(
                self.directory,
                places.read_manifest(places.manifest_path(self.directory, step)),
                deep=deep,
            )
        }


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=3, max_size=10))
def test_every_manifest_stays_whole_whatever_happens(actions):
    directory = Path(tempfile.mkdtemp())
    try:
        series(directory)
        life = Life(directory)
        for name, *arguments in actions:
            getattr(life, name)(*arguments)
        assert life.lock is not None
        life.lock.release()
    finally:
        shutil.rmtree(directory)


VICTIM = """
import os, signal, sys
from pathlib import Path
from megatron_resilient.checkpoint import gc
left = int(sys.argv[2])
def gone(path):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
gc.collect(Path(sys.argv[1]), keep_last=1, gone=gone)
"""


@pytest.mark.parametrize("deletions", [0, 1, 2, 3, 10, 20])
def test_a_collector_that_is_killed_leaves_whole_checkpoints(tmp_path, deletions):
    newest = series(tmp_path)[-1]
    done = subprocess.run([sys.executable, "-c", VICTIM, tmp_path, str(deletions)])
    assert done.returncode == -signal.SIGKILL
    assert holder(tmp_path) is None
    assert_all_whole(tmp_path)
    assert choose(tmp_path, MODEL).manifest == newest
    gc.collect(tmp_path, keep_last=1)
    assert places.manifests(tmp_path) == [40]
    assert files_below(tmp_path) == needed(tmp_path)

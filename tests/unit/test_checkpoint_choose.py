"""Which checkpoint a restore takes, and how the directory looks after it was taken."""

import dataclasses

import pytest

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.choose import adopt, choose
from megatron_resilient.checkpoint.gc import collect
from megatron_resilient.checkpoint.manifest import DataFile, Manifest
from megatron_resilient.checkpoint.verify import Damage, damage
from megatron_resilient.errors import CheckpointError
from tests.support.checkpoints import ALL, MODEL, file_of, save, series, write_file


class Check:
    """A check that finds what it is told to, and remembers what it was asked."""

    def __init__(self, *bad: DataFile):
        self.bad = set(bad)
        self.asked: list[list[DataFile]] = []

    def __call__(self, manifest: Manifest, files: list[DataFile]) -> list[Damage]:
        assert set(files) <= set(manifest.files)
        self.asked.append(list(files))
        return [Damage.of(file, "is bad") for file in files if file in self.bad]


def test_the_newest_is_taken(tmp_path):
    *_, newest = series(tmp_path)
    chosen = choose(tmp_path, MODEL)
    assert (chosen.manifest, chosen.replaced, chosen.refused) == (newest, (), ())
    assert chosen.warnings() == []
    assert choose(tmp_path, None).manifest == newest


def test_each_file_is_looked_at_once(tmp_path):
    first, second, third, fourth = series(tmp_path)
    dense = [file_of(each, None) for each in (second, third, fourth)]
    check = Check(*dense)
    assert choose(tmp_path, MODEL, check).manifest == first
    asked = [file for files in check.asked for file in files]
    assert len(asked) == len(set(asked))
    assert check.asked[0] == list(fourth.files)
    assert all(check.asked)


def test_several_damaged_experts_are_replaced_each_by_its_newest_whole_version(tmp_path):
    first, second, third, fourth = series(tmp_path)
    # Of (1, 0) and (1, 1) there are versions 40, 20, 10; of (1, 2) and (2, 3) 30, 10.
    bad = [
        file_of(fourth, (1, 0)),
        file_of(fourth, (1, 1)),
        file_of(second, (1, 1)),
        file_of(third, (2, 3)),
    ]
    check = Check(*bad)
    chosen = choose(tmp_path, MODEL, check)
    assert [each[:4] for each in chosen.replaced] == [
        (1, 0, 40, 20),
        (1, 1, 40, 10),
        (2, 3, 30, 10),
    ]
    changed = {(1, 0): 20, (1, 1): 10, (2, 3): 10}
    assert chosen.manifest.experts() == fourth.experts() | changed
    assert not set(bad) & set(chosen.manifest.files)
    assert file_of(chosen.manifest, (1, 1)) == file_of(first, (1, 1))
    asked = [file for files in check.asked for file in files]
    assert len(asked) == len(set(asked))


def test_an_expert_without_an_older_version_leads_to_an_older_checkpoint(tmp_path):
    first, second, third, fourth = series(tmp_path)
    bad = [file_of(each, (1, 2)) for each in (first, third)]
    # Version 10 of (1, 2) is bad too: fourth and third need version 30, second and first 10.
    with pytest.raises(CheckpointError) as raised:
        choose(tmp_path, MODEL, Check(*bad))
    for step in (10, 20, 30, 40):
        assert f"step_{step:08d}.json" in str(raised.value)
    assert choose(tmp_path, MODEL, Check(bad[1])).manifest.experts()[1, 2] == 10
    assert choose(tmp_path, MODEL, Check(bad[0])).manifest == fourth
    assert second != third


def test_versions_of_another_model_are_not_mixed_in(tmp_path):
    other = MODEL | {"hidden": 4}
    save(tmp_path, 10, model=other)
    base = save(tmp_path, 20)
    partial = save(tmp_path, 30, [(1, 0)], base)
    check = Check(file_of(partial, (1, 0)), file_of(base, (1, 0)))
    with pytest.raises(CheckpointError, match=r"step_00000010\.json: is of another model"):
        choose(tmp_path, MODEL, check)


def test_an_older_expert_of_another_shape_is_not_taken(tmp_path):
    base = save(tmp_path, 10)
    partial = save(tmp_path, 20, ALL[:7], base)
    bad = file_of(partial, (1, 0))
    key = bad.stretches[0].key
    info = dataclasses.replace(base.arrays[key], shape=(3, 2))
    changed = dataclasses.replace(base, arrays=base.arrays | {key: info})
    places.write_manifest(tmp_path, changed)
    chosen = choose(tmp_path, MODEL, Check(bad))
    assert (chosen.manifest, len(chosen.refused)) == (changed, 1)


def test_parts_of_an_expert_are_replaced_together(tmp_path):
    """Moments of one step with weights of another would be no expert that ever was."""
    base = save(tmp_path, 10)
    partial = save(tmp_path, 20, [(1, 0)], base)
    (whole,) = [file for file in partial.files if file.expert == (1, 0)]
    halves = []
    for number, kind in enumerate(("main", "exp_avg")):
        stretches = [each for each in whole.stretches if each.kind == kind]
        path = whole.path.replace("W0000", f"W{number + 7:04d}")
        halves.append(write_file(tmp_path, path, 20, stretches))
    files = (*(file for file in partial.files if file != whole), *halves)
    places.write_manifest(tmp_path, dataclasses.replace(partial, files=files))
    chosen = choose(tmp_path, MODEL, Check(halves[1]))
    assert chosen.manifest.experts()[1, 0] == 10
    assert not set(halves) & set(chosen.manifest.files)


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        choose(tmp_path, MODEL)


def test_all_that_was_tried_is_told(tmp_path):
    made = [save(tmp_path, step) for step in (10, 20)]
    places.manifest_path(tmp_path, 20).write_bytes(b"{}")
    (tmp_path / file_of(made[0], (1, 1)).path).unlink()
    with pytest.raises(CheckpointError) as raised:
        choose(tmp_path, MODEL)
    text = str(raised.value)
    assert "no checkpoint can be used" in text
    assert "step_00000020.json: is no manifest of ours" in text
    assert "(layer 1, expert 1) is missing" in text
    assert "\n" not in text


def test_what_was_adopted_is_the_newest_and_all_that_it_needs_stays(tmp_path):
    """A run that goes on from an older state builds on it; a collector must know."""
    manifests = series(tmp_path, steps=5)
    (tmp_path / file_of(manifests[4], None).path).unlink()
    (tmp_path / file_of(manifests[3], (1, 0)).path).unlink()
    chosen = choose(tmp_path, MODEL)
    assert [each[:4] for each in chosen.replaced] == [(1, 0, 40, 20)]
    assert [each.path[-18:] for each in chosen.refused] == ["step_00000050.json"]
    adopt(tmp_path, chosen)
    assert places.manifests(tmp_path) == [40, 30, 20, 10]
    assert places.read_manifest(places.manifest_path(tmp_path, 40)) == chosen.manifest
    collect(tmp_path, keep_last=1)
    assert places.manifests(tmp_path) == [40]
    assert not damage(tmp_path, chosen.manifest)
    again = choose(tmp_path, MODEL)
    assert (again.manifest, again.replaced, again.refused) == (chosen.manifest, (), ())
    following = save(tmp_path, 50, [(1, 2)], again.manifest, nonce="second")
    assert choose(tmp_path, MODEL).manifest == following


def test_to_adopt_what_is_whole_changes_nothing(tmp_path):
    series(tmp_path)

    def shown() -> dict:
        status = {path: path.stat() for path in tmp_path.rglob("*")}
        return {path: (each.st_ino, each.st_mtime_ns) for path, each in status.items()}

    before = shown()
    adopt(tmp_path, choose(tmp_path, MODEL))
    assert shown() == before

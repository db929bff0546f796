"""Names in a checkpoint directory, and manifests that become visible whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.errors import CheckpointError
from tests.support.checkpoints import manifest_of, save, write_data


def test_names():
    folder = places.save_folder(120, "a-B_9")
    assert folder == "data/step_00000120.a-B_9"
    assert places.step_of_save("step_00000120.a-B_9") == 120
    assert (
        places.expert_file(folder, 3, 5, 0, 4) == f"{folder}/expert.L003.E005.P0.W0004.safetensors"
    )
    assert places.dense_file(folder, 7, 4) == f"{folder}/dense.U0007.W0004.safetensors"
    assert places.manifest_path(Path("D"), 120) == Path("D/manifests/step_00000120.json")
    assert places.step_of_save("step_123456789012.x") == 123456789012
    for foreign in ("step_12.x", "step_00000120", "latest", "step_00000120.a.b", "step_00000120."):
        assert places.step_of_save(foreign) is None


@pytest.mark.parametrize("nonce", ["", "..", "a/b", "a.b", "x" * 65, "a\n"])
def test_a_nonce_that_is_no_name_is_refused(nonce):
    with pytest.raises(CheckpointError, match="nonce"):
        places.save_folder(1, nonce)


def test_a_directory_is_prepared_once_or_twice(tmp_path):
    directory = tmp_path / "deep" / "D"
    assert not places.is_ours(directory)
    places.prepare(directory)
    places.prepare(directory)
    assert places.is_ours(directory)
    assert places.manifests(directory) == []
    assert places.create_save(directory, 1, "a") == places.create_save(directory, 1, "a")


def test_what_is_in_the_way_is_named(tmp_path):
    (tmp_path / "D").write_text("")
    with pytest.raises(CheckpointError, match="D: cannot be prepared: "):
        places.prepare(tmp_path / "D")
    with pytest.raises(CheckpointError, match=r"data/step_00000001\.a: cannot be created: "):
        places.create_save(tmp_path / "D", 1, "a")
    with pytest.raises(CheckpointError, match=r"step_00000001\.json: cannot be renamed: "):
        places.retire_manifest(tmp_path / "D", 1)


def test_manifests_are_listed_newest_first_and_nothing_else(tmp_path):
    for step in (20, 10, 100_000_000):
        save(tmp_path, step)
    folder = tmp_path / "manifests"
    for name in ("step_00000030.json.ab.tmp", "step_30.json", "step_000000040.json", "notes.json"):
        (folder / name).write_text("{}")
    assert places.manifests(tmp_path) == [100_000_000, 20, 10]
    places.retire_manifest(tmp_path, 20)
    assert places.manifests(tmp_path) == [100_000_000, 10]


def test_a_manifest_is_read_back_and_must_be_that_of_its_name(tmp_path):
    made = save(tmp_path, 10)
    path = places.manifest_path(tmp_path, 10)
    assert places.read_manifest(path) == made
    path.rename(places.manifest_path(tmp_path, 20))
    with pytest.raises(CheckpointError, match="holds the manifest of step 10"):
        places.read_manifest(places.manifest_path(tmp_path, 20))
    with pytest.raises(CheckpointError, match=r"json: cannot be read: No such file"):
        places.read_manifest(path)


def test_a_manifest_must_find_its_files(tmp_path):
    files = write_data(tmp_path, 10, "a")
    manifest = manifest_of(10, files)
    path = tmp_path / files[3].path
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"{path}.* bytes, but it has {len(content) - 1}"):
        places.write_manifest(tmp_path, manifest)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path}: .*No such file"):
        places.write_manifest(tmp_path, manifest)
    assert places.manifests(tmp_path) == []
    path.write_bytes(content)
    places.write_manifest(tmp_path, manifest)
    assert places.manifests(tmp_path) == [10]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, function):
    old = save(tmp_path, 10)
    new = manifest_of(10, write_data(tmp_path, 10, "b"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, full)
    with pytest.raises(CheckpointError, match=r"step_00000010\.json: cannot be written: No space"):
        places.write_manifest(tmp_path, new)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "manifests").iterdir()] == ["step_00000010.json"]
    assert places.read_manifest(places.manifest_path(tmp_path, 10)) == old


def test_a_manifest_is_durable_before_it_is_visible(tmp_path, monkeypatch):
    """What is synced, in order: the text under another name, then, after the rename, the folder."""
    calls: list[str] = []
    manifest = manifest_of(10, write_data(tmp_path, 10, "a"))
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)
        fsync(descriptor)

    def note_replace(source: object, target: object) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    places.write_manifest(tmp_path, manifest)
    assert calls == [".tmp", "replace", ""]

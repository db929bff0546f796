"""The matrix of damage: every kind on every kind of file; what is loaded is whole, old or new."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest

from megatron_resilient.checkpoint import data_file
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.choose import choose
from megatron_resilient.checkpoint.manifest import DataFile, Manifest, Stretch
from megatron_resilient.checkpoint.verify import damage
from megatron_resilient.errors import CheckpointError
from tests.support.checkpoints import MODEL, file_of, save, series


def truncated(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    path = directory / file.path
    path.write_bytes(path.read_bytes()[: file.bytes // 2])


def one_byte_short(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    path = directory / file.path
    path.write_bytes(path.read_bytes()[:-1])


def emptied(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    (directory / file.path).write_bytes(b"")


def longer(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    path = directory / file.path
    path.write_bytes(path.read_bytes() + b"x")


def missing(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    (directory / file.path).unlink()


def a_folder(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    missing(directory, file, manifests)
    (directory / file.path).mkdir()


def flipped(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    path = directory / file.path
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)


def flipped_in_header(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    path = directory / file.path
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


def rewritten(directory: Path, file: DataFile, stretches, dtypes) -> None:
    tensors = [
        (stretch, dtype, bytes(stretch.size * width))
        for stretch, (dtype, width) in zip(stretches, dtypes, strict=True)
    ]
    (directory / file.path).write_bytes(data_file.encode(tensors, file.path))


TYPES = {"main": ("F32", 4), "exp_avg": ("BF16", 2), "value": ("U8", 1)}


def wrong_shape(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    first, *others = file.stretches
    stretches = [first._replace(stop=first.stop + 1), *others]
    rewritten(directory, file, stretches, [TYPES[each.kind] for each in stretches])


def wrong_dtype(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    types = [("F16", 2) if each.kind == "exp_avg" else TYPES[each.kind] for each in file.stretches]
    rewritten(directory, file, file.stretches, types)


def missing_tensor(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    stretches = file.stretches[1:]
    rewritten(directory, file, stretches, [TYPES[each.kind] for each in stretches])


def extra_tensor(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    stretches = [*file.stretches, Stretch("dense/other", "main", 0, 2)]
    rewritten(directory, file, stretches, [TYPES[each.kind] for each in stretches])


def mixed_saves(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    """The file of the same name of the first save, of the same size, in the place of this one."""
    older = file_of(manifests[0], file.expert)
    content = (directory / older.path).read_bytes()
    assert len(content) == file.bytes
    (directory / file.path).write_bytes(content)


def mixed_saves_that_lie(directory: Path, file: DataFile, manifests: list[Manifest]) -> None:
    """The same, when the header does not tell: what another program would have written."""
    older = file_of(manifests[0], file.expert)
    found = data_file.read(directory / older.path, older, manifests[0].arrays)
    tensors = [(stretch, TYPES[stretch.kind][0], data) for stretch, data in found.items()]
    (directory / file.path).write_bytes(data_file.encode(tensors, file.path))


# Damage: what is said of it.
KINDS = {
    truncated: r"has \d+ bytes, should have \d+",
    one_byte_short: r"has \d+ bytes, should have \d+",
    emptied: r"has 0 bytes, should have \d+",
    longer: r"has \d+ bytes, should have \d+",
    missing: "is missing",
    a_folder: "is no file",
    flipped: "its SHA-256 is not that of the manifest",
    flipped_in_header: "(is no whole safetensors file|is data/|has no tensor|its SHA-256)",
    wrong_shape: r"in the shape \[\d+\], should be \[\d+\]",
    wrong_dtype: "as F16, should be BF16",
    missing_tensor: "has no tensor .*main",
    extra_tensor: r"has a tensor dense/other\|main\|0 that the manifest does not name",
    mixed_saves: "is data/step_00000010.n10/.*, of another save or another expert",
    mixed_saves_that_lie: "its SHA-256 is not that of the manifest",
}
NAMES = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@NAMES
@pytest.mark.parametrize("expert", [None, (2, 1)], ids=["dense", "expert"])
def test_damage_is_found_and_named(tmp_path, kind, expert):
    *_, newest = manifests = series(tmp_path)
    file = file_of(newest, expert)
    kind(tmp_path, file, manifests)
    (found,) = damage(tmp_path, newest)
    assert (found.file, found.layer, found.expert) == (file.path, *(expert or (None, None)))
    assert re.search(KINDS[kind], found.why)
    for untouched in manifests[:-1]:
        assert not damage(tmp_path, untouched)


@NAMES
def test_a_damaged_expert_of_a_partial_checkpoint_is_replaced(tmp_path, kind):
    *_, newest = manifests = series(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    kind(tmp_path, file_of(newest, (2, 1)), manifests)
    chosen = choose(tmp_path, MODEL)
    (replaced,) = chosen.replaced
    assert replaced[:4] == (2, 1, 40, 20)
    assert not chosen.refused
    # All else is that of the newest step, and everything that is named is whole.
    assert chosen.manifest.step == 40
    assert chosen.manifest.experts() == newest.experts() | {(2, 1): 20}
    assert not damage(tmp_path, chosen.manifest)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
    (line,) = chosen.warnings()
    assert "expert 1 of layer 2" in line
    assert "step 40 is damaged, that of step 20 is loaded" in line


@NAMES
def test_damaged_dense_state_leads_to_the_checkpoint_before(tmp_path, kind):
    *_, before, newest = manifests = series(tmp_path)
    kind(tmp_path, file_of(newest, None), manifests)
    chosen = choose(tmp_path, MODEL)
    assert chosen.manifest == before
    assert not chosen.replaced
    (refused,) = chosen.refused
    assert refused.path.endswith("step_00000040.json")
    assert file_of(newest, None).path in refused.why


@NAMES
@pytest.mark.parametrize("expert", [None, (2, 1)], ids=["dense", "expert"])
def test_any_damage_in_an_exact_checkpoint_leads_to_the_one_before(tmp_path, kind, expert):
    manifests = [save(tmp_path, step) for step in (10, 20, 30)]
    kind(tmp_path, file_of(manifests[-1], expert), manifests)
    chosen = choose(tmp_path, MODEL)
    assert chosen.manifest == manifests[1]
    assert not chosen.replaced
    assert len(chosen.refused) == 1


def cut_manifest(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped_manifest(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty_manifest(path: Path) -> None:
    path.write_bytes(b"")


def missing_manifest(path: Path) -> None:
    path.unlink()


def manifest_of_another_step(path: Path) -> None:
    path.write_bytes(path.with_name("step_00000010.json").read_bytes())


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(
    "harm",
    [cut_manifest, flipped_manifest, empty_manifest, missing_manifest, manifest_of_another_step],
)
def test_a_damaged_manifest_leads_to_the_one_before(tmp_path, harm, partial):
    exact = [] if partial else [save(tmp_path, step) for step in (10, 20, 30, 40)]
    manifests = exact or series(tmp_path)
    harm(places.manifest_path(tmp_path, 40))
    chosen = choose(tmp_path, MODEL)
    assert chosen.manifest == manifests[2]
    assert [Path(each.path).name for each in chosen.refused] == (
        [] if harm is missing_manifest else ["step_00000040.json"]
    )


def test_another_model_is_an_error_and_no_fallback(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20, model=MODEL | {"experts": 8, "rope": True})
    with pytest.raises(CheckpointError) as raised:
        choose(tmp_path, MODEL | {"tp": 2})
    text = str(raised.value)
    assert "step_00000020.json: is of another model" in text
    for told in (
        "experts is 8 there, 4 here",
        "rope is True there, not given here",
        "tp is not given there, 2 here",
    ):
        assert told in text
    assert "hidden" not in text


def test_a_file_with_a_right_digest_and_other_tensors_is_damaged(tmp_path):
    """A manifest that names what its file does not hold: no digest helps."""
    made = save(tmp_path, 10)
    file = file_of(made, (1, 1))
    wrong_dtype(tmp_path, file, [made])
    content = (tmp_path / file.path).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    renamed = dataclasses.replace(file, bytes=len(content), sha256=digest)
    files = tuple(renamed if each == file else each for each in made.files)
    places.write_manifest(tmp_path, dataclasses.replace(made, files=files))
    with pytest.raises(CheckpointError, match="as F16, should be BF16"):
        choose(tmp_path, MODEL)


def test_without_a_deep_look_flipped_bits_stay_unseen(tmp_path):
    made = save(tmp_path, 10)
    flipped(tmp_path, file_of(made, (1, 1)), [made])
    assert not damage(tmp_path, made, deep=False)
    looked_at = []
    assert len(damage(tmp_path, made, done=looked_at.append)) == 1
    assert sorted(looked_at, key=str) == sorted(made.files, key=str)


def test_only_what_is_asked_for_is_looked_at(tmp_path):
    made = save(tmp_path, 10)
    bad, good = file_of(made, (1, 1)), file_of(made, (1, 2))
    missing(tmp_path, bad, [made])
    assert not damage(tmp_path, made, files=[good])
    assert not damage(tmp_path, made, files=[])
    assert json.loads(json.dumps(damage(tmp_path, made, files=[bad])[0]._asdict())) == {
        "file": bad.path,
        "layer": 1,
        "expert": 1,
        "why": "is missing",
    }

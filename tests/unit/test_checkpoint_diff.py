"""What differs between two checkpoints, however they are cut into files."""

import dataclasses
import hashlib
import math
import struct

import pytest

from megatron_resilient.checkpoint import data_file
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.diff import Side, ValueChange, difference
from megatron_resilient.checkpoint.manifest import ArrayInfo, DataFile, Manifest, Stretch
from megatron_resilient.errors import CheckpointError
from tests.support.checkpoints import MODEL, file_of, save, series


def one_array(directory, name: str, dtype: str, parts: list[bytes], step: int = 1) -> Side:
    """A checkpoint of one array, cut into files as given."""
    directory = directory / name
    places.prepare(directory)
    folder = places.create_save(directory, step, name)
    width = data_file.ELEMENT_BYTES[dtype]
    files, start = [], 0
    for number, part in enumerate(parts):
        stretch = Stretch("dense/a", "main", start, start + len(part) // width)
        path = places.dense_file(folder, 0, number)
        content = data_file.encode([(stretch, dtype, part)], path)
        (directory / path).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        files.append(DataFile(path, step, len(content), digest, (stretch,)))
        start = stretch.stop
    arrays = {"dense/a": ArrayInfo((start,), {"main": dtype})}
    manifest = Manifest(step, "run", 0.0, True, dict(MODEL), {}, arrays, tuple(files))
    places.write_manifest(directory, manifest)
    return Side(directory, manifest)


def test_a_checkpoint_does_not_differ_from_itself_and_is_not_read(tmp_path):
    made = save(tmp_path, 10)
    for file in made.files:
        (tmp_path / file.path).unlink()
    side = Side(tmp_path, made)
    found = difference(side, side)
    assert found.is_empty
    assert found.values == ()


def test_equal_values_in_other_files_are_equal(tmp_path):
    values = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
    one = one_array(tmp_path, "one", "F32", [values[:8], values[8:]])
    other = one_array(tmp_path, "other", "F32", [values[:4], values[4:20], values[20:]], step=7)
    for first, second in ((one, other), (other, one)):
        assert difference(first, second).is_empty


def test_values_that_differ_are_counted_and_measured(tmp_path):
    one = one_array(tmp_path, "one", "F32", [struct.pack("<4f", 1, 2, 3, -4)])
    other = one_array(
        tmp_path, "other", "F32", [struct.pack("<2f", 1, 2.5), struct.pack("<2f", 3, 4)]
    )
    found = difference(one, other)
    assert found.values == (ValueChange("dense/a", "main", 2, None, None),)
    assert not found.is_empty
    (value,) = difference(one, other, sizes=True).values
    assert (value.elements, value.max_absolute, value.max_relative) == (2, 8.0, 2.0)


@pytest.mark.parametrize(
    ("dtype", "form", "one", "other", "absolute"),
    [
        ("I64", "<q", 5, 9, 4.0),
        ("U8", "<B", 1, 255, 254.0),
        ("F64", "<d", 1.0, 1.5, 0.5),
        ("F16", "<e", 1.0, 1.5, 0.5),
        ("BF16", "<H", 0x3F80, 0x4000, 1.0),
        ("F32", "<f", math.inf, 1.0, math.inf),
        ("F32", "<f", 0.0, -0.0, 0.0),
    ],
)
def test_every_type_is_measured(tmp_path, dtype, form, one, other, absolute):
    first = one_array(tmp_path, "one", dtype, [struct.pack(form, one)])
    second = one_array(tmp_path, "other", dtype, [struct.pack(form, other)])
    (value,) = difference(first, second, sizes=True).values
    assert (value.elements, value.max_absolute) == (1, absolute)


def test_what_is_no_number_is_seen(tmp_path):
    first = one_array(tmp_path, "one", "F32", [struct.pack("<3f", math.nan, 1, 5)])
    second = one_array(tmp_path, "other", "F32", [struct.pack("<3f", 1.0, 1, 9)])
    (value,) = difference(first, second, sizes=True).values
    assert value.elements == 2
    assert math.isnan(value.max_absolute)
    eighths = [one_array(tmp_path, name, "F8_E4M3", [name.encode()]) for name in ("x", "y")]
    (value,) = difference(*eighths, sizes=True).values
    assert (value.elements, value.max_absolute, value.max_relative) == (1, None, None)


def test_versions_and_arrays_that_differ_are_named(tmp_path):
    *_, third, fourth = series(tmp_path)
    found = difference(Side(tmp_path, third), Side(tmp_path, fourth))
    assert {each[:2]: each[2:] for each in found.versions} == {
        (layer, expert): (20, 40) for layer in (1, 2) for expert in (0, 1)
    }
    changed = {(each.key, each.kind) for each in found.values}
    assert ("dense/0.0/0/embedding.weight", "main") in changed
    assert ("expert/1/0/0/fc1", "exp_avg") in changed
    assert not [key for key, _ in changed if key.startswith("expert/1/2/")]
    quick = difference(Side(tmp_path, third), Side(tmp_path, fourth), values=False)
    assert (quick.values, quick.versions) == (None, found.versions)
    assert not quick.is_empty


def test_other_models_are_compared_as_far_as_they_go(tmp_path):
    one = one_array(tmp_path, "one", "F32", [bytes(8)])
    other = one_array(tmp_path, "other", "BF16", [bytes(4)])
    arrays = dict(other.manifest.arrays) | {"dense/b": ArrayInfo((0,), {"main": "F32"})}
    model = MODEL | {"hidden": 9}
    other = Side(other.directory, dataclasses.replace(other.manifest, arrays=arrays, model=model))
    found = difference(one, other)
    assert found.types == ("dense/a|main: F32 [2], BF16 [2]",)
    assert (found.only_first, found.only_second) == ((), ("dense/b|main",))
    assert found.model == ("hidden is 3 in the first, 9 in the second",)
    assert found.values == ()


def test_damage_is_no_difference_but_an_error(tmp_path):
    first, second = (save(tmp_path, step) for step in (10, 20))
    path = tmp_path / file_of(second, (1, 1)).path
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match=rf"^{path}: its SHA-256"):
        difference(Side(tmp_path, first), Side(tmp_path, second))

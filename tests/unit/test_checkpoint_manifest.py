"""The text of a manifest, and what may not be in one."""

import dataclasses
import hashlib
import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.checkpoint.coverage import validate
from megatron_resilient.checkpoint.manifest import ArrayInfo, DataFile, Manifest, Stretch
from megatron_resilient.checkpoint.manifest_json import from_json, to_json
from megatron_resilient.errors import CheckpointError
from tests.support.checkpoints import ALL, DENSE, manifest_of, series, write_data


@pytest.fixture
def manifest(tmp_path) -> Manifest:
    return series(tmp_path)[-1]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    return to_json(series(tmp_path_factory.mktemp("made"))[-1])


def test_it_comes_back_as_it_was(manifest):
    text = to_json(manifest)
    assert from_json(text, "it") == manifest
    assert to_json(from_json(text, "it")) == text
    assert json.loads(text)["manifest"]["step"] == 40


def test_experts_have_the_step_of_their_oldest_file(manifest):
    versions = manifest.experts()
    assert list(versions) == sorted(ALL)
    assert {expert: versions[1, expert] for expert in range(4)} == {0: 40, 1: 40, 2: 30, 3: 30}


def test_an_expert_of_several_files_is_as_old_as_the_oldest():
    def file(step: int, kind: str) -> DataFile:
        stretches = (Stretch("expert/1/0/0/fc1", kind, 0, 2),)
        return DataFile(f"data/step_{step:08d}.a/{kind}.safetensors", step, 9, "0" * 64, stretches)

    kinds = {"main": "F32", "exp_avg": "F32"}
    files = (file(20, "main"), file(10, "exp_avg"))
    arrays = {"expert/1/0/0/fc1": ArrayInfo((2,), kinds)}
    manifest = Manifest(20, "run", 0.0, False, {}, {}, arrays, files)
    assert from_json(to_json(manifest), "it").experts() == {(1, 0): 10}


@given(place=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(written, place, bit):
    text = bytearray(written)
    text[place % len(text)] ^= 1 << bit
    with pytest.raises(CheckpointError, match=r"^D/it: "):
        from_json(bytes(text), "D/it")


@given(length=st.integers(0, 1 << 30))
def test_a_text_that_is_cut_short_is_found(written, length):
    text = written
    with pytest.raises(CheckpointError, match=r"^it: "):
        from_json(text[: length % len(text)], "it")


def test_another_version_is_named(manifest):
    text = to_json(manifest).replace(b'"version":1', b'"version":2', 1)
    with pytest.raises(CheckpointError, match="version 2, and this program reads 1"):
        from_json(text, "it")


def changed_file(**values: object):
    def change(manifest: Manifest) -> Manifest:
        first, *others = manifest.files
        return dataclasses.replace(manifest, files=(dataclasses.replace(first, **values), *others))

    return change


def changed_stretch(place: int, value: object):
    def change(manifest: Manifest) -> Manifest:
        first = list(manifest.files[0].stretches[0])
        first[place] = value
        return changed_file(stretches=(Stretch(*first), *manifest.files[0].stretches[1:]))(manifest)

    return change


def changed(**values: object):
    return lambda manifest: dataclasses.replace(manifest, **values)


def changed_array(info: ArrayInfo):
    return lambda manifest: dataclasses.replace(manifest, arrays=manifest.arrays | {DENSE: info})


FOLDER = "data/step_00000040.n40"
WRONG = {
    "a step below zero": (changed(step=-1), "step is -1"),
    "a step that is no number": (changed(step=True), "step is True"),
    "no run": (changed(run=""), "run is ''"),
    "no time": (changed(written=float("nan")), "written is nan"),
    "exact, but": (changed(exact=1), "exact is 1"),
    "exact with older files": (changed(exact=True), "in an exact checkpoint of step 40"),
    "a model that is a list": (changed(model=[]), "model is no object"),
    "a path outside": (changed_file(path="../x.safetensors"), "is no path of a data file"),
    "a path that climbs": (
        changed_file(path="data/step_00000040.n40/../../x.safetensors"),
        "is no path",
    ),
    "an absolute path": (changed_file(path="/etc/x.safetensors"), "is no path of a data file"),
    "a path that is a number": (changed_file(path=7), "is no path of a data file"),
    "a path with an end of line": (changed_file(path=f"{FOLDER}/a.safetensors\n"), "is no path"),
    "a file twice": (
        lambda manifest: dataclasses.replace(manifest, files=(*manifest.files, manifest.files[0])),
        "is named twice",
    ),
    "a file of another step": (changed_file(step=30), "is said to be of step 30"),
    "dense state of an older step": (
        changed_file(path="data/step_00000030.n30/dense.safetensors", step=30),
        "is of an older step, in what is no expert",
    ),
    "a file of a later step": (
        changed_file(path="data/step_00000050.n50/dense.safetensors", step=50),
        "is newer than the step 40",
    ),
    "no bytes": (changed_file(bytes=0), "0 bytes"),
    "no digest": (changed_file(sha256="abc"), "has no SHA-256"),
    "an empty file": (changed_file(stretches=()), "holds nothing"),
    "an unknown array": (changed_stretch(0, "dense/0.0/0/other"), "which is no array"),
    "an unknown kind": (changed_stretch(1, "exp_avg_sq"), "which is no array"),
    "a start below zero": (changed_stretch(2, -1), "from -1 to 4 of 10"),
    "a stop too far": (changed_stretch(3, 11), "from 0 to 11 of 10"),
    "an empty stretch": (changed_stretch(3, 0), "from 0 to 0 of 10"),
    "a start that is no number": (changed_stretch(2, 0.0), "from 0.0 to 4"),
    "an overlap": (changed_stretch(3, 5), "both hold"),
    "a hole": (changed_stretch(3, 3), "no file holds .* from 3 to 4"),
    "a hole at the end": (
        changed_array(ArrayInfo((11,), {"main": "F32", "exp_avg": "BF16"})),
        "no file holds .* from 10 to 11",
    ),
    "a kind that nobody has": (
        changed_array(ArrayInfo((10,), {"main": "F32", "exp_avg": "BF16", "step": "F32"})),
        "no file holds .*, step, from 0 to 10",
    ),
    "an unknown type": (
        changed_array(ArrayInfo((10,), {"main": "F31", "exp_avg": "BF16"})),
        "'F31' is no type",
    ),
    "a negative length": (
        changed_array(ArrayInfo((-5, -2), {"main": "F32", "exp_avg": "BF16"})),
        r"has the shape \(-5, -2\)",
    ),
    "no kinds": (changed_array(ArrayInfo((10,), {})), "has no kinds"),
    "an expert of a strange name": (
        changed(arrays={"expert/one/2/0/fc1": ArrayInfo((1,), {"main": "F32"})}),
        "is not named expert/LAYER/EXPERT/PART/PARAMETER",
    ),
    "a bar in a name": (changed(arrays={"a|b": ArrayInfo((1,), {"main": "F32"})}), "cannot be"),
    "two experts in a file": (
        lambda manifest: dataclasses.replace(
            manifest,
            files=(
                *manifest.files[:2],
                dataclasses.replace(
                    manifest.files[2],
                    stretches=manifest.files[2].stretches + manifest.files[3].stretches,
                ),
                *manifest.files[4:],
            ),
        ),
        "holds more than one expert",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_hold_together_is_refused(manifest, name):
    change, message = WRONG[name]
    wrong = change(manifest)
    with pytest.raises(CheckpointError, match=message):
        to_json(wrong)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1: 2}}, r"state\.a: the key 1 is no text"),
        ({"a": [(1, 2)]}, r"state\.a\[0\]: is of type tuple"),
        ({"a": float("inf")}, r"state\.a: JSON has no number for inf"),
        ({"a": b"x"}, r"state\.a: is of type bytes"),
    ],
)
def test_state_that_json_would_change_is_refused(manifest, state, message):
    with pytest.raises(CheckpointError, match=message):
        to_json(dataclasses.replace(manifest, state=state))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"arrays":{', '"arrays":{"x":3,'),
        ('"step":40', '"stap":40'),
        ('"stretches":[[', '"stretches":[[1,'),
    ],
)
def test_a_foreign_text_with_a_right_digest_is_refused(manifest, old, new):
    """Whoever writes a manifest by hand gets an error, not a traceback."""
    text = to_json(manifest)
    body = text[text.index(b'"manifest":') + len(b'"manifest":') : -2]
    other = body.decode().replace(old, new, 1).encode()
    assert other != body
    digest = hashlib.sha256(other).hexdigest().encode()
    head = re.sub(rb'"sha256":"[0-9a-f]+"', b'"sha256":"' + digest + b'"', text, count=1)
    with pytest.raises(CheckpointError, match=r"^it: "):
        from_json(head.replace(body, other), "it")


CUTS = st.lists(st.integers(1, 99), unique=True, max_size=6).map(sorted)


def cut_manifest(cuts: list[int]) -> Manifest:
    edges = [0, *cuts, 100]
    files = tuple(
        DataFile(
            f"data/step_00000001.a/f{number}.safetensors",
            1,
            10,
            "0" * 64,
            (Stretch("dense/a", "main", start, stop),),
        )
        for number, (start, stop) in enumerate(itertools.pairwise(edges))
    )
    arrays = {"dense/a": ArrayInfo((10, 10), {"main": "F32"})}
    return Manifest(1, "run", 0.0, True, {}, {}, arrays, files)


@given(cuts=CUTS, order=st.randoms(use_true_random=False))
def test_any_cut_covers(cuts, order):
    manifest = cut_manifest(cuts)
    files = list(manifest.files)
    order.shuffle(files)
    validate(dataclasses.replace(manifest, files=tuple(files)), "it")


@given(
    cuts=CUTS,
    which=st.integers(0, 6),
    start=st.integers(-3, 3),
    stop=st.integers(-3, 3),
)
def test_a_stretch_that_is_moved_does_not_cover(cuts, which, start, stop):
    manifest = cut_manifest(cuts)
    which %= len(manifest.files)
    file = manifest.files[which]
    (old,) = file.stretches
    new = Stretch(old.key, old.kind, old.start + start, old.stop + stop)
    files = list(manifest.files)
    files[which] = dataclasses.replace(file, stretches=(new,))
    moved = dataclasses.replace(manifest, files=tuple(files))
    if new == old:
        validate(moved, "it")
    else:
        with pytest.raises(CheckpointError):
            validate(moved, "it")


@given(cuts=CUTS, which=st.integers(0, 6))
def test_a_stretch_that_is_missing_does_not_cover(cuts, which):
    manifest = cut_manifest(cuts)
    files = list(manifest.files)
    del files[which % len(files)]
    with pytest.raises(CheckpointError, match="no file holds dense/a, main"):
        validate(dataclasses.replace(manifest, files=tuple(files)), "it")


def test_a_partial_save_needs_the_experts_that_it_leaves_out(tmp_path):
    files = write_data(tmp_path, 10, "a", experts=[(1, 0)])
    with pytest.raises(CheckpointError, match="no file holds expert/1/1/0/fc1, main"):
        to_json(manifest_of(10, files))

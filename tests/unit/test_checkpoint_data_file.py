"""Files of tensors: what the safetensors package reads, and what is refused."""

import hashlib
import json
import os
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from megatron_resilient.checkpoint import data_file
from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import ArrayInfo, DataFile, Stretch
from megatron_resilient.errors import CheckpointError

PATH = "data/step_00000001.a/f.safetensors"


def write(path, tensors, name=PATH) -> tuple[DataFile, dict[str, ArrayInfo]]:
    data = data_file.encode(tensors, name)
    path.write_bytes(data)
    arrays: dict[str, ArrayInfo] = {}
    for stretch, dtype, _ in tensors:
        arrays.setdefault(stretch.key, ArrayInfo((99,), {})).kinds[stretch.kind] = dtype
    stretches = tuple(stretch for stretch, _, _ in tensors)
    return DataFile(PATH, 1, len(data), hashlib.sha256(data).hexdigest(), stretches), arrays


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["dense/a", "dense/ü", "random/0.0/x"]),
        st.sampled_from(["main", "value"]),
        st.integers(0, 1 << 40),
        st.integers(1, 17),
        st.sampled_from(sorted(ELEMENT_BYTES)),
    ),
    unique_by=lambda each: each[:3],
    min_size=1,
)


@given(TENSORS)
def test_the_package_reads_what_is_written(drawn):
    tensors = []
    for key, kind, start, size, dtype in drawn:
        content = hashlib.shake_128(f"{key}{start}".encode()).digest(size * ELEMENT_BYTES[dtype])
        tensors.append((Stretch(key, kind, start, start + size), dtype, content))
    read = dict(safetensors.deserialize(data_file.encode(tensors, PATH)))
    assert read.keys() == {data_file.tensor_name(stretch) for stretch, _, _ in tensors}
    for stretch, dtype, content in tensors:
        there = read[data_file.tensor_name(stretch)]
        assert (there["dtype"], there["shape"]) == (dtype, [stretch.size])
        assert bytes(there["data"]) == content


def test_parts_are_not_copied_and_come_back(tmp_path):
    memory = bytearray(range(24))
    tensors = [
        (Stretch("dense/a", "main", 5, 7), "F32", memoryview(memory)[:8]),
        (Stretch("dense/a", "exp_avg", 5, 7), "BF16", memoryview(memory)[8:12]),
        (Stretch("dense/b", "main", 0, 1), "I64", memoryview(memory)[12:20]),
    ]
    parts = data_file.encode_parts(tensors, PATH)
    assert len(parts) == 4
    memory[0] = 77
    assert b"".join(parts)[len(parts[0]) + 8] == 77  # 64-bit numbers come first
    expected, arrays = write(tmp_path / "f", tensors)
    read = data_file.read(tmp_path / "f", expected, arrays)
    assert {stretch: bytes(data) for stretch, data in read.items()} == {
        stretch: bytes(data) for stretch, _, data in tensors
    }
    assert data_file.header(tmp_path / "f").path == PATH
    assert data_file.sha256_of_file(tmp_path / "f") == expected.sha256


@pytest.mark.parametrize("count", [3, 5])
def test_bytes_that_are_not_the_stretch_are_refused(count):
    with pytest.raises(CheckpointError, match=rf"dense/a\|main\|0 has {count} bytes for 1"):
        data_file.encode([(Stretch("dense/a", "main", 0, 1), "F32", bytes(count))], PATH)


def test_a_stretch_twice_is_refused():
    one = (Stretch("dense/a", "main", 0, 1), "U8", b"1")
    with pytest.raises(CheckpointError, match="or is there twice"):
        data_file.encode([one, one], PATH)


HEADERS = {
    "no header": b"",
    "a length and no more": struct.pack("<Q", 100),
    "a huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "no JSON": struct.pack("<Q", 8) + b"{{{{{{{{",
    "no object": struct.pack("<Q", 2) + b"[]",
    "no UTF-8": struct.pack("<Q", 2) + b"\xff\xff",
    "deep JSON": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a tensor without a type": struct.pack("<Q", 9) + b'{"a": {}}',
    "bytes that nobody owns": struct.pack("<Q", 2) + b"{}x",
}


def entry(dtype: str, shape: object, offsets: object, data: int) -> bytes:
    text = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


HEADERS |= {
    "a tensor beyond the end": entry("U8", [4], [0, 4], 3),
    "a hole": entry("U8", [4], [1, 5], 5),
    "a shape that does not fit": entry("U8", [5], [0, 4], 4),
    "an unknown type": entry("U9", [4], [0, 4], 4),
    "offsets that are none": entry("U8", [4], [0], 4),
}


@pytest.mark.parametrize("name", HEADERS)
def test_what_is_no_safetensors_file_is_named(tmp_path, name):
    path = tmp_path / "f"
    path.write_bytes(HEADERS[name])
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        data_file.header(path)


def test_a_file_that_the_package_wrote_is_read(tmp_path):
    path = tmp_path / "f"
    save_file({"dense/a|main|3": np.arange(4, dtype=np.float32)}, path)
    content = path.read_bytes()
    stretch = Stretch("dense/a", "main", 3, 7)
    digest = hashlib.sha256(content).hexdigest()
    expected = DataFile(PATH, 1, len(content), digest, (stretch,))
    read = data_file.read(path, expected, {"dense/a": ArrayInfo((9,), {"main": "F32"})})
    assert np.frombuffer(read[stretch], "<f4").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_damage_within_elements_is_seen_by_the_digest_only(tmp_path):
    path = tmp_path / "f"
    stretch = Stretch("dense/a", "main", 0, 4)
    expected, arrays = write(path, [(stretch, "U8", b"1234")])
    path.write_bytes(path.read_bytes()[:-1] + b"5")
    assert data_file.complaint(path, expected, arrays) is None
    assert bytes(data_file.read(path, expected, arrays, digest=False)[stretch]) == b"1235"
    with pytest.raises(CheckpointError, match=rf"^{path}: its SHA-256 is not that"):
        data_file.read(path, expected, arrays)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "f")
    expected = DataFile(PATH, 1, 9, "0" * 64, (Stretch("dense/a", "main", 0, 1),))
    assert data_file.complaint(tmp_path / "f", expected, {}) == "is no file"

"""docs/checkpoint_format.md is enough to read a checkpoint: its reader is run as it stands."""

import re
from pathlib import Path

import pytest

from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest_json import FORMAT, VERSION
from tests.support.checkpoints import arrays, content, file_of, series

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint_format.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def load():
    (code,) = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
    assert "megatron_resilient" not in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    names: dict = {}
    exec(compile(code, "docs/checkpoint_format.md", "exec"), names)
    return names["load"]


def test_the_reader_of_the_page_reads_everything(tmp_path, load):
    series(tmp_path)
    manifest, read = load(tmp_path, 40)
    assert manifest["state"] == {"iteration": 40, "scheduler": {"num_steps": 320}}
    versions = {
        (key, kind): file["step"]
        for file in manifest["files"]
        for key, kind, _, _ in file["stretches"]
    }
    assert sorted(set(versions.values())) == [30, 40]
    expected = {
        (key, kind): content(key, kind, versions[key, kind], info.size, ELEMENT_BYTES[dtype])
        for key, info in arrays().items()
        for kind, dtype in info.kinds.items()
    }
    assert read == expected


def test_the_reader_of_the_page_sees_damage(tmp_path, load):
    newest = series(tmp_path)[-1]
    path = tmp_path / file_of(newest, (1, 2)).path
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match="is damaged"):
        load(tmp_path, 40)
    assert load(tmp_path, 20)
    manifest = tmp_path / "manifests" / "step_00000020.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"run":"run"', b'"run":"ran"'))
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path, 20)


def test_the_page_names_the_format():
    assert f'{{"format":"{FORMAT}","version":{VERSION},"sha256":"HEX","manifest":{{...}}}}' in PAGE

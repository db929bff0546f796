import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_resilient import cli
from megatron_resilient.algorithms.schedule_files import describe_profile, read_profile
from megatron_resilient.algorithms.stream_model import ORDERS
from tests.support import overlap_oracles as oracles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scheduling.md"

PROFILE = {
    "a2a": {"alpha_ms": 0.3, "beta_ms_per_byte": 4e-8, "r2": 0.999},
    "allgather": {"alpha_ms": 0.2, "beta_ms_per_byte": 3e-8},
    "reducescatter": {"alpha_ms": 0.2, "beta_ms_per_byte": 3e-8},
    "allreduce": {"alpha_ms": 0.5, "beta_ms_per_byte": 1e-6},
    "gemm": {"alpha_ms": 0.05, "beta_ms_per_flop": 1e-11},
}
LAYER = {
    "a2a_bytes": 2e8,
    "allgather_bytes": 3e8,
    "reducescatter_bytes": 3e8,
    "expert_flops": 1e12,
    "gradient_bytes": 12_000_000,
    "dense_backward_ms": 4.0,
}
LAYERS = {
    "max_degree": 8,
    "layers": [LAYER, {**LAYER, "a2a_bytes": 5e7}, {**LAYER, "expert_flops": 1e11}],
}


@pytest.fixture
def schedule(tmp_path):
    def run(*flags, profile=PROFILE, layers=LAYERS):
        paths = []
        for name, document in (("profile", profile), ("layers", layers)):
            paths.append(tmp_path / f"{name}.json")
            text = document if isinstance(document, str) else json.dumps(document)
            paths[-1].write_text(text)
        return cli.main(["schedule", "--profile", str(paths[0]), "--layers", str(paths[1]), *flags])

    return run


def durations(layer, degree, backward):
    twice = 2 if backward else 1
    terms = [
        ("a2a", layer["a2a_bytes"], "byte", 1),
        ("allgather", layer["allgather_bytes"], "byte", 1),
        ("gemm", layer["expert_flops"], "flop", twice),
        ("reducescatter", layer["reducescatter_bytes"], "byte", 1),
        ("a2a", layer["a2a_bytes"], "byte", 1),
    ]
    return [
        [times * (PROFILE[name]["alpha_ms"] + units / degree * PROFILE[name][f"beta_ms_per_{per}"])]
        * degree
        for name, units, per, times in terms
    ]


def allreduce_ms(size):
    own = PROFILE["allreduce"]
    return own["alpha_ms"] + size * own["beta_ms_per_byte"] if size else 0.0


def test_json_is_what_the_model_says(schedule, capsys):
    assert schedule("--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert not captured.err
    exposed = 0.0
    for layer, got in zip(LAYERS["layers"], document["layers"], strict=True):
        slices = got["gradient_slices_bytes"]
        best_without = None
        for phase in ("forward", "backward"):
            plan, backward = got[phase], phase == "backward"
            assert set(plan) == {"degree", "order", "predicted_ms", "by_degree"}
            slice_ms = allreduce_ms(slices[0]) if backward else 0.0
            times = {
                str(degree): min(
                    oracles.play(durations(layer, degree, backward), order, slice_ms)[1]
                    for order in ORDERS
                )
                for degree in range(1, 9)
            }
            assert plan["by_degree"] == pytest.approx(times)
            assert plan["predicted_ms"] == pytest.approx(min(times.values()))
            assert plan["predicted_ms"] == plan["by_degree"][str(plan["degree"])]
            named = oracles.play(
                durations(layer, plan["degree"], backward), plan["order"], slice_ms
            )
            assert named[1] == pytest.approx(plan["predicted_ms"])
            if backward:
                best_without = min(
                    oracles.play(durations(layer, degree, True), order)[1]
                    for degree in range(1, 9)
                    for order in ORDERS
                )
        expected = got["backward"]["predicted_ms"] - best_without
        expected += max(0.0, allreduce_ms(slices[1]) - layer["dense_backward_ms"])
        expected += allreduce_ms(slices[2])
        assert got["exposed_gradient_ms"] == pytest.approx(expected)
        exposed += expected
    sent = [got["gradient_slices_bytes"] for got in document["layers"]]
    assert sum(map(sum, sent)) == 3 * LAYER["gradient_bytes"]
    assert sent[2][0] == sent[2][1] == 0  # the last layer's backward comes first
    assert sent[1][2] == sent[2][2] == 0
    assert sent[0][2] >= LAYER["gradient_bytes"]  # nothing comes after the first layer's
    assert sum(sent[1][:2]) <= LAYER["gradient_bytes"]
    assert exposed < 3 * allreduce_ms(LAYER["gradient_bytes"])  # something was hidden
    assert document["fit"] == {name: {"r2": None, **own} for name, own in PROFILE.items()}


def test_twice_the_same(schedule, capsys):
    schedule("--json", "--uneven-chunks")
    first = capsys.readouterr().out
    schedule("--json", "--uneven-chunks")
    assert capsys.readouterr().out == first


def test_uneven_chunks_are_only_made_when_asked_for(schedule, capsys):
    schedule("--json")
    even = json.loads(capsys.readouterr().out)["layers"]
    schedule("--json", "--uneven-chunks")
    uneven = json.loads(capsys.readouterr().out)["layers"]
    plans = [(one["forward"], other["forward"]) for one, other in zip(even, uneven, strict=True)]
    assert any("fractions" in other for _, other in plans)
    for one, other in plans:
        assert "fractions" not in one
        assert other["predicted_ms"] <= one["predicted_ms"]
        if "fractions" in other:
            assert len(other["fractions"]) == other["degree"]
            assert sum(other["fractions"]) == pytest.approx(1)


def test_report_for_people(schedule, capsys):
    assert schedule("--layer", "1", "--uneven-chunks") == 0
    text = capsys.readouterr().out
    assert "Gradients prolong the step by" in text
    assert "Layer 1, backward" in text
    assert "uneven" in text
    assert "25 GB/s" in text
    assert "100 TFLOP/s" in text
    lanes = {line.split()[0]: line.split()[1] for line in text.splitlines()[-4:-1]}
    assert set("DdCcG") <= set(lanes["inter"]) <= set("DdCcG·")
    assert set(lanes["compute"]) <= set("Ee·")


def test_equal_layers_are_one_row(schedule, capsys):
    layer = {**LAYER, "gradient_bytes": 0}
    assert schedule(layers={"max_degree": 4, "layers": [layer] * 60}) == 0
    assert "0-59" in capsys.readouterr().out


def test_layers_without_any_work(schedule, capsys):
    nothing = dict.fromkeys(LAYER, 0)
    assert schedule(layers={"max_degree": 4, "layers": [nothing]}) == 0
    capsys.readouterr()
    assert schedule("--json", layers={"max_degree": 4, "layers": [nothing]}) == 0
    layer = json.loads(capsys.readouterr().out)["layers"][0]
    assert (layer["forward"]["degree"], layer["forward"]["predicted_ms"]) == (1, 0)


def test_a_bad_fit_is_said_and_used(schedule, capsys):
    profile = {**PROFILE, "gemm": {**PROFILE["gemm"], "r2": 0.99, "max_relative_error": 0.4}}
    assert schedule("--json", profile=profile) == 0
    captured = capsys.readouterr()
    assert "gemm: the line misses a measured time by 40%" in captured.err
    assert json.loads(captured.out)["fit"]["gemm"]["max_relative_error"] == 0.4


def test_profiles_are_described_as_they_are_read(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    profile = read_profile(path)
    path.write_text(json.dumps(describe_profile(profile)))
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object with a2a, allgather"),
        ({**PROFILE, "a2a": 3}, 'a2a must be {"alpha_ms": .., "beta_ms_per_byte": ..}'),
        ({"a2a": PROFILE["a2a"]}, "allgather must be"),
        ({**PROFILE, "gemm": PROFILE["a2a"]}, "gemm.beta_ms_per_flop is null"),
        ({**PROFILE, "a2a": {"alpha_ms": -1, "beta_ms_per_byte": 1}}, "a2a.alpha_ms is -1"),
        ({**PROFILE, "a2a": {**PROFILE["a2a"], "r2": "x"}}, 'a2a.r2 is "x"'),
        ({**PROFILE, "a2a": {"alpha_ms": 10**400, "beta_ms_per_byte": 1}}, "a2a.alpha_ms is 100"),
    ],
)
def test_profiles_that_cannot_be_read(schedule, tmp_path, capsys, profile, message):
    assert schedule("--json", profile=profile) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith(f"megatron-resilient schedule: {tmp_path / 'profile.json'}: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("nonsense", "not JSON"),
        ({"max_degree": 4, "layers": []}, "expected"),
        ({"layers": [LAYER]}, "max_degree is null: it must be an integer from 1"),
        ({"max_degree": 2.5, "layers": [LAYER]}, "max_degree is 2.5"),
        ({"max_degree": 0, "layers": [LAYER]}, "max_degree is 0"),
        ({"max_degree": 4, "layers": [LAYER, 1]}, "layers[1] must be an object"),
        ({"max_degree": 4, "layers": [{"a2a_bytes": 1}]}, "layers[0].allgather_bytes is null"),
        ({"max_degree": 4, "layers": [{**LAYER, "a2a_bytes": -1}]}, "layers[0].a2a_bytes is -1"),
        ({"max_degree": 4, "layers": [{**LAYER, "gradient_bytes": 0.5}]}, "bytes come whole"),
        ({"max_degree": 4, "layers": [{**LAYER, "expert_flops": True}]}, "expert_flops is true"),
    ],
)
def test_layers_that_cannot_be_read(schedule, tmp_path, capsys, layers, message):
    assert schedule(layers=layers) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megatron-resilient schedule: {tmp_path / 'layers.json'}: ")
    assert message in error


def test_missing_files(tmp_path, capsys):
    absent = str(tmp_path / "absent.json")
    assert cli.main(["schedule", "--profile", absent, "--layers", absent]) == 2
    assert "absent.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["schedule"])
    assert stopped.value.code == 2


def test_a_layer_that_is_not_there(schedule, capsys):
    assert schedule("--layer", "3") == 2
    assert "layers.json has layers 0 to 2" in capsys.readouterr().err


def test_neither_torch_nor_megatron_is_imported(schedule, tmp_path):
    schedule()
    files = [str(tmp_path / "profile.json"), str(tmp_path / "layers.json")]
    code = (
        "import sys; from megatron_resilient.cli import main; "
        f"main(['schedule', '--profile', {files[0]!r}, '--layers', {files[1]!r}]); "
        "sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0

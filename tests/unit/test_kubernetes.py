"""The manifest for Kubernetes: its commands and flags are ours, and its parts fit together."""

from pathlib import Path

import pytest
import yaml

from megatron_resilient.cli import build_parser
from megatron_resilient.config import SECTIONS, flag_name
from megatron_resilient.elastic.limits import Limits

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "pretrain_moe.yaml"


@pytest.fixture(scope="module")
def parts():
    """{(kind, name): document}."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def pod(parts, kind, name):
    return parts[kind, name]["spec"]["template"]["spec"]


def commands(parts):
    for kind, name in parts:
        if kind in ("Deployment", "StatefulSet"):
            for container in pod(parts, kind, name)["containers"]:
                yield container["name"], container["command"]


def test_commands_are_what_the_program_takes(parts):
    parsed = {}
    for name, (program, *arguments) in commands(parts):
        assert program == "megatron-resilient"
        parsed[name] = build_parser().parse_args(arguments)
    fewest, most = parsed["node"].nnodes
    assert parsed["coordinator"].nnodes == f"{fewest}:{most}"
    assert parts["StatefulSet", "moe-nodes"]["spec"]["replicas"] == most
    host, port = parsed["node"].coordinator.split(":")
    service = parts["Service", host]["spec"]
    assert [each["port"] for each in service["ports"]] == [int(port)]
    assert parsed["coordinator"].port == int(port)
    assert parsed["metrics"].run_dir == Path(parsed["coordinator"].run_dir)


def test_flags_of_the_plugin_are_known(parts):
    known = {
        flag_name(item)
        for section in SECTIONS.values()
        for item in section.__dataclass_fields__.values()
    }
    (training,) = (command for name, command in commands(parts) if name == "node")
    asked = {word for word in training if word.startswith("--resilient-")}
    assert asked
    assert asked <= known


def test_an_evicted_node_has_time_to_hand_over(parts):
    grace = pod(parts, "StatefulSet", "moe-nodes")["terminationGracePeriodSeconds"]
    assert grace > Limits().leave_timeout


def test_volumes_and_selectors_fit_together(parts):
    claims = {name for kind, name in parts if kind == "PersistentVolumeClaim"}
    for kind, name in parts:
        spec = parts[kind, name]["spec"]
        if kind == "Service":
            labels = [
                other["spec"]["template"]["metadata"]["labels"]
                for (what, _), other in parts.items()
                if what in ("Deployment", "StatefulSet")
            ]
            assert spec["selector"] in labels
        elif kind in ("Deployment", "StatefulSet"):
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
            volumes = {each["name"]: each for each in pod(parts, kind, name)["volumes"]}
            for container in pod(parts, kind, name)["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in claims

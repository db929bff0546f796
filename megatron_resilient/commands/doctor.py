"""Says what this machine has, whether it can train, and what to do about what is missing."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from megatron_resilient import __version__

if TYPE_CHECKING:
    from megatron_resilient.machine import Machine

HELP = "check versions, device and optional packages"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when nothing known stands in the way of training, 1 when something does."""
    from megatron_resilient.machine import inspect_machine

    report = describe(inspect_machine())
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0 if report["can_train"] else 1


def describe(machine: "Machine") -> dict[str, Any]:
    """Returns the JSON document: the facts that matter, the findings, the answer."""
    from megatron_resilient import doctor

    findings = doctor.examine(machine)
    return {
        "can_train": doctor.can_train(findings),
        "versions": {
            "megatron-resilient": __version__,
            "python": ".".join(map(str, machine.python)),
            "torch": machine.versions.get("torch"),
            "megatron-core": machine.versions.get("megatron-core"),
        },
        "device": {
            "kind": "cuda" if machine.torch.gpus else "cpu",
            "gpus": [
                {
                    "name": gpu.name,
                    "capability": "{}.{}".format(*gpu.capability),
                    "memory_bytes": gpu.memory_bytes,
                }
                for gpu in machine.torch.gpus
            ],
            "driver": machine.driver,
            "torch_cuda": machine.torch.cuda,
        },
        "optional": [
            {
                "name": optional.name,
                "version": machine.versions.get(optional.name),
                "state": doctor.state(optional, machine),
                "without": optional.without,
            }
            for optional in doctor.OPTIONAL
        ],
        "findings": [
            {"severity": finding.severity, "what": finding.what, "fix": finding.fix}
            for finding in findings
        ],
    }


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    for name, version in report["versions"].items():
        facts.add_row(name, version or "[red]missing[/]")
    for line in _device_lines(report["device"]):
        facts.add_row("device", escape(line))

    packages = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("optional package", "version", "state", "without it"):
        packages.add_column(heading)
    for package in report["optional"]:
        state = package["state"]
        colour = {"used": "green", "idle": "cyan", "missing": "yellow"}[state]
        packages.add_row(
            package["name"], package["version"] or "-", f"[{colour}]{state}[/]", package["without"]
        )

    findings = Table.grid(padding=(0, 2))
    for finding in report["findings"]:
        colour = {"bad": "red", "note": "yellow"}[finding["severity"]]
        text = escape(f"{finding['what']}\n-> {finding['fix']}")
        findings.add_row(f"[{colour}]{finding['severity']}[/]", text)

    console = Console(highlight=False)
    console.print(facts, "", packages, "", sep="\n")
    if report["findings"]:
        console.print(findings, "", sep="\n")
    if report["can_train"]:
        console.print(f"[green]This machine can train, on {report['device']['kind']}.[/]")
    else:
        console.print("[red]Training cannot work here: see what is marked bad.[/]")


def _device_lines(device: dict[str, Any]) -> list[str]:
    driver = f"driver {device['driver'] or 'unknown'}"
    return [
        f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, "
        f"{driver}, torch for CUDA {device['torch_cuda']}"
        for gpu in device["gpus"]
    ] or ["cpu (no CUDA device)"]

"""What is installed and plugged in here: the facts that `doctor` judges."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from megatron_resilient.patching.apply import lock_file
from megatron_resilient.patching.lock import Lock

DISTRIBUTION = "megatron-resilient"
ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS",)

# Run in a process of its own: a torch that crashes or hangs at import then still gets an answer.
_PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        gpus.append({"name": p.name, "capability": [p.major, p.minor],
                     "memory_bytes": p.total_memory})
print(json.dumps({
    "cuda": torch.version.cuda,
    "architectures": torch.cuda.get_arch_list(),
    "gpus": gpus,
    "complaint": next((str(w.message) for w in caught if "CUDA" in str(w.message)), None),
}))
"""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    """What torch says of itself and of the devices.

    Attributes:
        error: why it does not import; None when it does (the rest is then empty).
        cuda: the CUDA release it was built for; None for a CPU build.
        architectures: what its kernels were compiled for (`sm_90`, `compute_120`, ...).
        gpus: the CUDA devices it can use.
        complaint: its own warning about the driver, if it gave one.
    """

    error: str | None = None
    cuda: str | None = None
    architectures: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    complaint: str | None = None


@dataclass(frozen=True)
class Machine:
    """Facts about one machine and one Python environment.

    Attributes:
        python: version of the running interpreter.
        versions: installed version by canonical distribution name.
        requirements: requirement strings of this package, extras included; None when it runs from
            a tree that was not installed.
        locked: per upstream distribution the version from which patches.lock was written.
        torch: see `Torch`.
        driver: version of the loaded NVIDIA kernel driver, None without one.
        shared_memory_bytes: size of /dev/shm, None where there is none.
        environment: the variables named in `ENVIRONMENT` that are set.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str]
    requirements: tuple[str, ...] | None
    locked: Mapping[str, str] = field(default_factory=dict)
    torch: Torch = Torch()
    driver: str | None = None
    shared_memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def inspect_machine() -> Machine:
    """Looks at this machine; takes as long as one import of torch in a fresh process."""
    shared_memory = Path("/dev/shm")
    requirements = own_requirements()
    return Machine(
        python=sys.version_info[:3],
        versions=installed_versions(),
        requirements=requirements,
        locked=locked_versions() if requirements is not None else {},
        torch=probe_torch(),
        driver=driver_version(Path("/proc/driver/nvidia/version")),
        shared_memory_bytes=(
            shutil.disk_usage(shared_memory).total if shared_memory.is_dir() else None
        ),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )


def canonical(name: str) -> str:
    """Returns the one spelling of a distribution's name under which it is compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_versions() -> dict[str, str]:
    """Returns the version of every installed distribution, from metadata alone.

    Of two copies on `sys.path` the first counts, as for imports.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        versions.setdefault(canonical(distribution.name), distribution.version)
    return versions


def own_requirements() -> tuple[str, ...] | None:
    """Returns what this package's own metadata asks for, None when it is not installed."""
    try:
        return tuple(metadata.requires(DISTRIBUTION) or ())
    except metadata.PackageNotFoundError:
        return None


def locked_versions() -> dict[str, str]:
    """Returns the upstream versions from which patches.lock was written.

    Raises:
        PatchError: the file is missing or damaged.
    """
    lock = Lock.read(lock_file())
    return {target.upstream: target.version for target in lock.targets.values()}


def probe_torch(python: str = sys.executable, timeout_seconds: float = 120) -> Torch:
    """Imports torch in a fresh process and asks it for the devices.

    Args:
        python: the interpreter to ask.
        timeout_seconds: after this long torch counts as broken (a hung driver does that).
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"no answer within {timeout_seconds:g} s")
    if done.returncode != 0:
        last_words = done.stderr.strip().splitlines()
        return Torch(error=last_words[-1] if last_words else f"exit status {done.returncode}")
    facts = json.loads(done.stdout.splitlines()[-1])
    gpus = tuple(
        Gpu(gpu["name"], tuple(gpu["capability"]), gpu["memory_bytes"]) for gpu in facts["gpus"]
    )
    return Torch(
        cuda=facts["cuda"],
        architectures=tuple(facts["architectures"]),
        gpus=gpus,
        complaint=facts["complaint"],
    )


def driver_version(report: Path) -> str | None:
    """Reads the driver's version from the kernel's report; works in containers, needs no tool."""
    if not report.is_file():
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", report.read_text(encoding="utf-8"))
    return match.group() if match else None

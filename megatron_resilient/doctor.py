"""Judges a machine: what cannot work, what works but badly, what each missing package costs.

Every rule is a pure function of the facts in `machine.Machine`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from megatron_resilient.machine import Machine, canonical

OLDEST_PYTHON = (3, 12)
NVRX = "nvidia-resiliency-ext"
OLDEST_NVRX = "0.6.0"
BLACKWELL = (10, 0)
SMALL_SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        severity: `bad` when training cannot work, `note` when it can but something is to be known.
        what: what is the matter.
        fix: what to do about it.
    """

    severity: Literal["bad", "note"]
    what: str
    fix: str


@dataclass(frozen=True)
class Optional:
    """A package that is used when it is there.

    Attributes:
        name: canonical distribution name.
        without: what its absence costs.
        needs_gpu: it lies idle on a machine without a CUDA device.
    """

    name: str
    without: str
    needs_gpu: bool = False


OPTIONAL = (
    Optional(
        "transformer-engine",
        "experts run one after another (no grouped GEMM), no FP8, no fused attention",
        needs_gpu=True,
    ),
    Optional("apex", "no fused Adam and norms where Transformer Engine lacks too", needs_gpu=True),
    Optional("deep-ep", "no DeepEP backend of the flex dispatcher", needs_gpu=True),
    Optional(NVRX, "none of Megatron's own local checkpoints and restarts"),
    Optional("sentencepiece", "prepare-data cannot train or read SentencePiece tokenizers"),
    Optional("tensorboard", "no TensorBoard scalars; events.jsonl and the report have them"),
    Optional("wandb", "no Weights & Biases logging"),
    Optional("prometheus-client", "no metrics endpoint for Prometheus"),
    Optional("matplotlib", "the tools that draw figures do not run"),
)


def examine(machine: Machine) -> tuple[Finding, ...]:
    """Returns all findings, the bad ones first."""
    findings = [finding for rule in RULES for finding in rule(machine)]
    return tuple(sorted(findings, key=lambda finding: finding.severity != "bad"))


def can_train(findings: tuple[Finding, ...]) -> bool:
    """Says whether nothing is known to stand in the way."""
    return all(finding.severity != "bad" for finding in findings)


def state(optional: Optional, machine: Machine) -> Literal["used", "idle", "missing"]:
    """Says whether an optional package is there, and of use on this machine."""
    if optional.name not in machine.versions:
        return "missing"
    return "idle" if optional.needs_gpu and not machine.torch.gpus else "used"


def _python(machine: Machine) -> Iterator[Finding]:
    if machine.python[:2] < OLDEST_PYTHON:
        version = ".".join(map(str, machine.python))
        yield Finding(
            "bad",
            f"Python {version}; Megatron-Core 0.19 needs 3.12 or newer",
            "create the environment with a newer Python: make install PYTHON=/path/to/python3.12",
        )


def _requirements(machine: Machine) -> Iterator[Finding]:
    if machine.requirements is None:
        yield Finding(
            "bad",
            "megatron_resilient runs from a source tree that is not installed, without its patches",
            "pip install -e . in that tree",
        )
        return
    for text in machine.requirements:
        requirement = Requirement(text)
        extra = "extra ==" in str(requirement.marker)
        name = canonical(requirement.name)
        installed = machine.versions.get(name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if installed is None:
            if not extra:
                yield Finding("bad", f"{wanted} is not installed", f"pip install '{wanted}'")
        # NVIDIA's containers carry pre-releases of torch: they count as what they precede.
        elif not requirement.specifier.contains(installed, prereleases=True) and name != NVRX:
            yield Finding(
                "note" if extra else "bad",
                f"{name} {installed} is outside the range {requirement.specifier} it was made for",
                f"pip install '{wanted}'",
            )


def _lock(machine: Machine) -> Iterator[Finding]:
    for upstream, locked in sorted(machine.locked.items()):
        installed = machine.versions.get(upstream)
        if installed is not None and Version(installed).public != Version(locked).public:
            yield Finding(
                "note",
                f"{upstream} is {installed}, the patches were locked against {locked}",
                "megatron-resilient patches check tells whether the code in question differs",
            )


def _nvrx(machine: Machine) -> Iterator[Finding]:
    installed = machine.versions.get(NVRX)
    if installed is not None and Version(installed) < Version(OLDEST_NVRX):
        yield Finding(
            "bad",
            f"{NVRX} {installed} breaks the import of Megatron-Core 0.19, which needs its newer "
            "interface",
            f"pip uninstall {NVRX}, or pip install '{NVRX}>=0.6'",
        )


def _apex(machine: Machine) -> Iterator[Finding]:
    # NVIDIA's Apex calls itself 0.1; what the package index has under the name begins at 0.9.
    installed = machine.versions.get("apex")
    if installed is not None and Version(installed) >= Version("0.9.dev0"):
        yield Finding(
            "note",
            f"apex {installed} is a web toolkit of the same name, not NVIDIA's Apex",
            "pip uninstall apex; NVIDIA's is built from its sources, or in NVIDIA's containers",
        )


def _torch(machine: Machine) -> Iterator[Finding]:
    if "torch" in machine.versions and machine.torch.error is not None:
        yield Finding(
            "bad",
            f"torch {machine.versions['torch']} does not import: {machine.torch.error}",
            "reinstall it for this driver and Python: pip install --force-reinstall torch",
        )


def _device(machine: Machine) -> Iterator[Finding]:
    torch = machine.torch
    if torch.error is None and machine.driver is not None and not torch.gpus:
        built = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
        why = torch.complaint or f"torch is {built} and sees no device"
        yield Finding(
            "note",
            f"NVIDIA driver {machine.driver} is loaded, yet training would run on the CPU: {why}",
            "check CUDA_VISIBLE_DEVICES, the container's --gpus option and the driver's age",
        )
    if torch.cuda is None:
        return
    for name, capability in sorted({(gpu.name, gpu.capability) for gpu in torch.gpus}):
        if not _has_kernels(torch.architectures, capability):
            yield Finding(
                "bad",
                f"this torch has no kernels for {name} (capability {capability[0]}."
                f"{capability[1]}), only for {', '.join(torch.architectures)}",
                "install a torch built for this device",
            )


def _has_kernels(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Binary code runs on later minors of its major, PTX on everything later."""

    def fits(architecture: str) -> bool:
        kind, digits = architecture.rstrip("af").split("_")
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute":
            return (major, minor) <= capability
        return major == capability[0] and minor <= capability[1]

    return any(map(fits, architectures))


def _connections(machine: Machine) -> Iterator[Finding]:
    if machine.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return
    if any(gpu.capability < BLACKWELL for gpu in machine.torch.gpus):
        yield Finding(
            "note",
            "Megatron refuses tensor and context parallelism on GPUs older than Blackwell unless "
            "CUDA_DEVICE_MAX_CONNECTIONS is 1",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1 for such jobs",
        )


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    size = machine.shared_memory_bytes
    if size is not None and size < SMALL_SHARED_MEMORY_BYTES:
        yield Finding(
            "note",
            f"/dev/shm has only {size >> 20} MiB: NCCL and data loader workers may fail in it",
            "start the container with --ipc=host or --shm-size=16g",
        )


RULES: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _python,
    _requirements,
    _lock,
    _nvrx,
    _apex,
    _torch,
    _device,
    _connections,
    _shared_memory,
)

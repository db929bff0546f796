"""The configuration: frozen dataclasses, from which the `--resilient-*` flags are generated.

A field `run_dir` becomes the flag `--resilient-run-dir`; its help, choices and unit stand in the
field's metadata. What must hold inside one section is checked when the section is made.
"""

import argparse
from dataclasses import Field, dataclass, field, fields
from typing import Any

from megatron_resilient.errors import ConfigError

PREFIX = "resilient_"
DEVICES = ("auto", "cpu", "cuda")


def _flag(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class DeviceConfig:
    """Where training runs."""

    device: str = _flag(
        "auto",
        "auto: the GPU if there is one, else the CPU with gloo. Read by enable(), before parsing.",
        DEVICES,
    )


@dataclass(frozen=True)
class TelemetryConfig:
    """What a run writes about itself."""

    run_dir: str | None = _flag(
        None,
        "folder for events.jsonl and summary.json; default: the --save folder, without one "
        "./resilient_run",
    )
    expert_load_interval: int = _flag(
        10, "steps between two expert_load events (tokens per expert and layer); 0: none"
    )

    def __post_init__(self) -> None:
        if self.expert_load_interval < 0:
            raise ConfigError(
                f"--resilient-expert-load-interval {self.expert_load_interval}: must be 0 (none) "
                "or a number of steps"
            )


@dataclass(frozen=True)
class ResilientConfig:
    """All sections together."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


SECTIONS: dict[str, type] = {"device": DeviceConfig, "telemetry": TelemetryConfig}


def flag_name(section_field: "Field[Any]") -> str:
    """Returns the command-line spelling of a field."""
    return "--" + (PREFIX + section_field.name).replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per field of every section to `parser`."""
    for name, section in SECTIONS.items():
        group = parser.add_argument_group(f"resilient: {name}", section.__doc__)
        for item in fields(section):
            is_bool = item.type is bool
            group.add_argument(
                flag_name(item),
                default=item.default,
                help=item.metadata["help"],
                **(
                    {"action": argparse.BooleanOptionalAction}
                    if is_bool
                    else {"type": _value_type(item), "choices": item.metadata["choices"]}
                ),
            )


def config_from_args(args: argparse.Namespace) -> ResilientConfig:
    """Builds the configuration from parsed flags.

    Raises:
        ConfigError: two values do not go together, or one is out of range.
    """
    return ResilientConfig(
        **{
            name: section(**{f.name: getattr(args, PREFIX + f.name) for f in fields(section)})
            for name, section in SECTIONS.items()
        }
    )


def _value_type(item: "Field[Any]") -> type:
    for candidate in (int, float, str):
        if item.type is candidate or item.type == (candidate | None):
            return candidate
    raise TypeError(f"no flag type for field {item.name}: {item.type}")

"""The `--resilient-*` flags: generated from dataclasses, listed here, checked where they meet."""

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient import config
from megatron_resilient.algorithms.stream_model import ORDERS
from megatron_resilient.comm import routes
from megatron_resilient.config import ResilientConfig, add_flags, config_from_args, flag_name
from megatron_resilient.errors import ConfigError

# A flag is a promise to users: a new one, another default or another type is entered here on
# purpose, together with its line in the changelog.
FLAGS = {
    "--resilient-device": (str, "auto"),
    "--resilient-slots-per-rank": (int, 0),
    "--resilient-min-replicas": (int, 2),
    "--resilient-ranks-per-node": (int, 0),
    "--resilient-rebalance-interval": (int, 200),
    "--resilient-load-window": (int, 0),
    "--resilient-rebalance-threshold": (float, 0.05),
    "--resilient-check-replicas-interval": (int, 0),
    "--resilient-max-expert-gib": (float, 0.0),
    "--resilient-gate": (str, "megatron"),
    "--resilient-gate-dimensions": (int, 0),
    "--resilient-gate-temperature": (float, 0.3),
    "--resilient-gate-mixtures": (int, 0),
    "--resilient-allow-lookahead-gates": (None, False),
    "--resilient-wire-dtype": (str, "model"),
    "--resilient-overlap": (str, "off"),
    "--resilient-overlap-degrees": (int, (2, 2)),
    "--resilient-overlap-order": (str, "gather-first"),
    "--resilient-overlap-max-degree": (int, 8),
    "--resilient-overlap-interval": (int, 100),
    "--resilient-overlap-profiles": (str, None),
    "--resilient-dispatch": (str, "direct"),
    "--resilient-min-nodes": (int, 0),
    "--resilient-require-exact": (None, False),
    "--resilient-mirror": (None, True),
    "--resilient-fault": (str, None),
    "--resilient-checkpoint-format": (str, "torch_dist"),
    "--resilient-checkpoint-experts": (int, 0),
    "--resilient-checkpoint-snapshot-experts": (int, 0),
    "--resilient-checkpoint-exact": (None, False),
    "--resilient-checkpoint-selection": (str, "sequential"),
    "--resilient-checkpoint-masters": (str, "selected"),
    "--resilient-checkpoint-lost-tokens": (float, 0.0375),
    "--resilient-checkpoint-memory-gib": (float, 0.0),
    "--resilient-checkpoint-mtbf-seconds": (float, 0.0),
    "--resilient-checkpoint-keep": (int, 2),
    "--resilient-checkpoint-stall-seconds": (float, 60.0),
    "--resilient-run-dir": (str, None),
    "--resilient-expert-load-interval": (int, 10),
}
PAIRS = [flag for flag, (_, default) in FLAGS.items() if isinstance(default, tuple)]
NUMBERS = [flag for flag, (kind, _) in FLAGS.items() if kind in (int, float) and flag not in PAIRS]
LEAST = {
    "--resilient-min-replicas": 1,
    "--resilient-overlap-max-degree": 1,
    "--resilient-overlap-interval": 1,
    "--resilient-gate-temperature": 0.01,
    "--resilient-checkpoint-stall-seconds": 1,
}


def parse(*argv: str) -> ResilientConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    return config_from_args(parser.parse_args(argv))


def actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {action.option_strings[0]: action for action in parser._actions}


def test_no_flag_comes_goes_or_changes_unnoticed():
    assert {flag: (action.type, action.default) for flag, action in actions().items()} == FLAGS


def test_every_flag_is_explained():
    for flag, action in actions().items():
        assert len(action.help) > 20, flag
        assert "%" not in action.help.replace("%%", ""), flag  # argparse would format it
    assert actions()["--resilient-device"].choices == config.DEVICES
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert all(flag in parser.format_help() for flag in FLAGS)


def test_sections_are_frozen_documented_and_complete():
    fields = {field.name: field for field in dataclasses.fields(ResilientConfig)}
    assert config.SECTIONS.keys() == fields.keys()
    for name, section in config.SECTIONS.items():
        assert section.__doc__
        assert fields[name].type is section
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section(), dataclasses.fields(section)[0].name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ResilientConfig().device = None


def test_no_flags_mean_the_defaults():
    assert parse() == ResilientConfig()


def test_each_flag_reaches_its_own_field():
    for name, section in config.SECTIONS.items():
        for field in dataclasses.fields(section):
            flag, choices = flag_name(field), field.metadata["choices"]
            value = choices[1] if choices else "7"
            kind = FLAGS[flag][0]
            if kind is None:  # a switch
                switched = not field.default
                changed = parse(flag if switched else flag.replace("--", "--no-", 1))
            else:
                switched, changed = kind(value), parse(flag, *[value] * (1 + (flag in PAIRS)))
                if flag in PAIRS:
                    switched = (switched, switched)
            expected = dataclasses.replace(section(), **{field.name: switched})
            assert changed == dataclasses.replace(ResilientConfig(), **{name: expected})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--resilient-device", "gpu"), "argument --resilient-device: invalid choice: 'gpu'"),
        (("--resilient-slots-per-rank", "2.5"), "--resilient-slots-per-rank: invalid int value"),
        (("--resilient-max-expert-gib", "much"), "--resilient-max-expert-gib: invalid float value"),
    ],
)
def test_what_is_no_value_is_refused(argv, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        parse(*argv)


@given(flag=st.sampled_from(NUMBERS), below=st.integers(min_value=1, max_value=10**9))
def test_a_number_below_the_least_is_refused_by_name(flag, below):
    least = LEAST.get(flag, 0)
    value = FLAGS[flag][0](least - below)
    with pytest.raises(ConfigError, match=f"^{flag} {value}: must be at least {least}$"):
        parse(f"{flag}={value}")
    assert isinstance(parse(flag, str(least)), ResilientConfig)


def test_degrees_are_two_and_positive():
    assert parse("--resilient-overlap-degrees", "3", "1").overlap.overlap_degrees == (3, 1)
    with pytest.raises(ConfigError, match="--resilient-overlap-degrees 3 0: each must be"):
        parse("--resilient-overlap-degrees", "3", "0")
    with pytest.raises(argparse.ArgumentError, match="expected 2 arguments"):
        parse("--resilient-overlap-degrees", "3")


def test_choices_are_those_of_the_code_behind():
    assert config.OVERLAP_ORDERS == ORDERS
    assert config.DISPATCHES == routes.ALGORITHMS


def test_not_a_number_is_below_everything():
    for flag in ("--resilient-rebalance-threshold", "--resilient-max-expert-gib"):
        with pytest.raises(ConfigError, match=f"{flag} nan: must be at least 0"):
            parse(flag, "nan")


@given(interval=st.integers(0, 50), window=st.integers(0, 50))
def test_load_window_lies_within_the_rebalance_interval(interval, window):
    argv = (
        f"--resilient-rebalance-interval={interval}",
        f"--resilient-load-window={window}",
    )
    if window > interval > 0:
        with pytest.raises(ConfigError, match=f"--resilient-load-window {window}: must not exceed"):
            parse(*argv)
    else:
        assert parse(*argv).replicas.load_window == window


@dataclasses.dataclass(frozen=True)
class OtherConfig:
    """A section with what none has at present."""

    eager: bool = config._flag(True, "a switch that is on unless it is switched off")
    limit: float | None = config._flag(None, "a number or nothing")


def test_switches_and_optional_numbers(monkeypatch):
    monkeypatch.setattr(config, "SECTIONS", {"other": OtherConfig})
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert vars(parser.parse_args([])) == {"resilient_eager": True, "resilient_limit": None}
    parsed = parser.parse_args(["--no-resilient-eager", "--resilient-limit", "2.5"])
    assert vars(parsed) == {"resilient_eager": False, "resilient_limit": 2.5}


def test_a_field_that_no_flag_can_hold_is_a_mistake_of_ours(monkeypatch):
    section = dataclasses.make_dataclass(
        "Section", [("sizes", list[int], config._flag(None, "a list"))]
    )
    monkeypatch.setattr(config, "SECTIONS", {"other": section})
    with pytest.raises(TypeError, match="no flag type for field sizes"):
        add_flags(argparse.ArgumentParser())

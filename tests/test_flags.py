"""The flags: one for each field of the configuration, with a range, a default and clear errors."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from command_line import make_parser
from qevict_kernels.layout import ParamFormat
from qevict_tiers.config import (
    BudgetLimits,
    PrefillScores,
    PrefixFidelity,
    PrefixReuse,
    Promotion,
    TieringConfig,
)
from qevict_tiers.presets import PRESETS
from qevict_tiers.shares import Share, Shares
from sglang_qevict.flags import OPTIONS, Option, add_flags, config_from

ON = {"kv_tiering": "qevict"}

# A value that is not the default, as typed, and what it becomes.
VALUES: dict[str, tuple[str, object]] = {
    "budget": ("0.35", Fraction(7, 20)),
    "budget_limits": ("0.1-0.5", BudgetLimits(Fraction(1, 10), Fraction(1, 2))),
    "quant_fraction": ("0", Fraction(0)),
    "window": ("16", 16),
    "route_every": ("4", 4),
    "sink": ("0", 0),
    "local": ("64", 64),
    "key_bits": ("2", 2),
    "value_bits": ("2", 2),
    "params": ("fp16", ParamFormat.FP16),
    "prefill_scores": ("all", PrefillScores.ALL),
    "score_decay": ("0.875", Fraction(7, 8)),
    "promote": ("dequantize", Promotion.DEQUANTIZE),
    "prefix_reuse": ("off", PrefixReuse.OFF),
    "min_context": ("1024", 1024),
    "exact_prefill_tokens": ("4096", 4096),
    "full_layers": ("0,2-4", frozenset({0, 2, 3, 4})),
    "ssd_dir": ("/tmp/spill", Path("/tmp/spill")),
    "ssd_size": ("512M", 512 << 20),
    "ssd_persist": ("on", True),
    "spill_backend": ("file", "file"),
    "spill_config": ('{"a": 1}', '{"a": 1}'),
    "prefix_fidelity": ("codes", PrefixFidelity.CODES),
    "tenants": ('{"*": {"cap": 0.5}}', '{"*": {"cap": 0.5}}'),
}

# What an option cannot be without.
BESIDE: dict[str, dict[str, Any]] = {"spill_config": {"spill_backend": "file"}}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return ON | {f"kv_tiering_{field}": value for field, value in fields.items()}


# Values outside the range; one that is no number at all where a number is wanted.
WRONG: list[tuple[str, str]] = [
    *(("budget", text) for text in ("0", "-0.2", "1.01", "20%", "nan", "inf", "1/0", "")),
    *(("budget-limits", text) for text in ("0.1", "0-0.5", "0.5-0.1", "0.1-1.1", "-", "a-b")),
    *(("quant-fraction", text) for text in ("-0.1", "1.1", "all")),
    *(("score-decay", text) for text in ("-0.1", "1.1", "never", "nan")),
    *(("window", text) for text in ("0", "1", "7", "64", "8.0", "eight")),
    *(("route-every", text) for text in ("0", "-8", "1.5")),
    *(("sink", text) for text in ("-1", "x")),
    *(("local", text) for text in ("0", "-32")),
    *(("key-bits", text) for text in ("0", "1", "3", "8")),
    *(("value-bits", text) for text in ("1", "16")),
    *(("min-context", text) for text in ("0", "36", "-1")),
    *(("exact-prefill-tokens", text) for text in ("0", "511", "many")),
    *(("full-layers", text) for text in ("-1", "0,x", "3-", "-3", "4-2", "0;1", "0-99999999999")),
    *(("ssd-size", text) for text in ("0", "-1G", "16Q", "G", "many", "1/0")),
    ("spill-backend", "tape"),
    *(("ssd-persist", text) for text in ("yes", "1")),
    ("prefix-fidelity", "exact"),
    ("tenants", "/no/such/file"),
    ("params", "int8"),
    ("promote", "recall"),
    ("prefix-reuse", "on"),
    ("prefill-scores", "first"),
]


def test_each_field_of_the_configuration_has_exactly_one_flag() -> None:
    fields = [field.name for field in dataclasses.fields(TieringConfig)]
    assert sorted(option.field for option in OPTIONS) == sorted(fields)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_flag_is_named_as_its_field(option: Option) -> None:
    assert option.flag == "--kv-tiering-" + option.field.replace("_", "-")
    assert option.dest == "kv_tiering_" + option.field


def _actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    add_flags(parser, when_on=lambda: None)
    return {action.option_strings[0]: action for action in parser._actions}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_help_of_a_flag_tells_range_and_default(option: Option) -> None:
    text = _actions()[option.flag].help or ""
    assert text.startswith(option.help)
    assert f"Range: {option.allowed}; default: {option.default_text}." in text


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_default_that_help_tells_is_the_default(option: Option) -> None:
    if option.default is None:
        assert option.default_text in ("derived", "none")
    else:
        assert option.parse(option.default_text) == option.default


def test_help_of_all_flags_is_formatted_without_an_error() -> None:
    # argparse expands % in help texts only when it prints them.
    text = make_parser().format_help()
    for option in OPTIONS:
        assert option.flag in text
    assert "--kv-tiering {none,qevict}" in text


def test_no_flag_abbreviates_or_shadows_one_of_sglang() -> None:
    parser = argparse.ArgumentParser()
    from sglang.srt.server_args import ServerArgs

    ServerArgs.add_cli_args(parser)
    taken = {text for action in parser._actions for text in action.option_strings}
    assert not taken & set(_actions()) - {"-h"}


def test_nothing_given_means_no_tiering() -> None:
    assert config_from({}) is None
    assert config_from({"kv_tiering": "none"}) is None
    assert config_from({"kv_tiering": None}) is None


def test_the_mode_alone_means_the_defaults() -> None:
    assert config_from(ON) == TieringConfig()


def test_every_option_has_a_value_here() -> None:
    assert set(VALUES) == {option.field for option in OPTIONS}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_value_reaches_its_field_and_no_other(option: Option) -> None:
    text, value = VALUES[option.field]
    base = BESIDE.get(option.field, {})
    expected = dataclasses.replace(TieringConfig(), **base, **{option.field: value})
    assert expected != TieringConfig(**base)
    assert config_from({**_given(base), option.dest: text}) == expected


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_keyword_may_have_the_values_own_type(option: Option) -> None:
    text, value = VALUES[option.field]
    if isinstance(value, Enum):
        given: Any = value.value
    elif isinstance(value, Fraction):
        given = float(value)
    elif isinstance(value, (frozenset, Path)):
        given = text
    else:
        given = value
    on = _given(BESIDE.get(option.field, {}))
    assert config_from({**on, option.dest: given}) == config_from({**on, option.dest: text})


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_a_value_out_of_range_is_named_with_its_flag_and_the_range(name: str, text: str) -> None:
    (option,) = (option for option in OPTIONS if option.name == name)
    with pytest.raises(ValueError, match=f"^{option.flag} must be .+, got ") as error:
        config_from({**ON, option.dest: text})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_without_the_mode_is_an_error_that_names_both(option: Option) -> None:
    with pytest.raises(ValueError, match="has no effect without --kv-tiering qevict: add it") as e:
        config_from({option.dest: VALUES[option.field][0]})
    assert str(e.value).startswith(option.flag)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_none_overrules_an_option_such_as_one_of_a_configuration_file(option: Option) -> None:
    assert config_from({"kv_tiering": "none", option.dest: VALUES[option.field][0]}) is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_where_options_begin(name: str) -> None:
    config = PRESETS[name].config
    assert config_from({**ON, "kv_tiering_preset": name}) == config
    given = {**ON, "kv_tiering_preset": name, "kv_tiering_local": "48"}
    assert config_from(given) == dataclasses.replace(config, local=48)


def test_an_unknown_preset_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^--kv-tiering-preset must be one of balanced, .+ 'x'"):
        config_from({**ON, "kv_tiering_preset": "x"})


def test_a_preset_without_the_mode_is_an_error_and_none_overrules_it() -> None:
    with pytest.raises(ValueError, match=r"^--kv-tiering-preset has no effect without"):
        config_from({"kv_tiering_preset": "paper"})
    assert config_from({"kv_tiering": "none", "kv_tiering_preset": "paper"}) is None


def test_an_unknown_mode_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="must be none or qevict, got 'on'"):
        config_from({"kv_tiering": "on"})


@pytest.mark.parametrize(
    "flag", ["--kv-tiering", "--kv-tiering-preset", "--kv-tiering-params", "--kv-tiering-promote"]
)
def test_argparse_refuses_an_unknown_choice_with_the_choices(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        make_parser().parse_args(["--model-path", "x", flag, "else"])
    assert exit_.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag}: invalid choice: 'else'" in message
    assert "choose from" in message


@pytest.mark.slow
def test_launch_server_shows_the_flags_in_its_help() -> None:
    # `sglang serve --help` prints before it loads plugins, so it can't.
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    for option in OPTIONS:
        assert option.flag in result.stdout


# --- shares of tenants ---


def test_shares_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"acme": {"weight": 2, "floor": 0.25}, "*": {"cap": 0.5}}')
    config = config_from({**ON, "kv_tiering_tenants": str(path)})
    assert config is not None
    assert config.shares == Shares(
        {"acme": Share(weight=Fraction(2), floor=Fraction(1, 4))}, Share(cap=Fraction(1, 2))
    )


def test_a_keyword_may_have_shares_as_an_object() -> None:
    config = config_from({**ON, "kv_tiering_tenants": {"acme": {"weight": 2}}})
    assert config is not None
    assert config.shares == Shares({"acme": Share(weight=Fraction(2))})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "a JSON object of tenants by name, got '{'"),
        ('{"a": 1}', "an object for 'a', with weight, floor, cap, got 1"),
        ('{"a": {"share": 1}}', "weight, floor, cap for 'a', got 'share'"),
        ('{"a": {"weight": "2"}}', "a number as weight of 'a', got '2'"),
        ('{"a": {"weight": true}}', "a number as weight of 'a', got True"),
        ('{"a": {"weight": NaN}}', "a number as weight of 'a', got nan"),
        ('{"a": {"weight": 0}}', "a weight above 0, got 0, for 'a'"),
        ('{"a": {"cap": 1.5}}', "a cap above 0 and at most 1, got 1.5, for 'a'"),
        ('{"a": {"cap": 0}}', "a cap above 0 and at most 1, got 0, for 'a'"),
        ('{"a": {"floor": 0.6, "cap": 0.5}}', "a floor from 0 to its cap, 0.5, got 0.6, for 'a'"),
        ('{"a": {"floor": -0.1}}', "a floor from 0 to its cap, 1, got -0.1, for 'a'"),
        ('{"a": {"floor": 0.6}, "b": {"floor": 0.6}}', "floors that add up to 1 at most, got 1.2"),
        ('{"*": {"floor": 0.1}}', "no floor for *, since nobody knows how many they will be: name"),
    ],
)
def test_wrong_shares_are_named_with_what_there_should_be(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=r"^--kv-tiering-tenants must have ") as error:
        config_from({**ON, "kv_tiering_tenants": text})
    assert told in str(error.value)
    assert "\n" not in str(error.value)

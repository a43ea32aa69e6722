"""The ``--kv-tiering*`` flags: one table from which parsing, help and the docs are made."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from qevict_kernels.layout import ParamFormat
from qevict_tiers.config import (
    SPILL_BACKENDS,
    BudgetLimits,
    ByteSize,
    PrefillScores,
    PrefixFidelity,
    PrefixReuse,
    Promotion,
    TieringConfig,
)
from qevict_tiers.presets import DEFAULT_PRESET, PRESETS

__all__ = [
    "DESTS",
    "OPTIONS",
    "PREFIX",
    "PRESET_FLAG",
    "Option",
    "add_flags",
    "config_from",
    "typed",
]

PREFIX = "kv-tiering"
PRESET_FLAG = f"--{PREFIX}-preset"
_PRESET_DEST = "kv_tiering_preset"


@dataclass(frozen=True)
class Option:
    """One flag.

    name: its name after ``--kv-tiering-``. field: of ``TieringConfig``. parse: from the
    flag's text; raises ``ValueError``. allowed: the range, for help and docs.
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    allowed: str
    help: str
    choices: tuple[str, ...] | None = None
    none: str = "derived"
    """What a default of None is called."""

    @property
    def flag(self) -> str:
        """The flag as typed."""
        return f"--{PREFIX}-{self.name}"

    @property
    def dest(self) -> str:
        """The flag as a Python name."""
        return self.flag[2:].replace("-", "_")

    @property
    def metavar(self) -> str | None:
        """What stands for the value in the help; None where its choices do."""
        return None if self.choices else _METAVARS[self.parse]

    @property
    def default(self) -> Any:
        """The default, as the preset that is the default has it."""
        return getattr(TieringConfig(), self.field)

    @property
    def default_text(self) -> str:
        """The default as a user would type it."""
        return self.none if self.default is None else typed(self.default)


def typed(value: Any) -> str:
    """An option's value as a user would type it."""
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    if isinstance(value, frozenset):
        return ",".join(map(str, sorted(value))) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(getattr(value, "value", value))


def _switch(text: str) -> bool:
    # YAML reads a bare on or off as a truth value.
    return {"on": True, "off": False, "True": True, "False": False}[text]


_MANY_LAYERS = 10_000
"""No model has as many: a number beyond is a typing error, and would fill the memory."""


def _layers(text: str) -> frozenset[int]:
    """Layer numbers from a list such as ``0,1,28-29``; ``none`` or nothing means no layer."""
    layers: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        if part == "none":
            continue
        first, is_range, last = part.partition("-")
        numbers = range(int(first), int(last if is_range else first) + 1)
        if not numbers or numbers[-1] >= _MANY_LAYERS:
            raise ValueError(f"no layers from {first} to {last}")
        layers.update(numbers)
    return frozenset(layers)


def _tenants(text: str) -> str:
    """JSON, as it is given or as a file has it."""
    if text.lstrip().startswith("{"):
        return text
    try:
        return Path(text).read_text()
    except OSError as error:
        raise ValueError(str(error)) from None


_METAVARS: dict[Callable[[str], Any], str] = {
    Fraction: "SHARE",
    int: "N",
    _layers: "LAYERS",
    Path: "DIR",
    ByteSize.parse: "BYTES",
    BudgetLimits.parse: "MIN-MAX",
    _tenants: "FILE|JSON",
    str: "JSON",
}

OPTIONS: tuple[Option, ...] = (
    Option(
        "budget",
        "budget",
        Fraction,
        "above 0, at most 1",
        "Share of the full-precision KV bytes of its context that a request may hold, "
        "parameters and protected windows counted.",
    ),
    Option(
        "budget-limits",
        "budget_limits",
        BudgetLimits.parse,
        "such as 0.1-0.5, above 0, at most 1",
        "Between which a request may ask for a budget of its own, by kv_tiering_budget among its "
        "custom_params.",
        none="none",
    ),
    Option(
        "quant-fraction",
        "quant_fraction",
        Fraction,
        "0 to 1",
        "Share of the history's bytes that goes to coded windows; the rest stays FULL.",
    ),
    Option("window", "window", int, "4, 8, 16, 32", "Tokens in a window; also the page size."),
    Option(
        "route-every", "route_every", int, "1 or more", "Generated tokens between routing events."
    ),
    Option("sink", "sink", int, "0 or more", "First tokens that always stay FULL."),
    Option("local", "local", int, "1 or more", "Last tokens that always stay FULL."),
    Option("key-bits", "key_bits", int, "2, 4", "Bits of a coded key."),
    Option("value-bits", "value_bits", int, "2, 4", "Bits of a coded value."),
    Option(
        "params",
        "params",
        ParamFormat,
        "fp16, uint8",
        "How scales and zeros of codes are stored; uint8 takes half the bytes.",
        tuple(x.value for x in ParamFormat),
    ),
    Option(
        "prefill-scores",
        "prefill_scores",
        PrefillScores,
        "last, all",
        "Prompt queries that give the first scores: the last 32 (best when the question is "
        "in the prompt) or all (best when it comes later). In prompts that are routed chunk "
        "by chunk, last means the last 32 before each routing.",
        tuple(x.value for x in PrefillScores),
    ),
    Option(
        "score-decay",
        "score_decay",
        Fraction,
        "0 to 1",
        "What is left of a window's score after each routing event: 1 never forgets, 0 counts the "
        "attention since the last event only.",
    ),
    Option(
        "promote",
        "promote",
        Promotion,
        "alias, dequantize, restore",
        "What a coded window that ranks among the FULL ones again gets: alias leaves it "
        "coded, dequantize rebuilds its FULL copy and keeps the codes, restore brings its "
        "original back from the SSD tier.",
        tuple(x.value for x in Promotion),
    ),
    Option(
        "prefix-reuse",
        "prefix_reuse",
        PrefixReuse,
        "codes, off",
        "What later requests with the same prefix get of a finished request: its windows as "
        "codes (FULL where it was never routed), or nothing, so that every request computes "
        "its own prompt.",
        tuple(x.value for x in PrefixReuse),
    ),
    Option(
        "min-context",
        "min_context",
        int,
        "at least sink + local",
        "Tokens up to which a request stays FULL altogether.",
    ),
    Option(
        "exact-prefill-tokens",
        "exact_prefill_tokens",
        int,
        "at least min-context",
        "Prompts up to this length see themselves in full precision and are routed once, at "
        "their end; longer ones that do not fit one chunk are routed chunk by chunk, which "
        "lowers the peak. Derived: what half of the KV bytes can hold.",
    ),
    Option(
        "full-layers",
        "full_layers",
        _layers,
        "such as 0,1,28-29",
        "Layers whose windows all stay FULL; their bytes come out of the budget.",
    ),
    Option(
        "ssd-dir",
        "ssd_dir",
        Path,
        "a directory",
        "Switches on the SSD tier: the originals of all windows are written behind to this "
        "directory, and come back when a request begins alike.",
        none="none",
    ),
    Option(
        "ssd-size",
        "ssd_size",
        ByteSize.parse,
        "bytes, or such as 512M, 16G",
        "How much the SSD tier of each rank may take; the coldest goes first.",
    ),
    Option(
        "ssd-persist",
        "ssd_persist",
        _switch,
        "on, off",
        "Whether the SSD tier outlives the server: on keeps it for the next one with the same "
        "model, off empties it at start and end.",
        ("on", "off"),
    ),
    Option(
        "spill-backend",
        "spill_backend",
        str,
        ", ".join(SPILL_BACKENDS),
        "Where the originals go: to --kv-tiering-ssd-dir, or to one of SGLang's storage backends, "
        "which have a place and a size of their own.",
        SPILL_BACKENDS,
    ),
    Option(
        "spill-config",
        "spill_config",
        str,
        "a JSON object",
        "The extra configuration of a storage backend of SGLang's, as for "
        "--hicache-storage-backend-extra-config.",
        none="none",
    ),
    Option(
        "prefix-fidelity",
        "prefix_fidelity",
        PrefixFidelity,
        "full, codes",
        "What a prefix is reused as where its originals lie on the SSD: full brings them back, "
        "so that a new question sees all of it as it was; codes takes the originals only where "
        "memory keeps no codes.",
        tuple(x.value for x in PrefixFidelity),
    ),
    Option(
        "tenants",
        "tenants",
        _tenants,
        "a JSON object, or a file that has one",
        "Shares of tenants: each one's weight, floor and cap by name, and * for those without an "
        "entry. Without it nobody is told from anybody else.",
        none="none",
    ),
)

_TIERING_HELP = (
    "qevict: keep the KV cache in tiers: FULL, coded (INT2 or INT4) and evicted windows. "
    "none: stock SGLang, whatever the options below are. Default: none."
)

_PRESET_HELP = (
    "Options by name; any of the options below that is given as well wins over it. "
    + "; ".join(f"{name}: {preset.purpose}" for name, preset in PRESETS.items())
    + f". Default: {DEFAULT_PRESET}, whose options are the defaults below."
)

DESTS = ("kv_tiering", _PRESET_DEST, *(option.dest for option in OPTIONS))
"""All flags as Python names."""


def add_flags(parser: argparse.ArgumentParser, when_on: Callable[[], None]) -> None:
    """Add all flags to SGLang's parser.

    ``when_on`` is called when tiering is asked for; it may end the process.
    """

    def mode(text: str) -> str:
        if text == "qevict":
            when_on()
        return text

    group = parser.add_argument_group("KV tiering (sglang-qevict)")
    group.add_argument(
        f"--{PREFIX}",
        type=mode,
        choices=["none", "qevict"],
        default=None,
        help=_TIERING_HELP,
    )
    group.add_argument(PRESET_FLAG, choices=list(PRESETS), default=None, help=_PRESET_HELP)
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            type=str,
            choices=option.choices,
            metavar=option.metavar,
            default=None,
            help=f"{option.help} Range: {option.allowed}; default: {option.default_text}.",
        )


def config_from(values: Mapping[str, Any]) -> TieringConfig | None:
    """The configuration in a mapping of names (``kv_tiering``, ``kv_tiering_budget``, …).

    None where tiering is off: ``--kv-tiering none`` overrules the options of a configuration
    file. Raises ``ValueError``, naming flag, value and remedy, for a value out of range and
    for an option given without any ``--kv-tiering``.
    """
    mode = values.get("kv_tiering")
    if mode == "none":
        return None
    if mode not in (None, "qevict"):
        raise ValueError(f"--{PREFIX} must be none or qevict, got {mode!r}")
    preset = values.get(_PRESET_DEST)
    given = {o: values[o.dest] for o in OPTIONS if values.get(o.dest) is not None}
    if mode is None:
        flags = [PRESET_FLAG] * (preset is not None) + [option.flag for option in given]
        if flags:
            raise ValueError(f"{', '.join(flags)} has no effect without --{PREFIX} qevict: add it")
        return None
    preset = DEFAULT_PRESET if preset is None else preset
    if preset not in list(PRESETS):
        raise ValueError(f"{PRESET_FLAG} must be one of {', '.join(PRESETS)}, got {preset!r}")
    return replace(
        PRESETS[preset].config,
        **{option.field: _parsed(option, value) for option, value in given.items()},
    )


def _parsed(option: Option, value: Any) -> Any:
    try:
        if isinstance(value, dict):  # of YAML, or of a keyword
            value = json.dumps(value)
        is_list = isinstance(value, (list, tuple, set, frozenset, range))
        return option.parse(",".join(map(str, value)) if is_list else str(value))
    except (KeyError, ValueError, ZeroDivisionError):
        raise ValueError(f"{option.flag} must be {option.allowed}, got {value!r}") from None

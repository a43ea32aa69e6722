"""`sglang-qevict diagnose`: what tiers would do to a model on a text, from its true attention."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress

from qevict_tiers.config import SCORING_SPAN_TOKENS, PrefillScores, TieringConfig
from sglang_qevict.diagnose.policies import diagnose, policies
from sglang_qevict.diagnose.recording import record
from sglang_qevict.flags import add_flags, config_from
from sglang_qevict.models import MODEL_NAME, fetch_model
from sglang_qevict.offline import OfflineModel, Text
from sglang_qevict.sample_text import long_text

__all__ = ["Problem", "run"]


class Problem(Exception):
    """What a user can mend, in a sentence."""


def run(
    model: str | None,
    text: Path | None,
    prompt: int,
    steps: int,
    directory: Path,
    flags: Sequence[str],
) -> Path:
    """Record, compare, and write a report into ``directory``; returns its page.

    ``model``, ``text``: None for the embedded ones. ``prompt``, ``steps``: tokens that count as
    the prompt and as decoded. ``flags``: ``--kv-tiering-*`` of a server.

    Raises ``Problem``, a sentence with the remedy, for anything that a user can mend, and
    ``ModelError`` if the embedded model can't be had.
    """
    try:
        from sglang_qevict.diagnose.report import write_report
    except ImportError as error:
        raise Problem(f"{error.name} is missing: pip install 'sglang-qevict[diagnose]'") from None
    if prompt < 2 or steps < 1:
        raise Problem(f"--prompt must be 2 or more and --steps 1 or more, got {prompt}, {steps}")
    config = _config(flags)
    words = _read(text)
    offline = _load(model or fetch_model())
    tokens = offline.tokenize(words)
    if len(tokens) < prompt + steps:
        raise Problem(
            f"the text has {len(tokens)} tokens, but --prompt {prompt} --steps {steps} takes "
            f"{prompt + steps}: lower them, or name a longer text"
        )
    request = Text(tokens[: prompt + steps], prompt)
    span = prompt if config.prefill_scores is PrefillScores.ALL else SCORING_SPAN_TOKENS
    try:
        chosen = policies(config, offline.heads, offline.num_layers, prompt)
    except ValueError as error:
        raise Problem(str(error)) from None
    outcomes = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("attention", total=offline.num_layers)
        try:
            recording = record(
                offline, request, min(prompt, span) + steps, lambda: progress.advance(task)
            )
        except ValueError as error:
            raise Problem(str(error)) from None
        task = progress.add_task("policies", total=len(chosen))
        for outcome in diagnose(recording, chosen):
            outcomes.append(outcome)
            progress.advance(task)
    facts = {
        "model": model or MODEL_NAME,
        "text": text or "a part of Python's language reference",
        "prompt": f"{prompt} tokens",
        "decoded": f"{steps} tokens, those of the text",
        "budget": f"{float(config.budget):g} of the bytes",
        "options": " ".join(flags) or "defaults",
    }
    facts = {name: str(value) for name, value in facts.items()}
    return write_report(directory, outcomes, facts)


def _config(flags: Sequence[str]) -> TieringConfig:
    parser = _Parser(prog="diagnose", add_help=False, allow_abbrev=False)
    add_flags(parser, lambda: None)
    values = vars(parser.parse_args(list(flags)))
    try:
        config = config_from({**values, "kv_tiering": "qevict"})
    except ValueError as error:
        raise Problem(str(error)) from None
    assert config is not None
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Problem(message)


def _load(model: Path | str) -> OfflineModel:
    try:
        return OfflineModel(model)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise Problem(f"{model} can't be loaded as a model: {reason}") from None


def _read(text: Path | None) -> str:
    if text is None:
        return long_text()
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{text} can't be read as text: {error}") from None

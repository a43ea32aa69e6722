"""`sglang-qevict diagnose`: the recorded attention, the policies, the report, and bad input."""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qevict_tiers.config import TieringConfig
from qevict_tiers.diagnostics import Place
from sglang_qevict import cli
from sglang_qevict.diagnose.policies import Summary, diagnose, policies
from sglang_qevict.diagnose.recording import record
from sglang_qevict.diagnose.report import observations
from sglang_qevict.models import fetch_model
from sglang_qevict.offline import OfflineModel, Text
from sglang_qevict.sample_text import long_text

PROMPT, STEPS = 200, 40


@pytest.fixture(scope="module")
def model() -> OfflineModel:
    return OfflineModel(fetch_model(progress=False))


@pytest.fixture(scope="module")
def text(model: OfflineModel) -> Text:
    return Text(model.tokenize(long_text())[: PROMPT + STEPS], PROMPT)


def test_what_is_recorded_is_the_models_own_attention(model: OfflineModel, text: Text) -> None:
    recording = record(model, text, 60)
    eager = AutoModelForCausalLM.from_pretrained(
        fetch_model(progress=False), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        found = eager(torch.tensor([text.tokens]), output_attentions=True).attentions
    expected = torch.stack([layer[0].mean(0)[-60:] for layer in found])
    torch.testing.assert_close(recording.mass, expected, rtol=1e-4, atol=1e-6)


def test_policies_keep_no_more_than_the_bytes_and_see_all_attention(
    model: OfflineModel, text: Text
) -> None:
    config = TieringConfig(budget=Fraction(1, 2), min_context=195)
    chosen = policies(config, model.heads, model.num_layers, PROMPT)
    recording = record(model, text, 32 + STEPS)
    outcomes = {outcome.policy.name: outcome for outcome in diagnose(recording, chosen)}
    assert list(outcomes) == ["R1", "R2", "R3", "R3 off", "R4"]
    for name, outcome in outcomes.items():
        assert outcome.summary.bytes_share <= 0.5, name
        sums = outcome.places.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        assert outcome.selections[0].tokens == PROMPT
        # Protected are five and 32 tokens at least.
        assert outcome.places[..., Place.PROTECTED].min() > 0
    three, off = outcomes["R3"], outcomes["R3 off"]
    assert off.places[..., Place.CODED].max() == 0
    torch.testing.assert_close(
        off.places[..., Place.EVICTED],
        three.places[..., Place.CODED] + three.places[..., Place.EVICTED],
    )
    assert (off.fmm >= three.fmm - 1e-9)[:, :-1].all()


def test_what_is_said_of_the_paper_follows_the_numbers() -> None:
    def summary(**given: float) -> Summary:
        return Summary(**{**dict.fromkeys(Summary._fields, 0.0), **given})

    good = {
        "R1": summary(fmm=0.3, churn=0.02),
        "R2": summary(fmm=0.3, full=0.3),
        "R3": summary(fmm=0.1, full=0.2, coded=0.4, churn=0.01, lir=0.06),
        "R3 off": summary(),
        "R4": summary(churn=0.02),
    }
    assert [found.holds for found in observations(good)] == [True] * 3
    bad = {**good, "R3": summary(fmm=0.4, full=0.1, coded=0.1, churn=0.03, lir=0.06)}
    assert [found.holds for found in observations(bad)] == [False] * 3


def test_a_report_has_tables_plots_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    budget = ("--", "--kv-tiering-budget", "0.5")
    status = cli.main(["diagnose", "--prompt", "200", "--steps", "40", "--out", str(out), *budget])
    assert status == 0
    assert capsys.readouterr().out == f"{out / 'index.html'}\n"
    page = (out / "index.html").read_text()
    for plot in ("fmm.png", "mass.png", "tiers.png", "changes.png"):
        assert f'src="{plot}"' in page
        assert (out / plot).read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "report.json").read_text())
    assert report["run"]["budget"] == "0.5 of the bytes"
    with (out / "policies.csv").open() as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    for name, policy in report["policies"].items():
        assert float(rows[name]["fmm"]) == policy["fmm"]
        assert policy["label"] in page
    with (out / "events.csv").open() as file:
        events = list(csv.DictReader(file))
    # Events after 200, 208, ..., 232 tokens, of five policies in 30 layers.
    assert len(events) == 5 * 5 * 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "9000"], "the text has 5"),
        (["--steps", "0"], "--steps 1 or more"),
        (["--model", "/nowhere"], "/nowhere can't be loaded as a model"),
        (["--text", "/nowhere"], "/nowhere can't be read as text"),
        (["--", "--kv-tiering-window", "5"], "--kv-tiering-window must be one of 4, 8, 16, 32"),
        (["--", "--kv-tiering-budget", "0.01"], "raise --kv-tiering-budget"),
        (["--", "--page-size", "8"], "unrecognized arguments: --page-size 8"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diagnose", "--out", str(tmp_path / "out"), *arguments]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("sglang-qevict: ")
    assert message in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "out").exists()

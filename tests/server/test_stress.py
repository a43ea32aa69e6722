"""`sglang-qevict stress` against a tiered server: the shipped quick mix, its checks, its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.harness import Server
from sglang_qevict import cli

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

QUICK = Path(__file__).parents[2] / "configs" / "stress" / "quick.yaml"


def test_the_quick_mix_is_served_and_its_needles_are_found(
    tiered: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    # What the mix itself requires makes the status: half of the needles and copies, and no error.
    status = cli.main(["stress", str(QUICK), tiered.url, "--baseline", "--out", str(out)])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert told.out == f"{out / 'index.html'}\n"
    report = json.loads((out / "report.json").read_text())
    totals = report["totals"]
    assert totals["refused"] == totals["lost"] == totals["timeout"] == totals["cut"] == 0
    assert totals["needle_checked"] >= 2
    assert totals["needle_right"] >= totals["needle_checked"] / 2
    assert totals["compared_with_alone"] > 0
    assert totals["fairness_ratio"] >= 1
    # The server knows the tenants by the names that requests carry.
    assert report["tenants"]["oscillator"]["churn"] is not None
    # A second turn reuses the first one; a slow machine gets to none within the mix's time.
    agent = report["tenants"]["agent"]
    assert agent["cached"] > 0.3 or agent["sent"] == 1
    for name in ("tiers.png", "moves.png", "fairness.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert tiered.metrics()  # it still answers
    tiered.flush_cache()
    tiered.assert_clean()

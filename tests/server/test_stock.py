"""SGLang as it is, without tiering, on this project's CPU platform."""

from __future__ import annotations

import inspect
from pathlib import Path

import httpx
import pytest
from sglang.srt.managers.scheduler_components import invariant_checker

from server.harness import LAUNCH_SERVER, LEAK_TEXT, Server, ServerFailed, ServerPool

pytestmark = pytest.mark.server


@pytest.fixture
def server(servers: ServerPool) -> Server:
    return servers.get()


def test_chat_answers_a_question(server: Server) -> None:
    assert "Paris" in server.chat("What is the capital of France?")


def test_chat_template_and_stop_token_are_the_models_own(server: Server) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "default", "messages": question, "temperature": 0, "max_tokens": 64}
    choice = server.post("/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "<|im_" not in choice["message"]["content"]


def test_prompts_around_the_page_size_answer_alone_twice_the_same(server: Server) -> None:
    story = "Once upon a time there was a little girl who lived in a village near the forest. " * 2
    ids = server.post("/tokenize", {"model": "default", "prompt": story})["tokens"]
    for length in (1, 7, 8, 9, 29):
        answers = []
        for _ in range(2):
            server.flush_cache()
            answers.append(server.generate(ids[:length], max_new_tokens=12)["output_ids"])
        assert answers[0] == answers[1]


def test_prompts_around_the_page_size_all_finish_in_one_batch(server: Server) -> None:
    # Torch's bfloat16 products depend on the number of rows, so the tokens may differ from alone.
    prompts = [list(range(3000, 3000 + length)) for length in (1, 7, 8, 9, 29)]
    answers = server.generate_many(prompts, max_new_tokens=12, ignore_eos=True)
    assert [len(answer["output_ids"]) for answer in answers] == [12] * 5


@pytest.mark.parametrize("prompt", ["", [], [-1, 5], [1_000_000]])
def test_a_prompt_that_can_not_be_computed_is_refused_and_nothing_else(
    prompt: str | list[int], server: Server
) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        server.generate(prompt, max_new_tokens=2)
    assert server.generate([5], max_new_tokens=2)["output_ids"]


def test_profiles_are_written_and_memory_can_be_released(server: Server, tmp_path: Path) -> None:
    profile = {"output_dir": str(tmp_path), "num_steps": 2, "activities": ["CPU"]}
    _post(server, "/start_profile", profile)
    server.generate([5, 6, 7], max_new_tokens=8)
    assert list(tmp_path.rglob("*.trace.json.gz"))
    _post(server, "/release_memory_occupation", {})
    _post(server, "/resume_memory_occupation", {})
    assert server.generate([5, 6, 7], max_new_tokens=2)["output_ids"]


def _post(server: Server, path: str, body: dict[str, object]) -> None:
    httpx.post(f"{server.url}{path}", json=body, timeout=60).raise_for_status()


def test_a_repeated_prompt_is_served_from_whole_cached_pages(server: Server) -> None:
    prompt = list(range(2000, 2100))
    server.generate(prompt, max_new_tokens=1)
    assert server.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 96


def test_metrics_page_counts_generated_tokens(server: Server) -> None:
    def generated() -> float:
        named = server.metrics().items()
        return sum(v for name, v in named if name.startswith("sglang:generation_tokens_total"))

    before = generated()
    server.generate("Once upon a time", max_new_tokens=16, ignore_eos=True)
    assert generated() - before == 16


def test_platform_chooses_torch_attention_and_says_so(server: Server) -> None:
    info = server.info()
    assert info["attention_backend"] == "torch_native"
    assert info["device"] == "cpu"


def test_log_tells_of_no_leak_and_no_exception(server: Server) -> None:
    server.flush_cache()
    server.assert_clean()


def test_sglangs_leak_check_says_what_these_tests_look_for() -> None:
    assert f"{{pool_name}} {LEAK_TEXT}!" in inspect.getsource(invariant_checker)


@pytest.mark.slow
def test_launch_server_module_serves_and_leaves_no_process(tmp_path: Path) -> None:
    server = Server(log_path=tmp_path / "log", command=LAUNCH_SERVER)
    with server:
        assert "Paris" in server.chat("What is the capital of France?")
        assert len(server.processes()) >= 3


@pytest.mark.slow
def test_a_server_that_can_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    server = Server("--page-size", "7", "--chunked-prefill-size", "8", log_path=tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"(?s)exit code.*divisible by page_size"):
        server.start()

"""How decoding slows down with context at batch 1: stock, tiered, and llama.cpp where it is.

A slope is a small difference of large times, so what else a machine does would drown it in any
mean. Here rounds visit both contexts with every engine, and an engine's time per token is that of
its best turn: the mean, over the ``OMEGA`` phases of routing, of the quickest step in each. So
routing events count at their true frequency, and what slows down only some steps does not.
"""

from __future__ import annotations

import statistics
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from servers import NAMES, OMEGA, TURN_STEPS, Batch, Servers, Texts

LLAMA_CPP = "llama_cpp"


class LlamaCpp:
    """A child process that decodes with llama.cpp when asked, else sleeps; a context manager.

    Raises ``FileNotFoundError`` with what is missing.
    """

    def __init__(self, python: str, contexts: Sequence[int]) -> None:
        script = Path(__file__).with_name("llama_cpp_decode.py")
        self._process = subprocess.Popen(
            [python, str(script), *map(str, contexts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline().strip() != "ready":
            last = self._process.stderr.read().strip().splitlines()[-1:]
            raise FileNotFoundError(last[0] if last else "it does not start")

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def steps(self, index: int, count: int) -> list[float]:
        """Seconds of each of ``count`` tokens around the context of that index."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(index, count, file=self._process.stdin, flush=True)
        return [float(x) for x in self._process.stdout.readline().split()]


def measure_slopes(
    servers: Servers, texts: Texts, shortest: int, longest: int, rounds: int, llama_cpp: str
) -> dict[str, Any]:
    """Milliseconds for each 1,000 tokens more of context between two contexts, by engine.

    ``llama_cpp``: a Python that may be able to import it. Returns the two ``contexts``, by engine
    ``token_ms`` at both and ``ms_per_1000_tokens``, and ``missing``: why there is no llama.cpp.
    """
    contexts = (shortest, longest)
    try:
        llama = LlamaCpp(llama_cpp, contexts)
    except OSError as error:
        return _measure(servers, texts, contexts, rounds, None) | {"missing": str(error)}
    with llama:
        return _measure(servers, texts, contexts, rounds, llama) | {"missing": None}


def _measure(
    servers: Servers,
    texts: Texts,
    contexts: tuple[int, int],
    rounds: int,
    llama: LlamaCpp | None,
) -> dict[str, Any]:
    names = [*NAMES, LLAMA_CPP] if llama else list(NAMES)
    prompts = [texts.prompt(context - TURN_STEPS // 2) for context in contexts]
    steps: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    with tqdm(total=rounds * len(names) * len(contexts), unit="turn", desc="slopes") as bar:
        for name, index in rounds * [(name, index) for name in names for index in (0, 1)]:
            bar.set_postfix_str(f"{name} at {contexts[index]}")
            if llama and name == LLAMA_CPP:
                turn = llama.steps(index, TURN_STEPS)
            else:
                turn = _turn(servers, name, prompts[index])
            steps[name, index].append(turn)
            bar.update()
    token_ms = {
        name: [_undisturbed(steps[name, index]) * 1e3 for index in (0, 1)] for name in names
    }
    return {
        "contexts": list(contexts),
        "token_ms": token_ms,
        "ms_per_1000_tokens": {
            name: (last - first) / (contexts[1] - contexts[0]) * 1e3
            for name, (first, last) in token_ms.items()
        },
    }


def _undisturbed(turns: Sequence[Sequence[float]]) -> float:
    """The least, over turns, of the mean over phases of the quickest step in each.

    Where in a turn its routing events fall is not known, so phases of two turns never mix.
    """
    return min(statistics.mean(min(turn[phase::OMEGA]) for phase in range(OMEGA)) for turn in turns)


def _turn(servers: Servers, name: str, prompt: Sequence[int]) -> list[float]:
    with servers.running(name) as server:
        held = Batch(server, [prompt], 2 * TURN_STEPS)
        held.start()
        steps = held.steps(TURN_STEPS)
        held.finish()
    return steps

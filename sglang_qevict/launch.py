"""Refusals that only a scheduler process can make, ended as those of the command line are.

How much memory is left and what a loaded model is made of is known in the scheduler alone.
There SGLang logs any exception with its traceback and has the server killed. Where a
launcher waits for its schedulers itself, a refusal is one sentence and status 2 instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_qevict.arguments import REFUSED_STATUS, exit_with, is_command_line

__all__ = ["refusing", "watch_schedulers"]

_LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"


@contextmanager
def refusing(server_args: Any) -> Iterator[None]:
    """End this scheduler process with the sentence of a ``ValueError`` that is raised inside.

    Lets it pass where nobody looks at the exit status: in ``sglang.Engine``, below a
    data-parallel controller and in a Ray actor.
    """
    try:
        yield
    except ValueError as error:
        if is_command_line(server_args) and server_args.dp_size == 1 and not server_args.use_ray:
            exit_with(str(error))
        raise


def watch_schedulers() -> None:
    """Have this launcher end with a scheduler's refusal instead of a traceback about it."""
    HookRegistry.register(_LAUNCH, _launch_scheduler_processes, HookType.AROUND)
    HookRegistry.apply_hooks()


def _launch_scheduler_processes(
    original: Callable[..., tuple[Any, Any]], *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    result, processes = original(*args, **kwargs)
    wait_for_ready = result.wait_for_ready

    def wait_or_exit() -> None:
        try:
            wait_for_ready()
        except RuntimeError:
            if any(process.exitcode == REFUSED_STATUS for process in processes or ()):
                raise SystemExit(REFUSED_STATUS) from None
            raise

    result.wait_for_ready = wait_or_exit
    return result, processes

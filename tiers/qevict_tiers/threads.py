"""Threads of torch's own operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["single_threaded"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def single_threaded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function's torch operations on one CPU thread; kernels keep their own threads.

    For many small operations, such as those of a routing event: to divide one costs about as
    much as it takes, and many times as much where another program keeps a core busy, since
    each operation ends with its slowest thread. Changing the number takes a microsecond.
    """

    @wraps(function)
    def on_one_thread(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return on_one_thread

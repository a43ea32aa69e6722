"""What may watch tiering: told what happens, asked nothing, unable to change what is decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Protocol

from qevict_tiers.views import Views

__all__ = ["Attends", "Observer", "PrefixCut", "PromptRouting", "Shortage", "Wait"]


class PromptRouting(Enum):
    """How a prompt is routed: once, after its last token; at the end of each segment; or not at
    all, since it is short."""

    WHOLE = "whole"
    SEGMENTS = "segments"
    NEVER = "never"


class PrefixCut(Enum):
    """Why a request can't use all of the prefix that was found.

    SHORT_PROMPT: it sees FULL windows only. ROOM: it could not grow beside so much.
    """

    SHORT_PROMPT = "short_prompt"
    ROOM = "room"


class Wait(Enum):
    """Why a scheduling pass leaves a request waiting.

    PAGES: no logical tokens are left. BYTES: its prefill does not fit now. GROWTH: all would not
    fit once they have grown. CHUNK: it needs a whole chunk, or another prompt is in progress.
    CAP: its tenant would hold more than it may. FLOORS: what is free is kept for other tenants.
    """

    PAGES = "pages"
    BYTES = "bytes"
    GROWTH = "growth"
    CHUNK = "chunk"
    CAP = "cap"
    FLOORS = "floors"


class Shortage(Enum):
    """What running requests have run out of."""

    PAGES = "pages"
    BYTES = "bytes"


class Attends(Protocol):
    """What of ``qevict_kernels.interface.AttentionKernels`` attends, with the same arguments."""

    @property
    def decode(self) -> Callable[..., None]: ...

    @property
    def extend(self) -> Callable[..., None]: ...


class Observer:
    """Watches tiering; this one takes no notice of anything.

    Methods are called by the scheduler's thread and must not wait for the device.
    """

    def admitted(self, row: int, routing: PromptRouting, tenant: str) -> None:
        """A request of a tenant was given a row; ``routing``: of what its prompt is by then."""

    def prefix_cut(self, cut: PrefixCut, tokens: int) -> None:
        """An admitted request computes so many tokens again of the prefix that was found."""

    def waited(self, wait: Wait) -> None:
        """A scheduling pass left a request waiting."""

    def fell_short(self, shortage: Shortage) -> None:
        """Running requests can't all decode their next token."""

    def retracted(self, requests: int) -> None:
        """So many running requests went back to the queue, for the last shortage."""

    def dropped(self, pages: int) -> None:
        """So many pages are kept for reuse no longer."""

    def closed(self, rows: Sequence[int]) -> None:
        """The views of rows have ended."""

    def routing(
        self, views: Views, layers: slice, rows: Sequence[int], tokens: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Entered for each routing event, of rows of so many stored tokens, in some layers."""
        return nullcontext()

    def attending(self, kernels: Attends, *, is_decode: bool) -> Attends:
        """The next launch attends with these kernels, or with what is returned around them."""
        return kernels

    def launched(self) -> None:
        """A launch is under way."""

    def idle(self) -> None:
        """The scheduler found nothing to do after something had changed."""

    def resting(self) -> None:
        """The scheduler found nothing to do, and nothing had changed."""

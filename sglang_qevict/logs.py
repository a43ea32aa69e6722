"""What tiering adds to SGLang's own lines in the log."""

from __future__ import annotations

import logging

import torch

from sglang_qevict.late import LateReader
from sglang_qevict.state import TieringState

__all__ = ["TierFields", "extend_decode_line"]

_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter"
_DECODE_LINE = "Decode batch"


class TierFields(logging.Filter):
    """Adds what the tiers hold to the end of the line that SGLang logs every so many decode steps.

    On an accelerator numbers of windows are those of the line before, since nothing waits for them.
    """

    def __init__(self, state: TieringState) -> None:
        super().__init__()
        self._state = state
        self._reader = LateReader[int]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every line pass, the decode line with more at its end."""
        if isinstance(record.msg, str) and record.msg.startswith(_DECODE_LINE):
            record.msg += self._fields()
        return True

    def _fields(self) -> str:
        manager, ledger = self._state.manager, self._state.ledger
        views, arena = manager.views, manager.arena
        numbers = [views.num_full.sum(), views.num_coded.sum(), arena.full.count, arena.coded.count]
        windows = manager.num_layers * sum(manager.open_rows.values())
        claimed = f", kv claimed: {ledger.total_bytes / ledger.capacity_bytes:.2f}"
        read = self._reader.read(torch.stack(numbers), windows)
        if read is None:
            return claimed
        (full, coded, full_copies, coded_copies), windows = read
        used = full_copies * arena.full.slot_bytes + coded_copies * arena.coded.slot_bytes
        return (
            f", #full-window: {full:.0f}, #coded-window: {coded:.0f}, "
            f"#evicted-window: {max(0, windows - full - coded):.0f}, "
            f"kv used: {used / ledger.capacity_bytes:.2f}{claimed}"
        )


def extend_decode_line(state: TieringState) -> None:
    """SGLang's decode line tells of this state from now on."""
    reporter = logging.getLogger(_REPORTER)
    for old in [x for x in reporter.filters if isinstance(x, TierFields)]:
        reporter.removeFilter(old)
    reporter.addFilter(TierFields(state))

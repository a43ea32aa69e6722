"""How many threads torch's operations get."""

from __future__ import annotations

import pytest
import torch

from qevict_tiers.threads import single_threaded


def test_a_function_runs_on_one_thread_and_leaves_the_number_as_it_was() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert single_threaded(torch.get_num_threads)() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            single_threaded(lambda: 1 / 0)()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

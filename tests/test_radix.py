"""The prefix cache under tiering."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder

from command_line import tiered
from sglang_qevict.radix import create_cache


def test_sglang_admits_without_claims_where_the_cache_is_disabled() -> None:
    # Why `create_cache` refuses: once SGLang changes this, it needn't.
    source = inspect.getsource(PrefillAdder.add_one_req)
    assert 'ignore_eos and getattr(self.tree_cache, "disable", True)' in source


def test_a_model_for_which_sglang_disables_the_cache_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    context = SimpleNamespace(server_args=tiered(), disable_radix_cache=True)
    with pytest.raises(SystemExit) as exit_:
        create_cache(context)
    assert exit_.value.code == 2
    assert "prefix cache, which SGLang disables for this model" in capsys.readouterr().err

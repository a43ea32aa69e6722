"""The prefix cache under tiering."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from command_line import tiered
from sglang_qevict.radix import TieredRadixCache, create_cache
from sglang_qevict.runtime import runtime


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


# --- leaves that may not go ---

PAGE = 8


class _Allocator:
    """As much of SGLang's allocator as the tree asks: locations that are free."""

    device = "cpu"
    page_size = PAGE

    def __init__(self, pages: int) -> None:
        self.free_pages = list(range(1, pages + 1))

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def take(self, pages: int) -> torch.Tensor:
        taken = torch.tensor([self.free_pages.pop(0) for _ in range(pages)])
        return (taken[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def free_segment(self, locations: torch.Tensor, start_pos: int) -> None:
        self.free_pages += (locations[::PAGE] // PAGE).tolist()


@dataclass
class _Tenants:
    """As much of the state as evictions ask; ``dropped`` are pages, in the order of eviction."""

    owners: dict[int, int] = field(default_factory=dict)
    givers: tuple[int | None, ...] = ()
    dropped: list[int] = field(default_factory=list)

    @property
    def ledger(self) -> SimpleNamespace:
        return SimpleNamespace(tenancy=object(), givers=lambda must: self.givers)

    def may_go(self, tenant: int | None) -> Callable[[int], bool] | None:
        return None if tenant is None else lambda page: self.owners[page] == tenant

    def drop(self, locations: torch.Tensor) -> None:
        self.dropped += (locations[::PAGE] // PAGE).tolist()


@pytest.fixture(params=["rust", "python"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TieredRadixCache:
    allocator = _Allocator(pages=32)
    monkeypatch.setattr(runtime, "state", _Tenants())
    return TieredRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(device="cpu"),
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=request.param,
        )
    )


def _leave(cache: TieredRadixCache, tenant: int, text: int, pages: int, after: int = 0) -> None:
    """A tenant leaves a text of so many pages, the first ``after`` of which are there."""
    state, key = runtime.require_state(), array("q", [text] * (pages * PAGE))
    known = cache.path_device_indices(
        cache.match_prefix(MatchPrefixParams(key=RadixKey(key[: after * PAGE]))).last_device_node
    )
    own = cache.token_to_kv_pool_allocator.take(pages - after)
    state.owners |= dict.fromkeys((own[::PAGE] // PAGE).tolist(), tenant)  # type: ignore[attr-defined]
    cache.insert(InsertParams(key=RadixKey(key), value=torch.cat([known, own])))


def test_the_walk_goes_on_behind_leaves_that_may_not_go(cache: TieredRadixCache) -> None:
    for text, tenant in enumerate([1, 2, 1, 2, 1]):
        _leave(cache, tenant, text, pages=2)
    state = runtime.require_state()
    cache.evict_until(lambda: False, state.may_go(2))
    assert state.dropped == [3, 4, 7, 8]
    cache.evict_until(lambda: len(state.dropped) >= 6, state.may_go(1))
    assert state.dropped[4:] == [1, 2]
    cache.evict_until(lambda: False)
    assert sorted(state.dropped) == list(range(1, 11))
    assert cache.evictable_size() == 0


def test_a_prefix_goes_after_what_follows_it_and_counts_for_who_left_it(
    cache: TieredRadixCache,
) -> None:
    _leave(cache, 1, text=7, pages=2)
    _leave(cache, 2, text=7, pages=4, after=2)
    state = runtime.require_state()
    cache.evict_until(lambda: False, state.may_go(1))
    assert state.dropped == []
    cache.evict_until(lambda: False, state.may_go(2))
    assert state.dropped == [3, 4]
    cache.evict_until(lambda: False, state.may_go(1))
    assert state.dropped == [3, 4, 1, 2]


def test_a_leaf_that_was_split_counts_for_who_left_it(cache: TieredRadixCache) -> None:
    _leave(cache, 1, text=7, pages=6)
    state = runtime.require_state()
    cache.evict_until(lambda: False, state.may_go(2))
    cache.touch_prefix(RadixKey(array("q", [7] * (4 * PAGE))))
    cache.evict_until(lambda: False, state.may_go(2))
    assert state.dropped == []
    cache.evict_until(lambda: len(state.dropped) > 0, state.may_go(1))
    assert state.dropped == [5, 6]


def test_sglang_gets_its_pages_from_who_gives_and_in_the_end_from_anybody(
    cache: TieredRadixCache,
) -> None:
    for text, tenant in enumerate([1, 2, 1, 2]):
        _leave(cache, tenant, text, pages=2)
    state = runtime.require_state()
    state.givers = (2, None)  # type: ignore[attr-defined]
    result = cache.evict_for_alloc(EvictParams(num_tokens=5 * PAGE))
    assert state.dropped == [3, 4, 7, 8, 1, 2]
    assert result.num_tokens_evicted == 6 * PAGE
    assert cache.evict_for_alloc(EvictParams(num_tokens=9 * PAGE)).num_tokens_evicted == 2 * PAGE

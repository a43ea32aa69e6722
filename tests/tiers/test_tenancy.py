"""Shares of tenants: what is fair, whose turn it is, and who gives way first."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict_tiers.observer import Wait
from qevict_tiers.shares import Share, Shares, fair_shares
from qevict_tiers.tenancy import Demand, Tenancy

PERCENT = st.integers(0, 100).map(lambda n: Fraction(n, 100))


@st.composite
def share_lists(draw: st.DrawFn, least: int = 1) -> list[Share]:
    """Shares whose floors add up to one at most."""
    shares, left = [], Fraction(1)
    for _ in range(draw(st.integers(least, 6))):
        floor = min(left, draw(st.sampled_from([Fraction(0), Fraction(1, 10), Fraction(1, 3)])))
        cap = max(floor, draw(PERCENT), Fraction(1, 100))
        left -= floor
        shares.append(Share(Fraction(draw(st.integers(1, 9))), floor, cap))
    return shares


CAPACITY = 10_000


def make(*shares: Share, rows: int = 100) -> Tenancy:
    return Tenancy(shares, CAPACITY, rows)


# --- what is fair ---


@given(shares=share_lists())
def test_fair_shares_are_within_floors_and_caps_and_add_up_to_no_more_than_all(
    shares: list[Share],
) -> None:
    fair = fair_shares(dict(enumerate(shares)), CAPACITY)
    for tenant, share in enumerate(shares):
        assert int(share.floor * CAPACITY) <= fair[tenant] <= int(share.cap * CAPACITY)
    assert sum(fair.values()) <= CAPACITY
    # All of it, but for what rounding takes from each; unless nobody may have more.
    most = sum(int(share.cap * CAPACITY) for share in shares)
    assert sum(fair.values()) >= min(CAPACITY, most) - len(shares)


@given(shares=share_lists())
def test_who_is_at_no_bound_has_in_proportion_to_the_weights(shares: list[Share]) -> None:
    fair = fair_shares(dict(enumerate(shares)), CAPACITY)
    free = [
        Fraction(fair[tenant]) / share.weight
        for tenant, share in enumerate(shares)
        if int(share.floor * CAPACITY) < fair[tenant] < int(share.cap * CAPACITY)
    ]
    # Each is rounded down, by less than one unit.
    assert not free or max(free) - min(free) <= 1


def test_fair_shares_by_example() -> None:
    shares = Shares.parse(
        '{"big": {"weight": 3}, "small": {}, "sure": {"floor": 0.4}, "low": {"cap": 0.1}}'
    )
    # 0.4 and 0.1 are settled; the others share the rest, three to one.
    fair = fair_shares(dict(enumerate(shares.named.values())), CAPACITY)
    assert fair == {0: 3750, 1: 1250, 2: 4000, 3: 1000}
    assert fair_shares({1: Share(), 9: Share(Fraction(3))}, CAPACITY) == {1: 2500, 9: 7500}


@pytest.mark.parametrize(
    ("name", "allowance"), [("a", Fraction(1, 2)), ("b", Fraction(4, 5)), ("c", Fraction(7, 10))]
)
def test_nobody_is_allowed_more_than_a_cap_or_than_floors_leave(
    name: str, allowance: Fraction
) -> None:
    shares = Shares.parse('{"a": {"floor": 0.2, "cap": 0.5}, "b": {"floor": 0.1}}')
    assert shares.allowance(name) == allowance


# --- who is over what ---


def test_a_share_is_what_is_fair_among_those_who_hold_or_wait() -> None:
    tenancy = make(Share(), Share(), Share())
    tenancy.claimed[0] = 6000
    assert tenancy.share(0) == CAPACITY
    assert not tenancy.is_over_share(0)
    tenancy.waiting = frozenset({2})
    assert tenancy.share(0) == tenancy.share(2) == CAPACITY // 2
    assert tenancy.is_over_share(0)
    tenancy.kept[1] = 1
    assert tenancy.share(0) == CAPACITY // 3


def test_room_is_made_by_those_over_their_share_and_then_by_those_above_their_floor() -> None:
    tenancy = make(Share(floor=Fraction(1, 10)), Share(), Share())
    tenancy.claimed[:] = 1000, 8000, 500
    tenancy.kept[:] = 0, 100, 100
    first, then = tenancy.givers
    assert [first(tenant) for tenant in range(3)] == [False, True, False]
    assert [then(tenant) for tenant in range(3)] == [False, True, True]
    tenancy.kept[0] = 1
    assert then(0)


# --- admission ---


def test_a_request_waits_for_its_own_cap_whatever_is_free() -> None:
    tenancy = make(Share(cap=Fraction(3, 10)), Share())
    needs = tenancy.needs
    needs.add(Demand(0, 3000, 3000))
    assert tenancy.lack(0, needs) is None
    needs.grown[0] += 1
    assert tenancy.lack(0, needs) is Wait.CAP


def test_what_others_need_less_than_their_floors_is_left_to_them() -> None:
    tenancy = make(Share(), Share(floor=Fraction(4, 10)))
    tenancy.least[1] = 1000
    needs = tenancy.needs
    needs.add(Demand(0, 6000, 6000))
    assert tenancy.lack(0, needs) is None
    needs.now[0] += 1
    assert tenancy.lack(0, needs) is Wait.FLOORS
    needs.now[0] += 3000
    assert tenancy.lack(0, needs) is Wait.BYTES
    # To whom the floor belongs, gets it.
    needs = tenancy.needs
    needs.now[0] = 6000
    needs.add(Demand(1, 3000, 3000))
    assert tenancy.lack(1, needs) is None


def test_requests_at_once_are_shared_like_bytes() -> None:
    tenancy = make(Share(cap=Fraction(1, 2)), Share(floor=Fraction(1, 4)), rows=8)
    tenancy.rows[0] = 3
    needs = tenancy.needs
    needs.add(Demand(0, 1, 1))
    assert tenancy.lack(0, needs) is None
    needs.add(Demand(0, 1, 1))
    assert tenancy.lack(0, needs) is Wait.CAP
    tenancy = make(Share(), Share(floor=Fraction(1, 4)), rows=8)
    tenancy.rows[0] = 6
    needs = tenancy.needs
    needs.add(Demand(0, 1, 1))
    assert tenancy.lack(0, needs) is Wait.FLOORS


def test_any_tenant_may_run_one_request() -> None:
    tenancy = make(Share(cap=Fraction(1, 100)), rows=8)
    needs = tenancy.needs
    needs.add(Demand(0, 1, 1))
    assert tenancy.lack(0, needs) is None


# --- turns and victims ---

DEMANDS = st.lists(
    st.builds(Demand, st.integers(0, 5), st.integers(0, 4000), st.integers(0, 4000)), max_size=30
)


def _within(places: Sequence[int], tenants: Sequence[int], tenant: int) -> list[int]:
    return [place for place in places if tenants[place] == tenant]


@given(shares=share_lists(least=6), demands=DEMANDS)
def test_turns_are_an_order_in_which_each_tenant_keeps_its_own(
    shares: list[Share], demands: list[Demand]
) -> None:
    tenancy = make(*shares)
    order = tenancy.turns(demands, tenancy.needs)
    assert sorted(order) == list(range(len(demands)))
    tenants = [demand.tenant for demand in demands]
    for tenant in set(tenants):
        assert _within(order, tenants, tenant) == sorted(_within(order, tenants, tenant))


@given(shares=share_lists(), demands=DEMANDS)
def test_a_single_tenant_has_todays_order(shares: list[Share], demands: list[Demand]) -> None:
    tenancy = make(*shares)
    mine = [demand._replace(tenant=0) for demand in demands]
    assert tenancy.turns(mine, tenancy.needs) == list(range(len(mine)))
    assert tenancy.victims([(0, one.now) for one in mine]) == list(range(len(mine)))


def test_turns_go_round_by_what_each_would_have_of_its_share() -> None:
    tenancy = make(Share(), Share(), Share(Fraction(2)))
    tenancy.waiting = frozenset(range(3))
    demands = [Demand(0, 500, 500)] * 4 + [Demand(1, 500, 500)] * 2 + [Demand(2, 500, 500)] * 4
    order = [demands[place].tenant for place in tenancy.turns(demands, tenancy.needs)]
    # Twice the weight, two turns for one; among equals who came first.
    assert order == [2, 0, 1, 2, 2, 0, 1, 2, 0, 0]


def test_a_flood_comes_after_who_holds_nothing_and_before_who_is_at_its_cap() -> None:
    tenancy = make(Share(), Share(), Share(cap=Fraction(1, 10)))
    tenancy.claimed[0] = tenancy.least[0] = 5000
    tenancy.waiting = frozenset(range(3))
    demands = [*[Demand(0, 100, 100)] * 3, Demand(2, 2000, 2000), Demand(1, 100, 100)]
    assert tenancy.turns(demands, tenancy.needs) == [4, 0, 1, 2, 3]


def test_what_stays_within_a_floor_comes_first_however_full_its_tenant_is() -> None:
    tenancy = make(Share(), Share(floor=Fraction(1, 2)))
    tenancy.claimed[1] = tenancy.least[1] = 4000
    tenancy.waiting = frozenset(range(2))
    demands = [Demand(0, 100, 100), Demand(1, 1000, 1000), Demand(1, 100, 100)]
    assert tenancy.turns(demands, tenancy.needs) == [1, 0, 2]


@given(
    shares=share_lists(least=6),
    candidates=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2000)), max_size=30),
)
def test_nobody_gives_way_below_its_floor_while_anybody_is_above(
    shares: list[Share], candidates: list[tuple[int, int]]
) -> None:
    tenancy = make(*shares)
    for tenant, amount in candidates:
        tenancy.claimed[tenant] += amount
    held = tenancy.held
    floors = [int(share.floor * CAPACITY) for share in shares]
    left = [tenant for tenant, _ in candidates]
    order = tenancy.victims(candidates)
    assert sorted(order) == list(range(len(candidates)))
    for place in order:
        tenant, amount = candidates[place]
        above = [other for other in set(left) if held[other] > floors[other]]
        if above:
            assert tenant in above
            most = max(Fraction(int(held[t]), max(1, tenancy.share(t))) for t in above)
            assert Fraction(int(held[tenant]), max(1, tenancy.share(tenant))) == most
        held[tenant] -= amount
        left.remove(tenant)

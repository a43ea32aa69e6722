"""What requests are held to: budgets of their own, and their tenants."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import RowClaims
from qevict_tiers.config import BudgetLimits, Heads, TieringConfig
from qevict_tiers.shares import Share, Shares
from sglang_qevict.tenants import MAX_TENANTS, OVERFLOW, Tenants, make_tenancy
from sglang_qevict.terms import BUDGET, RequestTerms

LIMITS = BudgetLimits(Fraction(1, 10), Fraction(1, 2))


def make(limits: BudgetLimits | None = LIMITS, tenants: Tenants | None = None) -> RequestTerms:
    config = TieringConfig(budget_limits=limits)
    budget = WindowBudget(config, config.geometry(Heads(4, 2, 64)), 4)
    return RequestTerms(RowClaims(budget, 4096, 1024, 2048), tenants)


def request(routing_key: str | None = None, **params: Any) -> Any:
    return SimpleNamespace(
        routing_key=routing_key,
        sampling_params=SimpleNamespace(custom_params=params or None),
    )


@pytest.mark.parametrize(
    ("asked", "budget"),
    [(0.5, Fraction(1, 2)), (0.1, Fraction(1, 10)), (0.35, Fraction(7, 20)), (0.2, Fraction(1, 5))],
)
def test_a_request_has_the_budget_that_it_asks_for(asked: float, budget: Fraction) -> None:
    terms, mine = make(), request(**{BUDGET: asked, "thinking_budget": 7})
    assert terms.take_in(mine).claims.budget.config.budget == budget
    assert terms.of(mine).claims.budget.config.budget == budget


@pytest.mark.parametrize("params", [{}, {"thinking_budget": 7}])
@pytest.mark.parametrize("limits", [None, LIMITS])
def test_one_that_asks_for_none_has_the_servers(
    params: dict[str, Any], limits: BudgetLimits | None
) -> None:
    terms, mine = make(limits), request(**params)
    assert terms.take_in(mine) == terms.of(mine) == terms.make()
    assert terms.make().claims.budget.config.budget == Fraction(1, 5)


@pytest.mark.parametrize(
    "asked", [0.09, 0.51, 0, -0.2, 1, 2, "0.3", True, None, [0.3], float("nan"), float("inf")]
)
def test_another_is_refused_in_one_sentence_with_the_limits(asked: Any) -> None:
    terms, mine = make(), request(**{BUDGET: asked})
    with pytest.raises(ValueError, match=r"^KV tiering: kv_tiering_budget must be") as error:
        terms.take_in(mine)
    assert str(error.value).endswith(f"a number from 0.1 to 0.5 on this server, got {asked!r}.")
    # SGLang has to finish it all the same.
    assert terms.of(mine) == terms.make()


def test_without_limits_no_request_has_another_budget_than_the_servers() -> None:
    terms = make(limits=None)
    assert terms.take_in(request(**{BUDGET: 0.2})) == terms.make()
    with pytest.raises(ValueError, match="or start the server with --kv-tiering-budget-limits"):
        terms.take_in(request(**{BUDGET: 0.3}))


def test_formulas_of_a_budget_are_made_once() -> None:
    terms = make()
    one, other = (terms.take_in(request(**{BUDGET: 0.4})).claims for _ in range(2))
    assert one is other


def test_tenants_are_told_apart_by_routing_key_where_shares_are_given() -> None:
    terms = make(tenants=Tenants(["acme"]))
    numbers = [terms.take_in(request(key)).tenant for key in (None, "acme", "b", "default", "")]
    assert numbers == [0, 1, 2, 0, 0]
    assert make().take_in(request("acme")).tenant == 0


def test_shares_find_their_tenants_and_all_beyond_the_first_hundred_are_one() -> None:
    shares = Shares({"acme": Share(Fraction(5)), OVERFLOW: Share(Fraction(7))}, Share(Fraction(3)))
    tenants = Tenants(shares.named)
    tenancy = make_tenancy(shares, tenants, 1000, 10)
    numbers = [tenants.number(f"t{n}") for n in range(MAX_TENANTS + 5)]
    assert max(numbers) == MAX_TENANTS
    tenancy.waiting = frozenset({tenants.number("acme"), tenants.number("t0"), MAX_TENANTS})
    weights = [tenancy.share(number) for number in sorted(tenancy.waiting)]
    assert weights == [1000 * 5 // 15, 1000 * 3 // 15, 1000 * 7 // 15]

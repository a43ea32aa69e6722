"""What each request is held to: a budget, its own if it asks for one, and its tenant's share."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import isfinite
from typing import Any

from qevict_tiers.claims import RowClaims, Terms
from qevict_tiers.config import TieringConfig
from sglang_qevict.tenants import DEFAULT, Tenants

__all__ = ["BUDGET", "RequestTerms"]

BUDGET = "kv_tiering_budget"
"""Among the ``custom_params`` of a request's sampling parameters: the budget that it asks for."""

_TERMS = "_kv_tiering_terms"
"""An attribute of SGLang's requests: what was found when they came in."""

_KEPT_FORMULAS = 32
"""Budgets whose formulas are kept: each remembers the claims that it was asked for."""


class RequestTerms:
    """Finds and keeps the terms of SGLang's requests.

    ``claims``: of requests that ask for no budget. ``tenants``: None where nobody is told from
    anybody else.
    """

    def __init__(self, claims: RowClaims, tenants: Tenants | None = None) -> None:
        self._default = claims
        self._tenants = tenants
        self._claims = lru_cache(maxsize=_KEPT_FORMULAS)(claims.at)

    def make(self, budget: Fraction | None = None, tenant: str | None = None) -> Terms:
        """The terms of a request that asks for this budget, of a tenant of this name."""
        is_own = budget not in (None, self._default.budget.config.budget)
        claims = self._claims(budget) if is_own else self._default
        number = self._tenants.number(tenant or DEFAULT) if self._tenants else 0
        return Terms(claims, number)

    def take_in(self, request: Any) -> Terms:
        """Find the terms of a request that comes in; it keeps them.

        Raises ``ValueError`` with one sentence if it asks for a budget that it can't have: it
        has the terms of one that asks for none then.
        """
        terms = self.make(tenant=request.routing_key)
        setattr(request, _TERMS, terms)
        params, config = request.sampling_params.custom_params, self._default.budget.config
        if isinstance(params, dict) and BUDGET in params:
            terms = self.make(_checked(params[BUDGET], config), request.routing_key)
            setattr(request, _TERMS, terms)
        return terms

    def of(self, request: Any) -> Terms:
        """The terms of a request: those of one that asks for nothing, if it never came in."""
        terms: Terms = getattr(request, _TERMS, None) or self.make()
        return terms


def _checked(asked: Any, config: TieringConfig) -> Fraction:
    """A budget that a request asks for, if it may."""
    is_number = isinstance(asked, int | float) and not isinstance(asked, bool) and isfinite(asked)
    budget = Fraction(str(asked)) if is_number else None
    limits = config.budget_limits
    if budget is not None and budget == config.budget:
        return budget
    if limits is None:
        raise ValueError(
            f"KV tiering: all requests of this server have the budget {float(config.budget):g}, "
            f"but {BUDGET} is {asked!r}: leave it out, or start the server with "
            "--kv-tiering-budget-limits."
        )
    if budget is None or not limits.least <= budget <= limits.most:
        raise ValueError(
            f"KV tiering: {BUDGET} must be a number from {float(limits.least):g} to "
            f"{float(limits.most):g} on this server, got {asked!r}."
        )
    return budget

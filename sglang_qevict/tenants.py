"""Who a request is for, by one definition everywhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from qevict_tiers.shares import Shares
from qevict_tiers.tenancy import Tenancy

__all__ = ["DEFAULT", "MAX_TENANTS", "OVERFLOW", "Tenants", "make_tenancy", "tenant_of"]

logger = logging.getLogger(__name__)

DEFAULT = "default"
"""The tenant of requests that say nothing."""

OVERFLOW = "overflow"
"""All tenants that came after the first ``MAX_TENANTS`` together."""

MAX_TENANTS = 100


class Tenants:
    """Tenants by number: those who are ``known``, then in the order in which they came.

    ``OVERFLOW`` is the last, and logged.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._numbers = {DEFAULT: 0}
        self._overflows = False
        for name in known:
            if name != OVERFLOW:
                self.number(name)

    @property
    def names(self) -> list[str]:
        """All names by number, ``OVERFLOW`` among them once there is one too many."""
        return [*self._numbers, OVERFLOW] if self._overflows else list(self._numbers)

    def number(self, name: str) -> int:
        """The number of a tenant, at most ``MAX_TENANTS``."""
        if len(self._numbers) < MAX_TENANTS and name != OVERFLOW:
            return self._numbers.setdefault(name, len(self._numbers))
        if name not in self._numbers and not self._overflows:
            self._overflows = True
            logger.warning(
                "KV tiering: there are more than %d tenants; the others together are called %s",
                MAX_TENANTS,
                OVERFLOW,
            )
        return self._numbers.get(name, MAX_TENANTS)


def make_tenancy(shares: Shares, tenants: Tenants, capacity_bytes: int, num_rows: int) -> Tenancy:
    """The shares of so many bytes and rows by number; ``tenants`` know those that have a name."""
    by_number = [shares.others] * MAX_TENANTS + [shares.of(OVERFLOW)]
    for number, name in enumerate(tenants.names):
        by_number[number] = shares.of(name)
    return Tenancy(by_number, capacity_bytes, num_rows)


def tenant_of(
    routing_key: str | None,
    custom_labels: Mapping[str, str] | None,
    allowed_labels: Sequence[str] | None,
) -> str | None:
    """The tenant of a request, or None for ``DEFAULT``.

    It is SGLang's routing key (the header ``x-smg-routing-key``), else the first of the labels of
    ``--tokenizer-metrics-allowed-custom-labels`` that the request has.
    """
    if routing_key:
        return routing_key
    labels = custom_labels or {}
    return next((labels[name] for name in allowed_labels or () if labels.get(name)), None)

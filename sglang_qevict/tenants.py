"""Who a request is for, by one definition everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT", "MAX_TENANTS", "OVERFLOW", "Tenants", "tenant_of"]

DEFAULT = "default"
"""The tenant of requests that say nothing."""

OVERFLOW = "overflow"
"""All tenants that came after the first ``MAX_TENANTS`` together."""

MAX_TENANTS = 100


class Tenants:
    """Tenants by number, in the order in which they came; ``OVERFLOW`` has the last number."""

    def __init__(self) -> None:
        self._numbers = {DEFAULT: 0}

    @property
    def names(self) -> list[str]:
        """All names by number, as far as there are."""
        known = list(self._numbers)
        return known if len(known) < MAX_TENANTS else [*known, OVERFLOW]

    def number(self, name: str) -> int:
        """The number of a tenant, at most ``MAX_TENANTS``."""
        if len(self._numbers) < MAX_TENANTS and name != OVERFLOW:
            return self._numbers.setdefault(name, len(self._numbers))
        return self._numbers.get(name, MAX_TENANTS)


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

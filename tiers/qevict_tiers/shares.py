"""What an operator promises to tenants: shares of the bytes for windows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from math import isfinite
from typing import Any

__all__ = ["OTHERS", "Share", "Shares", "fair_shares"]

OTHERS = "*"
"""In a file of shares: every tenant that has no entry of its own."""


@dataclass(frozen=True)
class Share:
    """One tenant's part of the bytes, and of the requests that may run at once.

    weight: its part of them, beside the weights of the others that are there. floor: the part that
    it gets whenever it asks, whoever is there. cap: the part beyond which it waits, whatever is
    free.

    Raises ``ValueError`` with what there should be, and what there is.
    """

    weight: Fraction = Fraction(1)
    floor: Fraction = Fraction(0)
    cap: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"a weight above 0, got {float(self.weight):g}")
        if not 0 < self.cap <= 1:
            raise ValueError(f"a cap above 0 and at most 1, got {float(self.cap):g}")
        if not 0 <= self.floor <= self.cap:
            raise ValueError(
                f"a floor from 0 to its cap, {float(self.cap):g}, got {float(self.floor):g}"
            )


@dataclass(frozen=True)
class Shares:
    """The shares of all tenants: of those that are ``named``, and of each of the ``others``.

    Raises ``ValueError`` with what there should be, and what there is.
    """

    named: Mapping[str, Share] = field(default_factory=dict)
    others: Share = field(default_factory=Share)

    def __post_init__(self) -> None:
        if self.others.floor:
            raise ValueError(
                f"no floor for {OTHERS}, since nobody knows how many they will be: name the "
                "tenants that get one"
            )
        floors = sum(share.floor for share in self.named.values())
        if floors > 1:
            raise ValueError(f"floors that add up to 1 at most, got {float(floors):g}: lower some")

    @classmethod
    def parse(cls, text: str) -> Shares:
        """From JSON: ``{name: {"weight": 1, "floor": 0, "cap": 1}}``, each number optional."""
        try:
            entries = json.loads(text)
        except json.JSONDecodeError:
            entries = None
        if not isinstance(entries, dict):
            raise ValueError(f"a JSON object of tenants by name, got {text!r}")
        shares = {name: _parse_share(name, entry) for name, entry in entries.items()}
        others = shares.pop(OTHERS, Share())
        return cls(shares, others)

    def of(self, name: str) -> Share:
        """The share of a tenant."""
        return self.named.get(name, self.others)

    def allowance(self, name: str) -> Fraction:
        """The most that a tenant can ever get: its cap, or what the floors of others leave."""
        floors = sum((share.floor for share in self.named.values()), Fraction(0))
        share = self.of(name)
        return min(share.cap, 1 - floors + share.floor)

    @property
    def least_allowance(self) -> Fraction:
        """The allowance of the tenant that has the least."""
        return min(self.allowance(name) for name in (*self.named, OTHERS))


_KEYS = tuple(one.name for one in fields(Share))


def _parse_share(name: str, entry: Any) -> Share:
    if not isinstance(entry, dict):
        raise ValueError(f"an object for {name!r}, with {', '.join(_KEYS)}, got {entry!r}")
    for key, value in entry.items():
        if key not in _KEYS:
            raise ValueError(f"{', '.join(_KEYS)} for {name!r}, got {key!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not isfinite(value):
            raise ValueError(f"a number as {key} of {name!r}, got {value!r}")
    try:
        return Share(**{key: Fraction(str(value)) for key, value in entry.items()})
    except ValueError as error:
        raise ValueError(f"{error}, for {name!r}") from None


def fair_shares(shares: Mapping[int, Share], capacity: int) -> dict[int, int]:
    """What each of these tenants may hold so that nobody can complain, in units of ``capacity``.

    In proportion to the weights, but for those that get their floor instead, or their cap: what
    these take more, or leave, the others share. Exact, so that it is the same on every rank.
    """
    floors = {tenant: Fraction(int(share.floor * capacity)) for tenant, share in shares.items()}
    caps = {tenant: Fraction(int(share.cap * capacity)) for tenant, share in shares.items()}
    left, given = Fraction(capacity), dict[int, Fraction]()
    while open_ := {tenant: share for tenant, share in shares.items() if tenant not in given}:
        level = left / sum(share.weight for share in open_.values())
        wanted = {tenant: level * share.weight for tenant, share in open_.items()}
        bounded = {t: min(max(w, floors[t]), caps[t]) for t, w in wanted.items()}
        excess = sum(bounded.values()) - left
        # Those at a bound on the side where too much, or too little, was given are settled.
        settled = {
            t: b
            for t, b in bounded.items()
            if excess == 0 or (b > wanted[t] if excess > 0 else b < wanted[t])
        }
        given |= settled
        left -= sum(settled.values())
    return {tenant: int(amount) for tenant, amount in given.items()}

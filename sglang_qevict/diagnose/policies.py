"""The policies that a diagnosis compares, and what each does to one recorded request.

R1 to R4 are those of QEvict (arXiv 2608.05326), each with the same share of the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch

from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, TieringConfig
from qevict_tiers.diagnostics import (
    Place,
    Selection,
    future_missed_mass,
    mass_by_place,
    oracle,
    returns,
    selection_churn,
    selections,
)
from qevict_tiers.policy import Tier
from qevict_tiers.simulator import Event, Recording, SimulatedBudget, SimulatedConfig, simulate

__all__ = ["Outcome", "Policy", "Summary", "diagnose", "policies"]


@dataclass(frozen=True)
class Policy:
    """A budget rule, and which tiers count as kept."""

    name: str
    label: str
    budget: WindowBudget
    kept: tuple[Tier, ...] = (Tier.FULL, Tier.CODED)


class Summary(NamedTuple):
    """One policy in numbers: means over layers, and over events or steps.

    bytes_share: bytes held after the last event, as a share of full precision. protected,
    full, coded: share of each step's attention that lands there; missed: on the rest.
    fmm, fmm_history: future missed mass, of all attention and of the history's. churn: between
    events. lir, lir_oracle: returns to the FULL windows, as it ranks and by true attention.
    """

    bytes_share: float
    protected: float
    full: float
    coded: float
    missed: float
    fmm: float
    fmm_history: float
    churn: float
    lir: float
    lir_oracle: float


@dataclass(frozen=True)
class Outcome:
    """What one policy does to a recorded request; tensors as in ``qevict_tiers.diagnostics``."""

    policy: Policy
    selections: list[Selection]
    places: torch.Tensor
    fmm: torch.Tensor
    fmm_history: torch.Tensor
    churn: torch.Tensor
    lir: torch.Tensor
    lir_oracle: torch.Tensor

    @property
    def summary(self) -> Summary:
        """The means."""
        shares = dict(zip(Place, self.places.double().mean((0, 1)).tolist(), strict=True))
        return Summary(
            bytes_share=float(_bytes_share(self.policy, self.selections[-1].tokens)),
            protected=shares[Place.PROTECTED],
            full=shares[Place.FULL],
            coded=shares[Place.CODED],
            missed=shares[Place.EVICTED],
            fmm=_mean(self.fmm),
            fmm_history=_mean(self.fmm_history),
            churn=_mean(self.churn),
            lir=_mean(self.lir),
            lir_oracle=_mean(self.lir_oracle),
        )


def policies(config: TieringConfig, heads: Heads, num_layers: int, prompt: int) -> list[Policy]:
    """R1 to R4 with the options of ``config``; it is R3, and the others change what they name.

    Every request is tiered from its prompt on, however short.

    Raises ``ValueError`` where protected windows leave no bytes.
    """
    two_tiers = Fraction(0)
    config = dataclasses.replace(config, min_context=min(config.min_context, prompt - 1))

    def windows_of(tokens: int, **changes: object) -> WindowBudget:
        changed = dataclasses.replace(config, window=tokens, **changes)  # type: ignore[arg-type]
        return WindowBudget(changed, changed.geometry(heads), num_layers)

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    single = SimulatedConfig(**{**options, "window": 1, "quant_fraction": two_tiers})
    size = config.window
    three = windows_of(size)
    return [
        Policy(
            "R1",
            "single tokens, two tiers",
            # Nothing is coded, so the bytes of a code don't matter.
            SimulatedBudget(single, num_layers, three.full_bytes // size, 1),
        ),
        Policy("R2", f"windows of {size}, two tiers", windows_of(size, quant_fraction=two_tiers)),
        Policy("R3", f"windows of {size}, three tiers", three),
        Policy("R3 off", "R3 with its coded tier switched off", three, (Tier.FULL,)),
        Policy("R4", "windows of 32, three tiers", windows_of(32)),
    ]


def diagnose(recording: Recording, chosen: Sequence[Policy]) -> Iterator[Outcome]:
    """What each policy does to the request; one at a time, so that a caller can show progress."""

    @cache
    def simulated(budget: WindowBudget) -> list[Event]:
        return simulate(recording, budget)

    for policy in chosen:
        budget, window = policy.budget, policy.budget.config.window
        events = simulated(budget)
        kept = selections(events, budget)
        yield Outcome(
            policy,
            kept,
            mass_by_place(recording, kept, window, policy.kept),
            future_missed_mass(recording, kept, window, kept=policy.kept),
            future_missed_mass(recording, kept, window, kept=policy.kept, of_history=True),
            selection_churn(kept, policy.kept),
            returns(kept),
            returns(oracle(recording, budget, events)),
        )


def _bytes_share(policy: Policy, tokens: int) -> Fraction:
    """Bytes that a request may hold at this length, as a share of those at full precision."""
    budget = policy.budget
    start, end = budget.history(tokens)
    count = budget.num_windows(tokens)
    capacity = budget.capacities(tokens)
    tiered = (count - (end - start) + capacity.full) * budget.full_bytes
    if Tier.CODED in policy.kept:
        tiered += capacity.coded * budget.coded_bytes
    everything = count * budget.full_bytes
    held = budget.num_tiered_layers * tiered + budget.num_full_layers * everything
    return Fraction(held, budget.num_layers * everything)


def _mean(values: torch.Tensor) -> float:
    return values.double().nanmean().item()

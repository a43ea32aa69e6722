"""What a policy loses and how it wavers, measured against true attention.

The three numbers of QEvict (arXiv 2608.05326) for any policy that says which windows it keeps:

- *FMM*, future missed mass (``future_missed_mass``): attention that later queries would give to
  what is gone by now;
- *LIR*, the rate of returns (``returns``): windows that come back among the FULL ones by rank;
- *selection churn* (``selection_churn``): how much of what is kept changes from event to event.

And where the attention of each step goes by tier (``mass_by_place``), and how well two sets of
scores agree (``agreement``). A policy is a list of ``Selection``, one for each routing event;
true attention is a ``Recording`` of a model that keeps everything. Tensors are ``[L, ...]``:
layers are never averaged here.

A *window* may be a single token. Windows outside a selection's ``history`` are *protected*: the
policy has no choice about them, so they are no part of FMM, LIR or churn.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import torch

from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import RowClaims
from qevict_tiers.policy import Tier, rank_windows
from qevict_tiers.simulator import Event, Recording

__all__ = [
    "Agreement",
    "Place",
    "Selection",
    "agreement",
    "future_missed_mass",
    "mass_by_place",
    "oracle",
    "places",
    "returns",
    "selection_churn",
    "selections",
]


class Place(IntEnum):
    """Where attention lands: the last dimension of ``mass_by_place``."""

    PROTECTED = 0
    FULL = 1
    CODED = 2
    EVICTED = 3


_PLACES = {Tier.FULL: Place.FULL, Tier.CODED: Place.CODED, Tier.EVICTED: Place.EVICTED}
_KEPT = (Tier.FULL, Tier.CODED)


class Selection(NamedTuple):
    """What a policy keeps from one routing event to the next.

    tokens: how many are stored; the next query stands at this position. tiers: uint8 ``[L, N]``
    (``Tier``) over the ``N`` windows that hold these tokens. history: half-open range of the
    windows that the policy chooses from. ranked: bool ``[L, N]``, windows of the history that
    rank among those for which FULL has room, whatever tier they are in (with
    ``Promotion.ALIAS`` a window stays coded that has lost its original).
    """

    tokens: int
    tiers: torch.Tensor
    history: tuple[int, int]
    ranked: torch.Tensor


def selections(events: Sequence[Event], budget: WindowBudget) -> list[Selection]:
    """What the simulator's events keep, for the functions of this module."""
    result = []
    for event in events:
        start, end = budget.history(event.tokens)
        ranked = _is_in(event.tiers, start, end) & (event.tiers != Tier.EVICTED) & ~event.outranked
        result.append(Selection(event.tokens, event.tiers, (start, end), ranked))
    return result


def oracle(recording: Recording, budget: WindowBudget, events: Sequence[Event]) -> list[Selection]:
    """The events as of a policy that sees everything: it ranks by the true attention so far.

    No window is evicted in it, so an evicted one goes on gathering: the LIR of these selections
    is what a policy would have to follow (the paper's *oracle*), that of ``selections`` is what
    it does follow (*deployed*). Scores begin with the prompt's scoring span and decay by the
    options; no prefix is reused.

    Raises ``ValueError`` if the recording lacks queries of the prompt's scoring span.
    """
    prompt, window = recording.prompt_tokens, budget.config.window
    position = RowClaims(budget, prompt, prompt, prompt).score_start(prompt)
    scores = torch.zeros((budget.num_layers, budget.num_windows(recording.total_tokens)))
    scores = scores.to(recording.mass.device, torch.float64)
    result = []
    for event in events:
        mass = recording.by_window(position, event.tokens, window, scores.shape[1])
        scores += mass.double().sum(1)
        position = event.tokens
        start, end = budget.history(event.tokens)
        now = scores[:, : event.tiers.shape[1]]
        candidates = _is_in(now, start, end)
        best = rank_windows(now, candidates)[:, : budget.capacities(event.tokens).full]
        ranked = torch.zeros_like(candidates).scatter_(-1, best, value=True) & candidates
        tiers = torch.full_like(event.tiers, Tier.FULL)
        scores *= float(budget.config.score_decay)
        result.append(Selection(event.tokens, tiers, (start, end), ranked))
    return result


def places(selection: Selection, num_windows: int, kept: Sequence[Tier] = _KEPT) -> torch.Tensor:
    """The place of each of so many windows until the next event, uint8 ``[L, num_windows]``.

    Tiers that are not ``kept`` count as evicted.
    """
    _, tiers, (start, end), _ = selection
    found = tiers.new_full((tiers.shape[0], num_windows), Place.PROTECTED)
    for tier, place in _PLACES.items():
        there = tiers[:, start:end] == tier
        found[:, start:end].masked_fill_(there, place if tier in kept else Place.EVICTED)
    return found


def mass_by_place(
    recording: Recording,
    selections: Sequence[Selection],
    window: int,
    kept: Sequence[Tier] = _KEPT,
) -> torch.Tensor:
    """Share of each step's true attention by what the policy has made of the windows.

    Tiers that are not ``kept`` count as evicted. Steps are those from the first event on.
    Returns float32 ``[L, steps, 4]`` (``Place``); the four sum to 1. Windows that were opened
    since the last event are protected.
    """
    ends = [*(selection.tokens for selection in selections[1:]), recording.total_tokens]
    count = -(-recording.total_tokens // window)
    parts = []
    for selection, stop in zip(selections, ends, strict=True):
        mass = recording.by_window(selection.tokens, stop, window, count)
        found = places(selection, count, kept)
        parts.append(torch.stack([(mass * (found == x)[:, None]).sum(-1) for x in Place], -1))
    return torch.cat(parts, 1)


def future_missed_mass(
    recording: Recording,
    selections: Sequence[Selection],
    window: int,
    *,
    kept: Sequence[Tier] = _KEPT,
    horizon: int | None = None,
    of_history: bool = False,
) -> torch.Tensor:
    """FMM: share of the true attention of later queries that lands on what an event has let go.

    Of the queries after event ``e``, up to the end of the recording or the next ``horizon``:
    the mean of their attention to windows of the history that are in none of the tiers
    ``kept``. ``of_history``: divided by their attention to the event's whole history, so that
    what sink and local tokens take does not count. Queries are all later ones, so what the
    policy does afterwards has no part in it.

    Returns float64 ``[L, events]``, NaN for an event without later queries.
    """
    count = -(-recording.total_tokens // window)
    columns = []
    for tokens, tiers, (start, end), _ in selections:
        stop = min(recording.total_tokens, tokens + (horizon or recording.total_tokens))
        mass = recording.by_window(tokens, stop, window, count)[..., start:end].double().sum(1)
        is_kept = sum(tiers[:, start:end] == tier for tier in kept)
        missed = (mass * ~torch.as_tensor(is_kept).bool()).sum(-1)
        columns.append(missed / (mass.sum(-1) if of_history else stop - tokens))
    return torch.stack(columns, -1)


def returns(selections: Sequence[Selection]) -> torch.Tensor:
    """LIR: share of the windows that rank FULL at an event which have come back to it.

    A window comes back if it ranks FULL, did not at the event before, and did at some earlier
    one. The global rate is the mean over events and layers.

    Returns float64 ``[L, events]``: 0 at the first two events, NaN where no window ranks FULL.
    """
    if not selections:
        return torch.empty(0)
    last = selections[-1].ranked
    before, ever = torch.zeros_like(last), torch.zeros_like(last)
    columns = []
    for selection in selections:
        missing = last.shape[1] - selection.ranked.shape[1]
        ranked = torch.nn.functional.pad(selection.ranked, (0, missing))
        back = (ranked & ever & ~before).sum(-1)
        columns.append(back.double() / ranked.sum(-1))
        before, ever = ranked, ever | ranked
    return torch.stack(columns, -1)


def selection_churn(selections: Sequence[Selection], kept: Sequence[Tier] = _KEPT) -> torch.Tensor:
    """Jaccard distance of what two consecutive events keep: 1 - |A and B| / |A or B|.

    Over the windows of both histories: a window that has just become part of it was not chosen
    before. Two empty sets are at distance 0.

    Returns float64 ``[L, events - 1]``.
    """
    columns = []
    for one, other in pairwise(selections):
        start = max(one.history[0], other.history[0])
        end = min(one.history[1], other.history[1])
        a, b = (
            torch.stack([s.tiers[:, start:end] == tier for tier in kept]).any(0)
            for s in (one, other)
        )
        both, either = (a & b).sum(-1).double(), (a | b).sum(-1)
        columns.append(torch.where(either == 0, 0.0, 1 - both / either.clamp(min=1)))
    return torch.stack(columns, -1) if columns else torch.empty(0)


class Agreement(NamedTuple):
    """How alike two sets of scores are, float64 ``[L]``.

    cosine: of the scores as vectors. top: share of the best windows of one that are among the
    best of the other.
    """

    cosine: torch.Tensor
    top: torch.Tensor


def agreement(one: torch.Tensor, other: torch.Tensor, top: int) -> Agreement:
    """Compare scores ``[L, N]`` of the same windows, by all of them and by the first ``top``."""
    a, b = one.double(), other.double()
    everything = torch.ones_like(a, dtype=torch.bool)
    chosen = [
        torch.zeros_like(everything).scatter_(-1, rank_windows(x, everything)[:, :top], value=True)
        for x in (a, b)
    ]
    common = (chosen[0] & chosen[1]).sum(-1).double() / min(top, a.shape[-1])
    return Agreement(torch.nn.functional.cosine_similarity(a, b, dim=-1), common)


def _is_in(windows: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """bool, as ``windows`` ``[L, N]``: those from ``start`` to ``end``."""
    mask = torch.zeros_like(windows, dtype=torch.bool)
    mask[:, start:end] = True
    return mask

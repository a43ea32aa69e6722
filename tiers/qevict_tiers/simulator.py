"""Routing replayed on recorded attention: the tiers of one request, without server or kernels.

QEvict, arXiv 2608.05326, algorithm 1, by the rules that serve: ``RowClaims`` says when a request
is routed and which prompt queries score, ``WindowBudget`` how many windows each tier holds,
``policy.route`` which they are. What is simulated is the attention: a window is scored by what a
model without tiers gives it, as long as it is not evicted. A server differs in this:

- its coded windows are attended as their codes say, not as their originals;
- its softmax runs over what it sees, in each head; see ``renormalize`` in ``simulate``;
- prompts beyond ``exact_prefill_tokens`` may be routed more than once;
- windows that cannot be coded (NaN, infinity) are evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from qevict_kernels.layout import WindowGeometry
from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import RowClaims
from qevict_tiers.config import TieringConfig
from qevict_tiers.policy import Limits, Tier, route
from qevict_tiers.scores import Ranking, Scorer, scorer_of

__all__ = ["Event", "Recording", "SimulatedBudget", "SimulatedConfig", "simulate"]


@dataclass(frozen=True)
class SimulatedConfig(TieringConfig):
    """The options of tiering for windows of any size, a single token included.

    Kernels and SGLang's pages have no such windows: serving takes ``TieringConfig``.

    Raises ``ValueError`` for a window below 1, and as ``TieringConfig`` for all other options.
    """

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be 1 or more tokens, got {self.window}")
        TieringConfig(**{**vars(self), "window": 8})


@dataclass(frozen=True)
class SimulatedBudget(WindowBudget):
    """The budget rule for windows whose bytes are given, since no kernel has them.

    full_window_bytes, coded_window_bytes: ``M_f`` and ``M_q``, bytes of a window of one layer.
    There is no ``geometry``.

    Raises ``ValueError`` if a coded window takes no fewer bytes than a FULL one, and as
    ``WindowBudget``.
    """

    geometry: WindowGeometry = field(init=False, repr=False, compare=False)
    full_window_bytes: int
    coded_window_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.coded_window_bytes < self.full_window_bytes:
            raise ValueError(
                "coded_window_bytes must be above 0 and below full_window_bytes = "
                f"{self.full_window_bytes}, got {self.coded_window_bytes}"
            )
        super().__post_init__()

    @property
    def full_bytes(self) -> int:
        """``M_f``: bytes of a FULL window of one layer."""
        return self.full_window_bytes

    @property
    def coded_bytes(self) -> int:
        """``M_q``: bytes of a coded window of one layer."""
        return self.coded_window_bytes


@dataclass(frozen=True, eq=False)
class Recording:
    """What one request attends to in a model without tiers.

    mass: float32 ``[L, Q, T]`` (other float types are converted as they are used), on any
        device: the mean over query heads of the softmax probability that a query gives to each
        of the request's ``T`` tokens. The queries are those of its last ``Q`` tokens, so query
        ``q`` stands at position ``T - Q + q``, and gives nothing to later positions.
    prompt_tokens: length of the prompt; the tokens after it are decoded, one a step.

    Raises ``ValueError`` if a decode step is missing or the tensor can't be such a recording.
    """

    mass: torch.Tensor
    prompt_tokens: int

    def __post_init__(self) -> None:
        if self.mass.dim() != 3 or not self.mass.is_floating_point():
            raise ValueError(
                "mass must be a float tensor [layers, queries, tokens], "
                f"got {self.mass.dtype} {list(self.mass.shape)}: record one row of probabilities "
                "a query, averaged over heads"
            )
        _, queries, tokens = self.mass.shape
        if not 1 <= self.prompt_tokens <= tokens:
            raise ValueError(
                f"prompt_tokens must be from 1 to the {tokens} tokens of mass, "
                f"got {self.prompt_tokens}"
            )
        if not tokens - self.prompt_tokens <= queries <= tokens:
            raise ValueError(
                f"mass must have the queries of the {tokens - self.prompt_tokens} decoded tokens, "
                f"and at most one for each of {tokens} tokens, got {queries}: record every decode "
                "step, and of the prompt as many of its last queries as are to score"
            )
        for number, layer in enumerate(self.mass):
            if not bool((layer >= 0).all()):
                raise ValueError(
                    f"mass of layer {number} has negative numbers or NaN: record probabilities, "
                    "after the softmax"
                )
            if bool(layer.triu(self.first_query + 1).any()):
                raise ValueError(
                    f"mass of layer {number} reaches tokens after the query: the last of "
                    f"{queries} queries must be that of the last of {tokens} tokens"
                )

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and answer (``T``)."""
        return self.mass.shape[2]

    @property
    def first_query(self) -> int:
        """Position of the first query."""
        return self.total_tokens - self.mass.shape[1]

    def by_window(self, start: int, end: int, window: int, num_windows: int) -> torch.Tensor:
        """What the queries at positions ``start`` to ``end - 1`` give to each window.

        Returns float32 ``[L, end - start, num_windows]``. Raises ``ValueError`` for queries that
        were not recorded.
        """
        if not self.first_query <= start <= end <= self.total_tokens:
            raise ValueError(
                f"queries {start} to {end - 1} were asked for, but the recording has "
                f"{self.first_query} to {self.total_tokens - 1}"
            )
        mass = self.mass[:, start - self.first_query : end - self.first_query].float()
        missing = num_windows * window - self.total_tokens
        padded = torch.nn.functional.pad(mass, (0, missing))
        return padded.view(*mass.shape[:2], num_windows, window).sum(-1)


class Event(NamedTuple):
    """One routing event, over the ``N`` windows that hold the request's tokens then.

    tokens: how many are stored; the next query stands at this position. scores: float32
    ``[L, N]``, what windows were ranked by: by default the mass they have gathered, those evicted
    before until they were. tiers: uint8 ``[L, N]`` (``Tier``), from now to the next event, while
    every window opened in between is FULL. outranked: bool ``[L, N]``, as in ``policy.Routed``.
    """

    tokens: int
    scores: torch.Tensor
    tiers: torch.Tensor
    outranked: torch.Tensor


def simulate(
    recording: Recording,
    budget: WindowBudget,
    *,
    shared: int = 0,
    renormalize: bool = True,
    scorer: Scorer | None = None,
) -> list[Event]:
    """The routing events of one request, in order (QEvict, arXiv 2608.05326, algorithm 1).

    The first comes after the last token of a prompt that is tiered, one more before each decoded
    token that is due. A request that never outgrows ``min_context`` has none.

    ``shared``: leading windows that are a reused prefix: no FULL copy can be made of them, and
    of their tokens no query scores. They begin coded, apart from those that hold sink tokens
    and from layers kept FULL; if the prompt is not tiered they are FULL, and stay.
    ``renormalize``: each query's mass on what is visible (FULL and coded) is scaled to sum to 1,
    as a softmax over just that would. With one head this is exact; with several it stands for
    the mean over heads of masses that a server scales in each head. A query that gave
    everything to evicted windows scores nothing.
    ``scorer``: what windows are ranked by; the default is that of the options.

    Raises ``ValueError`` if the recording has not the layers of the budget rule or lacks queries
    of the scoring span, or if a prefix leaves nothing of the prompt to compute.
    """
    prompt, window = recording.prompt_tokens, budget.config.window
    claims = RowClaims(budget, prompt, prompt, prompt)
    first = max(claims.score_start(prompt), shared * window)
    if recording.mass.shape[0] != budget.num_layers:
        raise ValueError(
            f"the recording has {recording.mass.shape[0]} layers, the budget rule "
            f"{budget.num_layers}: make the rule for the layers that were recorded"
        )
    if not 0 <= shared * window < prompt:
        raise ValueError(
            f"shared must be from 0 to {(prompt - 1) // window} windows, so that a prompt of "
            f"{prompt} tokens has one left to compute, got {shared}"
        )
    if recording.first_query > first:
        raise ValueError(
            f"the first recorded query stands at {recording.first_query}, but prompt queries "
            f"score from {first} on: record the last {recording.total_tokens - first} queries"
        )

    view = _View(recording, budget, shared, renormalize, scorer or scorer_of(budget.config))
    events = []
    for position in range(first, prompt):
        view.gather(position)
    if budget.is_tiered(prompt):
        events.append(view.route(prompt))
    for position in range(prompt, recording.total_tokens):
        if claims.is_due(prompt, position):
            events.append(view.route(position))
        view.gather(position)
    return events


class _View:
    """What the simulated request sees of each window in each layer, and its scores.

    tiers: uint8 ``[L, N]``, scores: float32 ``[L, N]``, over all windows that the request will
    ever have: those to come are FULL, hold no mass and are in no history yet.
    """

    def __init__(
        self,
        recording: Recording,
        budget: WindowBudget,
        shared: int,
        renormalize: bool,
        scorer: Scorer,
    ) -> None:
        self.recording, self.budget, self.scorer = recording, budget, scorer
        self.shared, self.renormalize = shared, renormalize
        device = recording.mass.device
        shape = (budget.num_layers, budget.num_windows(recording.total_tokens))
        self.is_routed = torch.tensor(
            [[layer not in budget.config.full_layers] for layer in range(budget.num_layers)],
            device=device,
        )
        self.scores = torch.zeros(shape, device=device)
        self.tiers = torch.full(shape, Tier.FULL, dtype=torch.uint8, device=device)
        if budget.is_tiered(recording.prompt_tokens):
            reused = self.tiers[:, budget.sink_windows : shared]
            reused.masked_fill_(self.is_routed, Tier.CODED)

    def gather(self, position: int) -> None:
        """Add to the scores what the query at a position gives to visible windows."""
        window, count = self.budget.config.window, self.scores.shape[1]
        mass = self.recording.by_window(position, position + 1, window, count)[:, 0]
        seen = mass.masked_fill(self.tiers == Tier.EVICTED, 0.0)
        if self.renormalize:
            total = seen.sum(-1, keepdim=True)
            seen /= total.masked_fill(total == 0, 1.0)
        self.scores += seen

    def route(self, tokens: int) -> Event:
        """One routing event, with so many tokens stored."""
        budget = self.budget
        count = budget.num_windows(tokens)
        shared = torch.tensor([self.shared], device=self.scores.device)
        limits = Limits.of([budget], [tokens], shared)
        gathered, before = self.scores[:, None, :count].clone(), self.tiers[:, :count]
        event = Ranking(slice(0, budget.num_layers), [0], [tokens])
        scores = self.scorer.rank(gathered, event)
        routed = route(scores, before[:, None], limits, budget.config.promote)
        after = torch.where(self.is_routed, routed.tiers[:, 0], before)
        self.tiers[:, :count] = after
        self.scores *= self.scorer.decay
        return Event(tokens, scores[:, 0], after, self.is_routed & routed.outranked[:, 0])

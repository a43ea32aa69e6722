"""What routing ranks windows by: a scorer makes it of the attention that they have gathered.

Between two routing events kernels add to ``Views.score`` in place, within the launch that attends:
each query's probability mass on a window, mean over query heads. No scorer is asked meanwhile, so
a step costs the same with every one of them. At an event, and only there, the scorer says what is
ranked (``rank``) and how much of what was gathered stays for the next event (``decay``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from qevict_tiers.config import TieringConfig

__all__ = ["AttentionScorer", "DecayedScorer", "Ranking", "Scorer", "ValueScorer", "scorer_of"]


class Ranking(NamedTuple):
    """A routing event as a scorer sees it: some layers of rows of so many stored tokens each.

    The simulator's one request is row 0.
    """

    layers: slice
    rows: Sequence[int]
    tokens: Sequence[int]


class Scorer(Protocol):
    """Turns the attention that windows have gathered into what routing ranks."""

    @property
    def decay(self) -> float:
        """What is left of the gathered attention after each event, from 0 to 1."""
        ...

    def rank(self, gathered: torch.Tensor, event: Ranking) -> torch.Tensor:
        """What the windows of an event are ranked by; higher stays.

        ``gathered``: float32 ``[layers, rows, N]``, the attention mass of the first ``N`` windows
        as the last event left it, and what came since; it is not changed. Returns a float tensor
        of its shape and device, without NaN. It must not make the host wait for the device.
        """
        ...


class AttentionScorer:
    """All the attention that a window has had, never decayed (QEvict, arXiv 2608.05326, alg. 1)."""

    decay: float = 1.0

    def rank(self, gathered: torch.Tensor, event: Ranking) -> torch.Tensor:
        """``gathered`` itself: nothing is copied or computed."""
        return gathered


@dataclass(frozen=True)
class DecayedScorer(AttentionScorer):
    """Attention that counts less the more events ago it was.

    With ``m_e`` the mass that a window gathers between events ``e - 1`` and ``e`` (the first of
    them from the prompt), its score at event ``e`` is::

        S_e = m_e + decay * S_(e-1) = sum over j <= e of decay^(e - j) * m_j

    To multiply the sums that kernels add to, once after each event, is all that it takes. Before
    the ranking or after it is the same: all windows of a row are multiplied alike. Attention loses
    half of its weight in ``ln 2 / -ln decay`` events of ``route_every`` tokens each; within an
    interval all steps weigh alike. 1 never forgets (``AttentionScorer``); 0 is stateless: what
    counts is the attention since the last event.

    Since a step has a mass of 1 to give, the scores of a row and layer sum to no more than
    ``route_every / (1 - decay)`` in the long run, so that their last bits never get too coarse
    for what is added.

    Raises ``ValueError`` for a decay outside 0 to 1.
    """

    decay: float

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be from 0 (stateless) to 1 (never), got {self.decay}")


@dataclass(frozen=True, eq=False)
class ValueScorer:
    """Attention times the size of a window's values: what the window adds to outputs.

    After VATP (arXiv 2406.12335), which ranks tokens, in each head, by the attention that they
    have gathered times the l1 norm of their value. Here windows are ranked, all heads together, by
    the mean of these norms. For offline models and simulations: a server would have to keep a
    norm for each window, and has none of a window that it was given as codes.

    norms: float32 ``[L, rows, N]``, mean l1 norm of each window's values.
    """

    norms: torch.Tensor
    decay: float = 1.0

    @classmethod
    def of(
        cls, values: Mapping[int, Sequence[torch.Tensor]], window: int, decay: float = 1.0
    ) -> ValueScorer:
        """``values``: of each row, of each layer, those of all its tokens ``[T, Hkv, D]``."""
        longest = max(len(layer) for layers in values.values() for layer in layers)
        num_layers = max(len(layers) for layers in values.values())
        norms = torch.zeros(num_layers, max(values) + 1, -(-longest // window))
        for row, layers in values.items():
            for number, layer in enumerate(layers):
                tokens = layer.float().abs().sum(-1).mean(-1)
                whole = len(tokens) // window * window
                found = tokens[:whole].view(-1, window).mean(-1)
                if whole < len(tokens):
                    found = torch.cat([found, tokens[whole:].mean(0, keepdim=True)])
                norms[number, row, : len(found)] = found
        return cls(norms, decay)

    def rank(self, gathered: torch.Tensor, event: Ranking) -> torch.Tensor:
        """``gathered`` times the norms."""
        return gathered * self.norms[event.layers, list(event.rows), : gathered.shape[-1]]


def scorer_of(config: TieringConfig) -> Scorer:
    """The scorer that the options ask for."""
    if config.score_decay == 1:
        return AttentionScorer()
    return DecayedScorer(float(config.score_decay))

"""What a text needs of itself while it grows: its own earlier steps, and an earlier topic.

*own steps*: a derivation of about a thousand tokens states values step by step and takes them up
again at its end. All of it counts as generated, so the steps have been through routing many
times. Score: of the values that the full model knows at the end, the share that is known.

*topic*: the prompt holds two texts. The first goes on for a while, then the second does. KL to
the full model over the steps right after the change, beside those right before.

    cd benchmarks && python -m quality.generations --json generations.json
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

import torch
from tqdm import tqdm

from qevict_tiers.config import TieringConfig
from quality.metrics import Sample, fidelity_of
from quality.settings import SETTINGS
from quality.texts import KINDS, Half, load
from report import Column, begin, parser, print_table, write_json
from sglang_qevict.models import fetch_model
from sglang_qevict.offline import OfflineModel, Text

_GOODS = (
    "apples", "bread", "candles", "dates", "eggs", "flour", "grapes", "honey", "ink", "jam",
    "kettles", "lemons", "milk", "nuts", "olives", "paper", "rice", "salt", "tea", "wool",
)  # fmt: skip
_SIDE = 1500
"""Tokens of each topic in the prompt."""


class Derivation(NamedTuple):
    """A text, and the positions of the tokens that repeat an earlier value."""

    text: Text
    repeats: list[int]


def derivation(model: OfflineModel, seed: int) -> Derivation:
    """Values of twenty goods, each reckoned in a step, then all of them in another order."""
    rng = random.Random(seed)
    parts: list[tuple[str, bool]] = []
    totals = {}
    for number, goods in enumerate(rng.sample(_GOODS, len(_GOODS)), start=1):
        count, price = rng.randrange(3, 20), rng.randrange(11, 60)
        totals[goods] = str(count * price)
        parts.append(
            (
                f"Step {number}: The shop sells {count} boxes of {goods}. A box costs {price} "
                f"dollars. So we multiply {count} by {price}, and the {goods} come to "
                f"{totals[goods]} dollars. We write this down and go on.\n",
                False,
            )
        )
    parts.append(("Now we put it all together.\n", False))
    for goods in rng.sample(list(totals), len(totals)):
        parts += [
            (f"The {goods} come to", False),
            (f" {totals[goods]}", True),
            (" dollars.\n", False),
        ]
    tokens = model.tokenize("Let us work through the inventory of the shop, step by step.\n")
    prompt = len(tokens)
    repeats: list[int] = []
    for part, is_value in parts:
        ids = model.tokenize(part)
        if is_value:
            repeats += range(len(tokens), len(tokens) + len(ids))
        tokens += ids
    return Derivation(Text(tokens, prompt), repeats)


def own_steps(model: OfflineModel, config: TieringConfig, made: Sequence[Derivation],
              full: Sequence[torch.Tensor]) -> float:  # fmt: skip
    """Share of the repeated tokens that are predicted, of those that the full model predicts."""
    known = right = 0
    found = model.tiered_logits([one.text for one in made], config)
    for (text, repeats), best, mine in zip(made, full, found, strict=True):
        places = torch.tensor(repeats) - text.prompt
        tokens = torch.tensor([text.tokens[place] for place in repeats])
        knows = best.argmax(-1)[places] == tokens
        known += int(knows.sum())
        right += int((mine.argmax(-1)[places] == tokens)[knows].sum())
    return right / max(1, known)


def change_of_topic(model: OfflineModel, kinds: tuple[str, str], steps: int, half: Half) -> Text:
    """The first of two texts goes on for so many tokens, then the second."""
    one, other = (model.tokenize(load(kind, half))[: _SIDE + steps] for kind in kinds)
    tokens = one[:_SIDE] + other[:_SIDE] + one[_SIDE:] + other[_SIDE:]
    return Text(tokens, 2 * _SIDE)


def main() -> None:
    """Measure all settings."""
    made = parser(__doc__ or "")
    made.add_argument("--budget", type=Fraction, default=Fraction(1, 5), help="default: 0.2")
    made.add_argument("--setting", action="append", choices=SETTINGS, help="default: all")
    made.add_argument("--half", type=Half, default=Half.TEST, help="test (default) or tune")
    options = made.parse_args()
    machine = begin(options)
    model = OfflineModel(fetch_model())
    steps, count = (16, 2) if options.quick else (64, 8)
    pairs = list(combinations(KINDS, 2))[:: 1 if options.quick else 4][: count - 1]
    topics = [change_of_topic(model, pair, steps, options.half) for pair in pairs]
    derivations = [derivation(model, seed) for seed in range(count)]
    full_topics = [model.full_logits(text) for text in topics]
    full_steps = [model.full_logits(one.text) for one in derivations]
    chosen = options.setting or (["paper", "balanced"] if options.quick else list(SETTINGS))
    rows = []
    for name in tqdm(chosen, unit="setting"):
        config = replace(SETTINGS[name], budget=options.budget)
        found = model.tiered_logits(topics, config)
        kls = torch.stack(
            [
                fidelity_of(Sample(list(text.tokens), text.prompt), best, mine).kl
                for text, best, mine in zip(topics, full_topics, found, strict=True)
            ]
        )
        rows.append(
            {
                "setting": name,
                "own_steps": own_steps(model, config, derivations, full_steps),
                "kl_before": kls[:, :steps].mean().item(),
                "kl_after": kls[:, steps:].mean().item(),
            }
        )
        write_json(options.json, machine, rows, budget=float(options.budget))
    print_table(
        rows,
        [
            Column("setting", "setting", "s"),
            Column("own_steps", "own steps known", ".3f"),
            Column("kl_before", "KL before a change of topic", ".4f"),
            Column("kl_after", "after", ".4f"),
        ],
    )


if __name__ == "__main__":
    main()

"""What each option of tiering is worth: KL and top-1 agreement at equal bytes.

Every configuration holds the same share of the full-precision bytes, parameters, alignment and
protected windows counted. Groups vary one or two options around the defaults. The group *presets*
has those, each at the budget that it is made for; *scorers* and *requantize* have what no server
has: windows ranked by their values as well (``ValueScorer``), and codes made anew each time that
a window rises to FULL and falls again (``requantizing``).

    cd benchmarks && python -m quality.ablations --budget 0.2 --group split --json split.json

``plots.py heat`` draws groups as heat maps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from qevict_kernels.interface import FullArena
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_tiers.config import PrefillScores, Promotion, TieringConfig
from qevict_tiers.presets import PRESETS
from qevict_tiers.scores import Scorer, ValueScorer
from quality.metrics import FORCED, PROMPTS, fidelity_of, row, samples, summary
from quality.settings import PAPER
from quality.texts import Half
from report import begin, parser, write_json
from sglang_qevict.flags import typed
from sglang_qevict.models import fetch_model
from sglang_qevict.offline import OfflineModel, PrefilledText, Text, production_kernels

Changes = dict[str, Any]


def _grid(**values: list[Any]) -> Iterator[Changes]:
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _shares(*values: float) -> list[Fraction]:
    return [Fraction(str(value)) for value in values]


GROUPS: Mapping[str, list[Changes]] = {
    "codes": list(
        _grid(quant_fraction=_shares(1), window=[8, 16, 32], key_bits=[2, 4], value_bits=[2, 4])
    ),
    "presets": [{"preset": name} for name in PRESETS],
    "split": [
        {"quant_fraction": Fraction(0)},
        *_grid(quant_fraction=_shares(0.5, 0.7, 0.85, 1), key_bits=[2, 4], value_bits=[2, 4]),
    ],
    "events": list(_grid(route_every=[1, 4, 8, 16, 32], quant_fraction=_shares(0.7, 1))),
    "params": list(_grid(params=list(ParamFormat), key_bits=[2, 4], value_bits=[2, 4])),
    "four": [
        *_grid(quant_fraction=_shares(0.7, 0.85, 0.95), key_bits=[4], value_bits=[4]),
        *_grid(quant_fraction=_shares(1), key_bits=[4], value_bits=[4], window=[4]),
    ],
    "promote": list(
        _grid(promote=[Promotion.ALIAS, Promotion.DEQUANTIZE], quant_fraction=_shares(0.5, 0.7))
    ),
    "scores": list(_grid(prefill_scores=list(PrefillScores), quant_fraction=_shares(0, 0.7, 1))),
    "decay": list(
        _grid(prefill_scores=list(PrefillScores), score_decay=_shares(1, 0.95, 0.8, 0.5, 0))
    ),
    "scorers": list(_grid(scorer=["attention", "values"], prefill_scores=list(PrefillScores))),
    "requantize": [
        {**one, "value_bits": one["key_bits"]}
        for one in _grid(
            requantize=[False, True],
            route_every=[1, 8],
            promote=[Promotion.DEQUANTIZE],
            quant_fraction=_shares(0.5),
            key_bits=[2, 4],
        )
    ],
    "protected": list(_grid(sink=[0, 5, 16], local=[8, 32, 64, 128])),
    "layers": [
        {"full_layers": layers, **rest}
        for layers in (frozenset({0}), frozenset({0, 1}), frozenset({28, 29}))
        for rest in _grid(quant_fraction=_shares(0.7, 1))
    ],
}


_FIELDS = {field.name for field in fields(TieringConfig)}


def name_of(changes: Changes) -> str:
    """Options as text."""
    return ", ".join(f"{key} {typed(value)}" for key, value in changes.items())


def _config(group: str, changes: Changes, budget: Fraction) -> TieringConfig:
    if group == "presets":
        return PRESETS[changes["preset"]].config
    base = PAPER if group == "paper" else TieringConfig()
    return replace(base, budget=budget, **{k: v for k, v in changes.items() if k in _FIELDS})


def requantizing(geometry: WindowGeometry, rotary: RotaryTable) -> Any:
    """Kernels that code a window again from the FULL copy that they rebuild of it.

    As if no codes were kept beside FULL copies, and each demotion made them. The copy does not
    change while it is FULL, so that they can be made at once. Bytes are charged as if codes were
    kept.
    """
    kernels = production_kernels(geometry, rotary)
    dequantize = kernels.dequantize

    def rebuild(full: FullArena, coded: torch.Tensor, *places: torch.Tensor) -> None:
        dequantize(full, coded, *places)
        kernels.quantize(full, coded, *places)

    kernels.dequantize = rebuild
    return kernels


def scorer_for(changes: Changes, prefilled: Sequence[PrefilledText], window: int) -> Scorer | None:
    """What windows are ranked by; None for what the options say."""
    if changes.get("scorer") != "values":
        return None
    values = {r: [v for _, _, v, _ in one.layers] for r, one in enumerate(prefilled, start=1)}
    return ValueScorer.of(values, window)


def main() -> None:
    """Evaluate the chosen groups."""
    made = parser(__doc__ or "")
    made.add_argument("--budget", type=Fraction, default=Fraction(1, 5), help="default: 0.2")
    made.add_argument("--group", action="append", choices=GROUPS, help="default: all")
    made.add_argument("--half", type=Half, default=Half.TUNE, help="tune (default) or test")
    options = made.parse_args()
    machine = begin(options)
    kinds = ["readme", "narrative"] if options.quick else list(PROMPTS)
    model = OfflineModel(fetch_model())
    texts = samples(model.tokenize, options.half, kinds, 32 if options.quick else FORCED)
    requests = [Text(*text) for text in texts]
    # With all queries, since some setting wants them.
    prefilled = [model.prefill(request, request.prompt) for request in requests]
    full = [prompt.logits for prompt in prefilled]
    rows = []
    chosen = [("paper", {}), *((g, c) for g in options.group or GROUPS for c in GROUPS[g])]
    if options.quick:
        chosen = chosen[:4]
    progress = tqdm(chosen, unit="setting")
    for group, changes in progress:
        config = _config(group, changes, options.budget)
        began = time.monotonic()
        make = requantizing if changes.get("requantize") else production_kernels
        scorer = scorer_for(changes, prefilled, config.window)
        tiered = model.tiered_logits(requests, config, make, prefilled, scorer)
        found = row([fidelity_of(*one) for one in zip(texts, full, tiered, strict=True)], kinds)
        name = name_of(changes) or group
        progress.write(summary(f"{group}: {name}", found))
        described = {key: typed(value) for key, value in changes.items()}
        found["seconds"] = time.monotonic() - began
        found["budget"] = float(config.budget)
        rows.append({"group": group, "options": described, **found})
        write_json(options.json, machine, rows, half=options.half.value)


if __name__ == "__main__":
    main()

"""Tasks that need what stands far back, asked before and after the cache is made smaller.

*before*: the question stands in the prompt, so its queries score the text. *after*: the text was
the prompt, and the question comes as tokens that are decoded: what it asks for may be gone.

A setting's score is the mean over the instances that the full model solves.

    cd benchmarks && python -m quality.retrieval --json retrieval.json
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from tqdm import tqdm

from qevict_tiers.config import SCORING_SPAN_TOKENS, PrefillScores
from quality.settings import SETTINGS
from quality.tasks import TASKS, Task, make, score
from quality.texts import Half
from report import Column, begin, parser, print_table, write_json
from sglang_qevict.models import fetch_model
from sglang_qevict.offline import OfflineModel, Text

MODES = ("before", "after")
ANSWER_TOKENS = 32
BATCH = 8


class Instance(NamedTuple):
    """A task as tokens: those of the text, and those of the question and what follows it."""

    task: Task
    context: list[int]
    question: list[int]

    def text(self, mode: str) -> Text:
        """The request in a mode."""
        tokens = self.context + self.question
        return Text(tokens, len(tokens) if mode == "before" else len(self.context))


def instances(
    tokenizer: Any, characters: int, count: int, half: Half, kinds: Sequence[str] = tuple(TASKS)
) -> list[Instance]:
    """So many of each kind, in the model's chat template."""
    made = []
    for kind in kinds:
        for seed in range(count):
            task = make(kind, characters, seed, half)
            question = f"{task.question} Answer briefly."
            messages = [{"role": "user", "content": f"{task.context}\n\n{question}"}]
            chat = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            start = chat.rindex(question)
            parts = (chat[:start], chat[start:])
            ids = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
            made.append(Instance(task, *ids))
    return made


def solved(instances: Sequence[Instance], answers: Iterable[str]) -> list[float]:
    """The score of each instance."""
    return [score(instance.task, text) for instance, text in zip(instances, answers, strict=True)]


def by_kind(
    instances: Sequence[Instance], full: Sequence[float], scores: Sequence[float]
) -> dict[str, Any]:
    """Mean score of each kind, and of all, over what the full model solves wholly."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for instance, best, mine in zip(instances, full, scores, strict=True):
        if best == 1:
            kinds[instance.task.kind].append(mine)
    means = {kind: sum(values) / len(values) for kind, values in kinds.items()}
    every = [value for values in kinds.values() for value in values]
    counts = {kind: len(values) for kind, values in kinds.items()}
    return {
        "by_kind": means,
        "solved_by_full": counts,
        "score": sum(every) / len(every) if every else None,
    }


def main() -> None:
    """Ask all settings."""
    made = parser(__doc__ or "")
    made.add_argument("--budget", type=Fraction, help="default: each setting's own")
    made.add_argument("--setting", action="append", choices=SETTINGS, help="default: all")
    made.add_argument("--characters", type=int, action="append", help="default: 4000, 10000")
    made.add_argument("--instances", type=int, default=8, help="of each kind (default: 8)")
    made.add_argument("--half", type=Half, default=Half.TEST, help="test (default) or tune")
    options = made.parse_args()
    machine = begin(options)
    model = OfflineModel(fetch_model())
    lengths = options.characters or ([4000] if options.quick else [4000, 10_000])
    chosen = options.setting or (["paper", "balanced"] if options.quick else list(SETTINGS))
    count = 2 if options.quick else options.instances
    rows = []
    settings = {
        name: SETTINGS[name]
        if options.budget is None
        else replace(SETTINGS[name], budget=options.budget)
        for name in chosen
    }
    # All queries only where a setting has them score.
    last = [config.prefill_scores is PrefillScores.LAST for config in settings.values()]
    queries = SCORING_SPAN_TOKENS if all(last) else max(lengths)
    progress = tqdm(total=len(lengths) * count * len(TASKS), unit="instance")
    for characters in lengths:
        asked = instances(model.tokenizer, characters, count, options.half)
        scores: dict[tuple[str, str], list[float]] = defaultdict(list)
        full: list[float] = []
        for first in range(0, len(asked), BATCH):
            some = asked[first : first + BATCH]
            full += solved(some, _full(model, some))
            # Once for all settings; the token at the end is none of the prompt's.
            prefilled = [
                model.prefill(Text([*one.context, *one.question, 0], len(one.context)), queries)
                for one in some
            ]
            for name in chosen:
                config = settings[name]
                for mode in MODES:
                    texts = [one.text(mode) for one in some]
                    answers = model.tiered_answers(
                        texts, ANSWER_TOKENS, config, prefilled=prefilled
                    )
                    scores[name, mode] += solved(some, map(model.tokenizer.decode, answers))
            progress.update(len(some))
        for (name, mode), mine in scores.items():
            row = {
                "setting": name,
                "mode": mode,
                "context": sum(len(one.context) for one in asked) // len(asked),
                "full": sum(full) / len(full),
                **by_kind(asked, full, mine),
            }
            rows.append(row)
            progress.write(f"{name}, {mode}, {row['context']} tokens: {row['score']}")
        write_json(options.json, machine, rows, budget=options.budget and float(options.budget))
    progress.close()
    print_table(
        rows,
        [
            Column("setting", "setting", "s"),
            Column("mode", "question", "s"),
            Column("context", "context", "d"),
            Column("full", "full model", ".2f"),
            Column("score", "of what it solves", ".2f"),
        ],
    )


def _full(model: OfflineModel, asked: Sequence[Instance]) -> list[str]:
    found = model.full_answers([one.text("before") for one in asked], ANSWER_TOKENS)
    return [model.tokenizer.decode(tokens) for tokens in found]


if __name__ == "__main__":
    main()

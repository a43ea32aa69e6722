"""A run as numbers: percentiles, checks, fairness, churn. Pure functions of what was noted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_qevict.stress.mix import CheckKind, Mix, Tenant
from sglang_qevict.stress.records import Outcome, Record, Run, Sample

__all__ = [
    "COPY_IS_RIGHT", "Alike", "Fairness", "TenantSummary", "alike", "fairness", "quantile",
    "right_share", "summarize", "unmet",
]  # fmt: skip

COPY_IS_RIGHT = 0.999
"""A check that reaches this share counts as right."""


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that this share of all does not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Alike(NamedTuple):
    """Answers beside those to the same prompt served alone.

    same: that are equal. shared: median share of the tokens before the first other one.
    """

    compared: int
    same: int
    shared: float | None


class Fairness(NamedTuple):
    """How evenly tenants are slowed down against running alone.

    slowdown: by tenant, median of latency over latency alone. ratio: the largest over the smallest.
    jain: 1 if all are alike, 1/n if one bears everything.
    """

    slowdown: Mapping[str, float]
    ratio: float | None
    jain: float | None


@dataclass(frozen=True)
class TenantSummary:
    """One tenant's row. Times in seconds.

    left: aborted by their own clients. cut: unfinished when the run ended. first_*: of all that
    waited for a first token; of those that waited in vain, how long they did, so that a server does
    not look fast by those that it did not get to. cached: share of prompt tokens that a prefix
    cache had. churn: mean of the server's own metric during the run.
    """

    tenant: str
    kind: str
    sent: int
    done: int
    left: int
    errors: int
    cut: int
    first_p50: float | None
    first_p90: float | None
    first_p99: float | None
    token_p50: float | None
    token_p90: float | None
    token_p99: float | None
    gap_p99: float | None
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    cached: float | None
    retractions: int
    checked: int
    right: int
    slowdown: float | None
    same_as_alone: float | None
    churn: float | None


def summarize(run: Run) -> list[TenantSummary]:
    """A row for each tenant, in the order of the mix."""
    slow = fairness(run.records, run.alone).slowdown
    return [_row(run, tenant, slow.get(tenant.name)) for tenant in run.mix.tenants]


def _row(run: Run, tenant: Tenant, slowdown: float | None) -> TenantSummary:
    mine = [record for record in run.records if record.tenant == tenant.name]
    outcomes = Counter(record.outcome for record in mine)
    firsts = _known(r.wait_seconds for r in mine)
    times = _known(r.token_seconds for r in mine)
    gaps = _known(r.gap_seconds for r in mine)
    checks = _known(r.check for r in mine)
    answered = [r for r in mine if r.output_tokens]
    prompts = sum(r.prompt_tokens for r in answered)
    same = alike(mine, run.alone)
    return TenantSummary(
        tenant=tenant.name,
        kind=tenant.kind.value,
        sent=len(mine),
        done=outcomes[Outcome.DONE],
        left=outcomes[Outcome.ABORTED],
        errors=sum(r.outcome.is_error for r in mine),
        cut=outcomes[Outcome.CUT],
        first_p50=quantile(firsts, 0.5),
        first_p90=quantile(firsts, 0.9),
        first_p99=quantile(firsts, 0.99),
        token_p50=quantile(times, 0.5),
        token_p90=quantile(times, 0.9),
        token_p99=quantile(times, 0.99),
        gap_p99=quantile(gaps, 0.99),
        prompt_tokens=prompts,
        output_tokens=sum(r.output_tokens for r in mine),
        tokens_per_second=sum(r.output_tokens for r in mine) / run.seconds if run.seconds else 0.0,
        cached=sum(r.cached_tokens for r in answered) / prompts if prompts else None,
        retractions=sum(r.retractions for r in mine),
        checked=len(checks),
        right=sum(check >= COPY_IS_RIGHT for check in checks),
        slowdown=slowdown,
        same_as_alone=same.same / same.compared if same.compared else None,
        churn=_churn(run.samples, tenant.name),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _churn(samples: Sequence[Sample], tenant: str) -> float | None:
    seen = [sample.churn[tenant] for sample in samples if tenant in sample.churn]
    if not seen:
        return None
    # A tenant is first seen once it has a request: what it had before is of earlier runs.
    first = samples[0].churn.get(tenant, (0.0, 0.0))
    total, count = (last - before for last, before in zip(seen[-1], first, strict=True))
    return total / count if count > 0 else None


# --- beside the same served alone ---


def _pairs(records: Iterable[Record], alone: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Finished requests with the same prompt here and there."""
    done = {record.key: record for record in alone if record.outcome is Outcome.DONE}
    return [
        (record, done[record.key])
        for record in records
        if record.outcome is Outcome.DONE
        and record.key in done
        and record.prompt_hash == done[record.key].prompt_hash
    ]


def alike(records: Iterable[Record], alone: Iterable[Record]) -> Alike:
    """How many answers are those that the requests get when they are served alone."""
    shares = []
    for ours, theirs in _pairs(records, alone):
        length = max(len(ours.output_ids), len(theirs.output_ids))
        together = zip(ours.output_ids, theirs.output_ids, strict=False)
        equal = next((n for n, (a, b) in enumerate(together) if a != b), None)
        if equal is None:
            equal = min(len(ours.output_ids), len(theirs.output_ids))
        shares.append(equal / length if length else 1.0)
    return Alike(len(shares), sum(share == 1.0 for share in shares), quantile(shares, 0.5))


def fairness(records: Iterable[Record], alone: Iterable[Record]) -> Fairness:
    """Slowdown by tenant, over its requests that were served alone, too.

    The second turn of a session may have another prompt than alone, since the first answer may
    differ; its length is the same, so it is compared all the same.
    """
    done = {record.key: record for record in alone if record.outcome is Outcome.DONE}
    by_tenant: dict[str, list[float]] = {}
    for record in records:
        theirs = done.get(record.key)
        if record.outcome is Outcome.DONE and theirs and theirs.latency_seconds:
            assert record.latency_seconds is not None
            slower = record.latency_seconds / theirs.latency_seconds
            by_tenant.setdefault(record.tenant, []).append(slower)
    slow = {name: quantile(values, 0.5) or 0.0 for name, values in by_tenant.items()}
    if not slow:
        return Fairness({}, None, None)
    values = list(slow.values())
    jain = sum(values) ** 2 / (len(values) * sum(value**2 for value in values))
    return Fairness(slow, max(values) / min(values), jain)


# --- what the mix requires ---


def right_share(run: Run, kind: CheckKind) -> tuple[int, int]:
    """Of the answers that were checked for this: how many are right, and how many there are."""
    of_kind = {tenant.name for tenant in run.mix.tenants if tenant.check is kind}
    checks = _known(record.check for record in run.records if record.tenant in of_kind)
    return sum(check >= COPY_IS_RIGHT for check in checks), len(checks)


def unmet(run: Run) -> list[str]:
    """What the mix requires and the run did not reach, a sentence each."""
    mix: Mix = run.mix
    found = []
    for kind, least in ((CheckKind.NEEDLE, mix.require.needle), (CheckKind.COPY, mix.require.copy)):
        right, checked = right_share(run, kind)
        if least is not None and right < least * max(1, checked):
            found.append(
                f"{right} of {checked} {kind.value} answers are right, {least:.0%} are required"
            )
    errors = sum(record.outcome.is_error for record in run.records)
    most = mix.require.error_rate
    if most is not None and errors > most * len(run.records):
        found.append(
            f"{errors} of {len(run.records)} requests failed, at most {most:.0%} are allowed"
        )
    return found

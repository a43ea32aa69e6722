"""The reference's attention against dense attention in float64."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import Case, random_case, rotary_table
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.reference import ReferenceKernels, decode_windows, unpack
from qevict_kernels.rope import RotaryTable

COUNTS = [(3, 5), (4, 0), (0, 4), (1, 1), (0, 0)]
TAILS = [8, 1, 8, 5, 8]
STYLES = [(64, True), (32, False)]


def dense(case: Case, rotary: RotaryTable, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(output ``[Hq, D]``, mean mass by window ``[N]``) of a request, token by token."""
    geometry, view = case.geometry, case.view
    row, columns, size = int(case.rows[b]), case.view.windows.shape[1], geometry.window
    keys, values, owners = [], [], []
    listed = view.windows[row].tolist()
    full = listed[: int(view.num_full[row])]
    coded = listed[columns - int(view.num_coded[row]) :]
    for w in full + coded:
        page = int(view.page_table[row, w])
        if w in full:
            slot = int(view.full_slot[page])
            k, v = case.full.keys[slot].double(), case.full.values[slot].double()
        else:
            record = case.coded[int(view.coded_slot[page])]
            k, v = (x.double() for x in decode_windows(unpack(record, geometry)))
            k = rotary.rotate(k.float(), w * size + torch.arange(size)).double()
        for i in range(min(size, int(case.seq_lens[b]) - w * size)):
            keys.append(k[:, i])
            values.append(v[:, i])
            owners.append(w)
    mass = torch.zeros(columns, dtype=torch.float64)
    out = torch.zeros(geometry.num_q_heads, geometry.head_dim, dtype=torch.float64)
    if not keys:
        return out, mass
    for h in range(geometry.num_q_heads):
        kv = h // geometry.group_size
        logits = torch.stack([k[kv] for k in keys]) @ case.query[b, h].double() * case.scale
        p = logits.softmax(0)
        out[h] = p @ torch.stack([v[kv] for v in values])
        mass.index_add_(0, torch.tensor(owners), p / geometry.num_q_heads)
    return out, mass


@pytest.mark.parametrize(("rotary_dim", "is_neox"), STYLES)
def test_decode_is_dense_attention_over_the_lists(rotary_dim: int, is_neox: bool) -> None:
    geometry = WindowGeometry(6, 2, 64)
    rotary = rotary_table(rotary_dim, is_neox)
    case = random_case(geometry, rotary, COUNTS, tail=TAILS)
    out, scores = case.decode(ReferenceKernels(geometry, rotary))
    for b in range(len(COUNTS)):
        expected, mass = dense(case, rotary, b)
        # float32 arithmetic, then bfloat16: half a step of 2**-8.
        assert ((out[b] - expected).abs() <= 2.0**-8 * expected.abs() + 1e-5).all()
        row = int(case.rows[b])
        assert (scores[row] - case.scores[row] - mass).abs().max() <= 1e-6
    others = [r for r in range(len(scores)) if r not in case.rows.tolist()]
    assert torch.equal(scores[others], case.scores[others])


def test_mass_of_a_request_is_one() -> None:
    geometry, rotary = WindowGeometry(4, 2, 64), rotary_table(64)
    case = random_case(geometry, rotary, COUNTS)
    _, scores = case.decode(ReferenceKernels(geometry, rotary))
    gained = (scores - case.scores).sum(1)[case.rows]
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    assert torch.allclose(gained, expected, atol=1e-5)


def test_extend_by_one_token_is_decode() -> None:
    geometry, rotary = WindowGeometry(6, 2, 64), rotary_table(64)
    case = random_case(geometry, rotary, COUNTS[:4], tail=TAILS)
    kernels = ReferenceKernels(geometry, rotary)
    expected, expected_scores = case.decode(kernels)
    out, scores = torch.empty_like(case.query), case.scores.clone()
    kernels.extend(
        case.query, case.full, case.coded, case.view, case.rows, case.seq_lens - 1,
        torch.ones(4, dtype=torch.int64), case.scale, out, scores, torch.zeros(4).long(),
    )  # fmt: skip
    assert torch.equal(out, expected)
    assert torch.equal(scores, expected_scores)


def test_extend_is_decode_token_by_token() -> None:
    """Every query sees what a decode step at its length would, and scores from its start on."""
    geometry, rotary = WindowGeometry(6, 2, 64), rotary_table(64)
    case = random_case(geometry, rotary, [(3, 5)])
    kernels = ReferenceKernels(geometry, rotary)
    length = int(case.seq_lens[0])
    query = torch.randn(6, 6, 64).bfloat16()
    out, scores = torch.empty_like(query), case.scores.clone()
    kernels.extend(
        query, case.full, case.coded, case.view, case.rows, torch.tensor([length - 6]),
        torch.tensor([6]), case.scale, out, scores, torch.tensor([length - 2]),
    )  # fmt: skip
    expected = case.scores.clone()
    for i in range(6):
        step = torch.tensor([length - 5 + i])
        one, after = case.decode(kernels, query=query[i : i + 1], seq_lens=step)
        # Sums of float32 in another order, then a rounding to bfloat16 each.
        assert ((out[i] - one[0]).abs() <= 2.0**-7 * one[0].abs() + 1e-5).all()
        if i >= 4:
            expected += after - case.scores
    assert torch.allclose(scores, expected, atol=1e-6)


def test_nan_stays_in_its_request() -> None:
    geometry, rotary = WindowGeometry(4, 2, 64), rotary_table(64)
    case = random_case(geometry, rotary, [(2, 2), (2, 2)])
    kernels = ReferenceKernels(geometry, rotary)
    expected, _ = case.decode(kernels)
    row = int(case.rows[0])
    slot = case.view.full_slot[case.view.page_table[row, case.view.windows[row, 0].long()].long()]
    case.full.keys[int(slot)] = torch.nan
    out, _ = case.decode(kernels)
    assert out[0].isnan().all()
    assert torch.equal(out[1], expected[1])

"""The numba backend against the reference: byte-equal codes, bounded attention, invariance."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from kernel_cases import Case, NarrowKernels, full_arena, random_case, rotary_table
from qevict_kernels.interface import AttentionKernels, FullArena
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.memory import TorchMemory
from qevict_kernels.numba import NumbaKernels
from qevict_kernels.numba import kernels as numba_module
from qevict_kernels.numba import spec as spec_module
from qevict_kernels.reference import ReferenceKernels, decode_windows, unpack

EPS = 2.0**-24
BLOCK = 32  # windows of one unit of work: counts around it are the interesting ones


@dataclass(frozen=True)
class Setup:
    """One compiled specialisation. Together they meet every head size, window, code, parameter
    format, dtype, rotary style and kind of head grouping that is supported."""

    geometry: WindowGeometry
    rotary_dim: int
    is_neox: bool
    dtype: torch.dtype = torch.bfloat16
    lanes: int | None = None

    def __str__(self) -> str:
        g = self.geometry
        style = "neox" if self.is_neox else "pairs"
        return (
            f"q{g.num_q_heads}kv{g.num_kv_heads}d{g.head_dim}w{g.window}-k{g.key_bits}v{g.value_bits}"
            f"-{g.params.value}-{style}{self.rotary_dim}-{str(self.dtype)[6:]}"
            + (f"-lanes{self.lanes}" if self.lanes else "")
        )


FP16, UINT8 = ParamFormat.FP16, ParamFormat.UINT8
SMALL = Setup(WindowGeometry(9, 3, 64), 64, True)
SETUPS = [
    SMALL,
    Setup(WindowGeometry(8, 2, 128), 128, True),
    Setup(WindowGeometry(8, 1, 64, 16, 4, 2, FP16), 64, False),
    Setup(WindowGeometry(5, 1, 80, 4, 2, 4, UINT8), 32, False, torch.float16),
    Setup(WindowGeometry(2, 2, 96, 32, 4, 4, UINT8), 96, True),
    Setup(WindowGeometry(16, 2, 256, 8, 2, 2, FP16), 64, True),
    Setup(WindowGeometry(2, 1, 80, 8, 2, 4, FP16), 80, True, torch.float16),
    Setup(WindowGeometry(17, 1, 64, 4, 4, 4, UINT8), 40, False),
    replace(SMALL, lanes=8),
]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)


@cache
def reference(setup: Setup) -> ReferenceKernels:
    return ReferenceKernels(setup.geometry, rotary_table(setup.rotary_dim, setup.is_neox))


@cache
def numba(setup: Setup) -> NumbaKernels:
    kernels = NarrowKernels if setup.lanes == 8 else NumbaKernels
    return kernels(setup.geometry, reference(setup).rotary)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


# -- store -------------------------------------------------------------------------------


@each_setup
@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 300])
def test_store_writes_the_bytes_of_the_reference(setup: Setup, tokens: int) -> None:
    geometry, g = setup.geometry, torch.Generator().manual_seed(tokens)
    num_slots = tokens // geometry.window + 2
    places = torch.randperm(num_slots * geometry.window, generator=g)[:tokens].int()
    slots, offsets = places // geometry.window, places % geometry.window
    slots[::5] = -1
    heads = (geometry.num_kv_heads, geometry.head_dim)
    # Keys and values as they come out of one projection: strided in the tokens.
    both = torch.randn(tokens, 2, *heads, generator=g).to(setup.dtype)
    got, expected = (full_arena(geometry, num_slots, setup.dtype, g.manual_seed(1)) for _ in "ab")
    numba(setup).store(got, slots, offsets, both[:, 0], both[:, 1])
    TorchMemory().store(expected, slots, offsets, both[:, 0], both[:, 1])
    assert torch.equal(got.keys, expected.keys)
    assert torch.equal(got.values, expected.values)


def test_tokens_of_another_shape_or_dtype_are_not_stored() -> None:
    full, slot = hostile_arena(SMALL, 8), torch.zeros(1, dtype=torch.int32)
    token = torch.zeros(1, 3, 64, dtype=torch.bfloat16)
    for keys, message in (
        (token.float(), "keys must have the arena's dtype torch.bfloat16"),
        (token[:, :2], r"keys must be \[1, 3, 64\]"),
        (token.repeat(2, 1, 1), r"keys must be \[1, 3, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            numba(SMALL).store(full, slot, slot, keys, token)


# -- quantize, dequantize -----------------------------------------------------------------


def slots_and_windows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(count)
    sources, targets = (torch.randperm(count, generator=g).int() for _ in range(2))
    sources[count // 2] = -1
    return sources, targets, torch.randint(0, 4096 // 32, (count,), generator=g).int()


def hostile_arena(setup: Setup, count: int) -> FullArena:
    """Windows with NaN, infinity, constants, zeros of both signs, outliers and tiny numbers."""
    full = full_arena(setup.geometry, count, setup.dtype, torch.Generator().manual_seed(3))
    full.keys[0, 0, 1, 2] = torch.nan
    full.values[1, -1, 0, 0] = torch.inf
    full.keys[2] = 0.0
    full.keys[3, :, ::2] = -0.0
    full.values[4] = 3.5
    full.keys[5, ..., 4] = 6e4
    full.keys[6, ..., 4] = -6e4 if setup.dtype is torch.float16 else -1e30
    full.values[7] *= 1e-7
    return full


@each_setup
def test_quantize_writes_the_bytes_of_the_reference(setup: Setup) -> None:
    full, (sources, targets, windows) = hostile_arena(setup, 23), slots_and_windows(23)
    shape = (23, setup.geometry.num_kv_heads, setup.geometry.record.record_bytes)
    expected, got = (torch.full(shape, 7, dtype=torch.uint8) for _ in range(2))
    bad = reference(setup).quantize(full, expected, sources, targets, windows)
    assert bad.sum() >= 2
    assert torch.equal(numba(setup).quantize(full, got, sources, targets, windows), bad)
    assert torch.equal(got, expected)


@each_setup
def test_dequantize_writes_the_numbers_of_the_reference(setup: Setup) -> None:
    full, (sources, targets, windows) = hostile_arena(setup, 23), slots_and_windows(23)
    shape = (23, setup.geometry.num_kv_heads, setup.geometry.record.record_bytes)
    coded = torch.zeros(shape, dtype=torch.uint8)
    reference(setup).quantize(full, coded, sources, targets, windows)
    results = []
    for kernels in (reference(setup), numba(setup)):
        data = torch.full((23, 2, *full.keys.shape[1:]), 7.0, dtype=setup.dtype)
        kernels.dequantize(FullArena(data[:, 0], data[:, 1]), coded, sources, targets, windows)
        results.append(data)
    assert torch.equal(results[0].isnan(), results[1].isnan())
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())


def test_quantizing_nothing_is_allowed() -> None:
    full, none = hostile_arena(SMALL, 8), torch.empty(0, dtype=torch.int32)
    coded = torch.full((8, 3, 448), 7, dtype=torch.uint8)
    assert numba(SMALL).quantize(full, coded, none, none, none).shape == (0,)
    assert (coded == 7).all()


# -- decode -------------------------------------------------------------------------------


def assert_close(setup: Setup, case: Case, **changes: object) -> None:
    """numba's decode equals the reference's within the rounding of float32 arithmetic."""
    expected, expected_scores = case.decode(reference(setup), **changes)
    out, scores = case.decode(numba(setup), **changes)
    keys, values = decode_windows(unpack(case.coded, case.geometry))
    k = max(x.float().norm(dim=-1).nan_to_num(0, 0, 0).max() for x in (case.full.keys, keys))
    v = max(x.float().abs().nan_to_num(0, 0, 0).max() for x in (case.full.values, values))
    q = case.query.float().norm(dim=-1).max()
    # A logit: D products, two rotations and a dequantisation rounded, of at most |q| |k|.
    logit = (setup.geometry.head_dim + 32) * EPS * float(q * k) * case.scale
    # A probability errs by the logit's error twice (once in the sum), and a few roundings.
    mass = 2 * logit + 16 * EPS
    step = 2.0**-8 if setup.dtype is torch.bfloat16 else 2.0**-11
    bound = 2 * step * expected.float().abs() + 2 * mass * float(v)
    assert ((out.float() - expected.float()).abs() <= bound).all()
    assert ((scores - expected_scores).abs() <= mass + 4 * EPS * expected_scores).all()


RAGGED = [(3, 5), (0, 4), (2, 0), (0, 0), (BLOCK + 8, 2 * BLOCK + 6), (1, 0), (0, 1)]
BOUNDARIES = [(BLOCK, BLOCK - 1), (BLOCK + 1, BLOCK), (BLOCK - 1, BLOCK + 1), (2 * BLOCK, 0)]


@each_setup
def test_decode_agrees_with_the_reference(setup: Setup) -> None:
    window = setup.geometry.window
    case = random_case(
        setup.geometry, reference(setup).rotary, RAGGED, dtype=setup.dtype,
        tail=[window, 1, 1, 1, window - 1, 2, 1],
    )  # fmt: skip
    assert_close(setup, case)


def test_decode_agrees_at_block_boundaries() -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, BOUNDARIES)
    assert_close(SMALL, case)


@pytest.mark.parametrize("tail", range(1, 9))
def test_decode_masks_what_is_not_written_yet(tail: int) -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, [(2, 3), (1, 0)], tail=[tail, tail])
    assert case.full.keys.isnan().any()
    assert_close(SMALL, case)


def test_decode_masks_windows_past_the_end() -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, [(3, 3), (2, 2)])
    assert_close(SMALL, case, seq_lens=torch.tensor([13, 1]))


def test_decode_with_a_yarn_table_agrees_with_the_reference() -> None:
    rotary = rotary_table(64, mscale=1.3)
    case = random_case(SMALL.geometry, rotary, [(3, 40)])
    expected, _ = case.decode(ReferenceKernels(SMALL.geometry, rotary))
    out, _ = case.decode(NumbaKernels(SMALL.geometry, rotary))
    assert (out - expected).abs().max() <= 2.0**-7 * expected.abs().max()


def test_empty_request_gives_zeros_and_no_score() -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, [(2, 3), (0, 0)])
    for length in (0, 1):
        out, scores = case.decode(numba(SMALL), seq_lens=torch.tensor([0, length]))
        assert not out.any()
        assert torch.equal(scores, case.scores)


def test_strided_query_out_and_int32_lengths() -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, RAGGED)
    expected, _ = case.decode(numba(SMALL))
    wide = torch.zeros(len(RAGGED), 2, 9, 64, dtype=torch.bfloat16)
    wide[:, 0] = case.query
    numba(SMALL).decode(
        wide[:, 0], case.full, case.coded, case.view, case.rows, case.seq_lens.int(), case.scale,
        wide[:, 1], None,
    )  # fmt: skip
    assert torch.equal(wide[:, 1], expected)
    assert torch.equal(wide[:, 0], case.query)


def test_nan_stays_in_its_request() -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, [(3, 40), (3, 40)])
    expected, expected_scores = case.decode(numba(SMALL))
    row = int(case.rows[0])
    page = case.view.page_table[row, int(case.view.windows[row, -1])]
    slot = int(case.view.coded_slot[page])
    start = SMALL.geometry.record.header
    case.coded[slot, :, start : start + 24] = torch.full((6,), torch.nan).view(torch.uint8)
    out, scores = case.decode(numba(SMALL))
    assert out[0].isnan().all()
    assert torch.equal(out[1], expected[1])
    other = int(case.rows[1])
    assert torch.equal(scores[other], expected_scores[other])


def test_extreme_logits_do_not_overflow() -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, [(3, 40)])
    for scale in (1e3, 1e-6):
        out, scores = case.decode(numba(SMALL), scale=scale)
        assert out.isfinite().all()
        gained = (scores - case.scores)[int(case.rows[0])].sum()
        assert abs(float(gained) - 1) <= 1e-4


# -- invariance ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch() -> Case:
    return random_case(SMALL.geometry, reference(SMALL).rotary, [*RAGGED, *BOUNDARIES])


def test_decode_is_bit_identical_alone_and_in_a_batch(batch: Case) -> None:
    out, scores = batch.decode(numba(SMALL))
    for b in range(len(out)):
        alone, alone_scores = batch.alone(b).decode(numba(SMALL))
        row = int(batch.rows[b])
        assert torch.equal(alone[0], out[b])
        assert torch.equal(alone_scores[row], scores[row])


def test_decode_is_bit_identical_on_any_number_of_threads(batch: Case) -> None:
    with threads(1):
        expected = batch.decode(numba(SMALL))
    for count in (2, 3, 8):
        with threads(count):
            for got, want in zip(batch.decode(numba(SMALL)), expected, strict=True):
                assert torch.equal(got, want)


def test_output_does_not_depend_on_whether_scores_are_asked_for(batch: Case) -> None:
    with_scores, _ = batch.decode(numba(SMALL))
    without, scores = batch.decode(numba(SMALL), scores=False)
    assert torch.equal(with_scores, without)
    assert torch.equal(scores, batch.scores)


# -- every byte matters -------------------------------------------------------------------


@pytest.mark.parametrize("params", [UINT8, FP16], ids=["uint8", "fp16"])
def test_every_field_of_a_record_changes_the_result(params: ParamFormat) -> None:
    """A bound that a corrupted record passes proves nothing."""
    setup = SMALL if params is UINT8 else Setup(WindowGeometry(2, 1, 80, 8, 2, 4, FP16), 80, True)
    setup = setup if params is UINT8 else SETUPS[6]
    case = random_case(setup.geometry, reference(setup).rotary, [(0, 3)], dtype=setup.dtype)
    record = setup.geometry.record
    expected, _ = case.decode(reference(setup))
    fields = {
        name: getattr(record, name)
        for name in ("key_codes", "value_codes", "key_scales", "key_zeros", "value_scales",
                     "value_zeros")
    }  # fmt: skip
    places = list(fields.values()) + [record.header + 4 * i for i in range(6) if params is UINT8]
    for place in places:
        changed = replace(case, coded=case.coded.clone())
        # The top byte of the field's first number (float32, float16 or byte), and a whole word.
        width = 4 if place >= record.header else 2 if params is FP16 else 1
        changed.coded[..., place + width - 1] ^= 0x15
        out, _ = changed.decode(numba(setup))
        again, _ = changed.decode(reference(setup))
        same = (out == expected) | (out.isnan() & expected.isnan())
        assert not same.all(), f"byte {place} is never read"
        assert torch.equal(out.isnan(), again.isnan())
        error = (out.float() - again.float()).nan_to_num().abs()
        assert error.max() <= 2.0**-6 * again.float().nan_to_num().abs().max()


# -- interface ----------------------------------------------------------------------------


def public_methods(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(function)
        for name, function in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_every_kernel_has_a_reference_of_the_same_signature() -> None:
    references = public_methods(ReferenceKernels) | public_methods(TorchMemory)
    assert references == public_methods(AttentionKernels)
    kernels = public_methods(NumbaKernels)
    assert kernels | public_methods(TorchMemory) == references
    assert references.keys() - kernels.keys() == {"copy_slots", "reserve"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 9, 32, dtype=torch.bfloat16)}, r"query must be \[2, 9, 64\]"),
        ({"query": torch.zeros(2, 9, 64)}, "query must have the arena's dtype torch.bfloat16"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows must be contiguous torch.int64"),
        ({"rows": torch.zeros(3, dtype=torch.int64)}, r"rows must .* \[2\], got torch.int64 \[3\]"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be contiguous torch.int64 or torch.int32"),
        ({"coded": torch.zeros(1, 3, 64, dtype=torch.uint8)}, r"coded must .* \[1, 3, 448\]"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    case = random_case(SMALL.geometry, reference(SMALL).rotary, [(1, 1), (1, 1)])
    with pytest.raises(ValueError, match=message):
        case.decode(numba(SMALL), **change)


def test_float32_arena_is_refused() -> None:
    full = FullArena(torch.zeros(1, 3, 8, 64), torch.zeros(1, 3, 8, 64))
    case = random_case(SMALL.geometry, reference(SMALL).rotary, [(1, 1)])
    with pytest.raises(ValueError, match="must be bfloat16 or float16 on cpu"):
        case.decode(numba(SMALL), full=full)


PROGRAM = """
import torch
from kernel_cases import full_arena, rotary_table
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.numba import NumbaKernels
from qevict_kernels.numba.quantize import dequantize_kernel

geometry = WindowGeometry(1, 1, 64)
full = full_arena(geometry, 1, torch.bfloat16, torch.Generator())
coded, slot = torch.zeros(1, 1, 448, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
NumbaKernels(geometry, rotary_table(64)).dequantize(full, coded, slot, slot, slot)
print(sum(dequantize_kernel.stats.cache_hits.values()))
"""


def test_second_process_finds_compiled_kernels_on_disk(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    path = [str(root / "tests"), str(root / "kernels"), *filter(None, sys.path)]
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path)
    }  # fmt: skip
    hits = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]  # fmt: skip
    assert hits == ["0", "1"]


def test_any_change_of_the_package_makes_compiled_kernels_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offsets and margins come from files beside the drivers; numba itself looks at one file."""
    fingerprint = spec_module._source_fingerprint.__wrapped__
    root = Path(spec_module.__file__).parents[1]
    before, read = fingerprint(), Path.read_bytes
    for changed in root.rglob("*.py"):
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, of=changed: read(path) + b"#" * (path == of)
        )
        assert fingerprint() != before


def test_wide_vectors_are_used_where_the_cpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = numba_module.host_lanes
    monkeypatch.setattr("numba.core.config.CPU_NAME", "haswell")
    assert lanes() == 8
    monkeypatch.setattr("numba.core.config.CPU_FEATURES", "+avx2,+avx512f")
    assert lanes() == 16

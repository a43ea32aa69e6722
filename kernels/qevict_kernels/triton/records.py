"""Reading coded records (see ``layout``) in any shape: what dequantisation and prefill share.

All functions broadcast: ``records`` are pointers to the first byte of records, ``token`` and
``channel`` places within a window.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_codes", "load_params"]


@triton.jit
def load_codes(
    records, token, channel, mask, FIELD: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr
):
    """int32 codes of the field that begins at byte ``FIELD``; 0 where ``mask`` is not."""
    word = (token // G.code_group) * G.head_dim + channel
    if G.code_group * BITS == 8:
        words = tl.load(records + FIELD + word, mask=mask, other=0)
    elif G.code_group * BITS == 16:
        pointers = (records + FIELD).to(tl.pointer_type(tl.uint16), bitcast=True)
        words = tl.load(pointers + word, mask=mask, other=0)
    else:
        pointers = (records + FIELD).to(tl.pointer_type(tl.uint32), bitcast=True)
        words = tl.load(pointers + word, mask=mask, other=0)
    return (words.to(tl.int32) >> (token % G.code_group * BITS)) & ((1 << BITS) - 1)


@triton.jit
def load_params(
    records, row, mask,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, HEADER: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """float32 (scale, zero) of rows (channels of keys, tokens of values); 0 where no ``mask``.

    ``SCALES``, ``ZEROS``, ``HEADER``: bytes of a record at which these fields begin.
    """
    if G.params.value == "fp16":
        scales = (records + SCALES).to(tl.pointer_type(tl.float16), bitcast=True)
        zeros = (records + ZEROS).to(tl.pointer_type(tl.float16), bitcast=True)
        scale = tl.load(scales + row, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(zeros + row, mask=mask, other=0.0).to(tl.float32)
    else:
        header = (records + HEADER).to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(records + SCALES + row, mask=mask, other=0).to(tl.float32)
        zero = tl.load(records + ZEROS + row, mask=mask, other=0).to(tl.float32)
        scale = scale * tl.load(header)
        zero = tl.load(header + 1) + zero * tl.load(header + 2)
    return scale, zero

"""Lives of requests in tiers on the Triton kernels, with the fixed shapes of an accelerator."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kernel_cases import WITHOUT_STORE
from mini_engine import MiniEngine, Text
from qevict_kernels.triton import TritonKernels
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.policy import Tier
from triton_device import DEVICE, require_device

require_device()

pytestmark = pytest.mark.slow

HEADS = Heads(4, 2, 64)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the miniature engine is the CPU's")
@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_attention_over_all_tiers_and_a_reused_prefix_equals_the_dense_oracle(
    promote: Promotion,
) -> None:
    config = TieringConfig(
        budget=Fraction(2, 5),
        quant_fraction=Fraction(3, 10),
        min_context=96,
        local=16,
        promote=promote,
        route_every=4,
    )
    engine = MiniEngine(
        lambda g, r: TritonKernels(g, r, DEVICE, tile=16, max_splits=2),
        config,
        HEADS,
        kv_tokens=900,
        context=320,
        rows=3,
        check=True,
        fixed_shapes=True,
    )
    document = Text(1, 120)
    for name, prompt in ((1, 150), (2, 60), (3, 140)):
        cached = engine.start(name, prompt, document)
        assert (cached > 0) == (name > 1)
        while engine.running[name].stored < prompt:
            engine.extend({name: 64})
        for _ in range(9):
            engine.decode(sorted(engine.running))
        if name == 1:
            engine.finish(name, publish=True)
        assert engine.problems() == []
    tiers = engine.tiers(3)
    assert {Tier(int(tier)) for tier in tiers.unique()} >= {Tier.FULL, Tier.CODED, Tier.EVICTED}
    for name in list(engine.running):
        engine.finish(name, publish=True)
    assert engine.problems() == []
    # The interpreter truncates where a device would round to bfloat16.
    assert engine.worst_error < 0.05
    assert torch.isfinite(torch.tensor(engine.worst_error))

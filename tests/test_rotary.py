"""Which rotary table a model's attention layers use."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from mini_engine import rotary_table
from sglang_qevict.rotary import find_rotary


class Rotary(nn.Module):
    """What SGLang's rotary modules have in common."""

    def __init__(self, cos_sin: torch.Tensor, is_neox: bool = True) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", cos_sin, persistent=False)
        self.is_neox_style = is_neox


class Layer(nn.Module):
    """An attention module as in SGLang's models: the rotary module beside the attention."""

    def __init__(self, layer_id: int, rotary: nn.Module | None) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.attn = RadixAttention(4, 64, 0.125, num_kv_heads=2, layer_id=layer_id)


def model(*rotaries: nn.Module | None) -> nn.Module:
    return nn.ModuleList(Layer(i, rotary) for i, rotary in enumerate(rotaries))


TABLE = rotary_table(64, positions=64).cos_sin


@pytest.mark.parametrize("is_neox", [True, False])
def test_the_table_that_all_layers_share_is_found(is_neox: bool) -> None:
    rotary = find_rotary(model(Rotary(TABLE, is_neox), Rotary(TABLE.clone(), is_neox)), "cpu")
    assert rotary.cos_sin.equal(TABLE)
    assert rotary.is_neox is is_neox


def test_a_vision_tower_keeps_its_own() -> None:
    both = nn.ModuleDict({"visual": Rotary(TABLE * 2), "language": model(Rotary(TABLE))})
    assert find_rotary(both, "cpu").cos_sin.equal(TABLE)


@pytest.mark.parametrize(
    "other",
    [Rotary(TABLE * 2), Rotary(TABLE[:32]), Rotary(TABLE, is_neox=False)],
    ids=["table", "length", "style"],
)
def test_layers_with_different_ones_are_refused(other: Rotary) -> None:
    with pytest.raises(ValueError, match=r"layers use different ones: serve it with --kv-tiering"):
        find_rotary(model(Rotary(TABLE), other), "cpu")


@pytest.mark.parametrize("rotary", [None, nn.Identity()])
def test_a_layer_without_one_is_refused_though_others_have_one(rotary: nn.Module | None) -> None:
    with pytest.raises(ValueError, match=r"but 1\.attn has no rotary embedding with a table"):
        find_rotary(model(Rotary(TABLE), rotary), "cpu")


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="found no attention layer"):
        find_rotary(nn.ModuleList([Rotary(TABLE)]), "cpu")


def test_a_rounded_table_is_told_from_a_model_that_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="SGLang rounded them to bfloat16: set") as error:
        find_rotary(model(Rotary(TABLE.bfloat16())), "cpu")
    assert "SGLANG_ROPE_CACHE_FP32=1 and unset SGLANG_USE_CPU_ENGINE" in str(error.value)
    assert "linear" not in str(error.value)

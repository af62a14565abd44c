"""Adapters of peft."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import (
    find_symmetric_pairs,
    verify,
)

from ... import architectures, networks
from ...architectures import adapted, bert_and_batch, gpt2_and_batch


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.embedding, self.head = nn.Conv2d(3, 6, 3), nn.Embedding(20, 6), nn.Linear(6, 4)

    def forward(self, pixel_values, input_ids):
        return self.head(self.conv(pixel_values).mean((2, 3)) + self.embedding(input_ids).mean(1))


def convolutions_and_batch():
    return networks.shake(Convolutions()), {"pixel_values": torch.randn(2, 3, 8, 8), **architectures.IDS}


def mha_and_batch():
    return networks.shake(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)})), torch.randn(2, 5, 8)


LORA = {
    "plain": (bert_and_batch, ["query", "value", "dense"], {}),
    "rslora": (bert_and_batch, ["key"], {"use_rslora": True}),
    "dora": (bert_and_batch, ["query", "value"], {"use_dora": True}),
    "rank pattern": (bert_and_batch, ["query", "key"], {"rank_pattern": {"key": 2}}),
    "bias": (bert_and_batch, ["query"], {"lora_bias": True}),
    "fused Conv1D": (gpt2_and_batch, ["c_attn", "c_proj"], {"fan_in_fan_out": True}),
    "Conv2d, Embedding": (convolutions_and_batch, ["conv", "embedding", "head"], {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LORA)
def test_lora(name):
    make, targets, options = LORA[name]
    base, batch = make()
    model = adapted(base, targets, **options)
    pairs = find_symmetric_pairs(model)
    usable = [p for p in pairs if p.group is not None]
    assert {p.kind for p in usable} == {"lora"}  # the base is frozen: attention pairs are listed with that reason
    assert all("frozen" in p.reason or "Dora" in p.reason for p in pairs if p.group is None)
    assert {p.group.h for p in usable} == ({3, 2} if name == "rank pattern" else {3})
    report = verify(model, batch)
    assert len(report.changes) == len(usable) > 0
    assert max(report.changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
def test_lora_on_multihead_attention():
    base, x = mha_and_batch()
    model = adapted(base, ["attn"])

    def forward(m, b):
        return m.base_model.model["attn"](b, b, b)[0]

    pairs = [p for p in find_symmetric_pairs(model) if p.group is not None]
    assert [p.kind for p in pairs] == ["lora", "lora"]
    report = verify(model, x, forward=forward)
    assert max(report.changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [bert_and_batch, gpt2_and_batch])
def test_lora_with_a_trainable_base_joins_the_attention_pairs(make):
    base, batch = make()
    targets = ["query", "key", "value", "output.dense"] if make is bert_and_batch else ["c_attn", "c_proj"]
    options = {} if make is bert_and_batch else {"fan_in_fan_out": True}
    model = adapted(base, targets, **options)
    model.requires_grad_(True)
    pairs = find_symmetric_pairs(model)
    attention = [p for p in pairs if p.kind in ("qk", "vo")]
    assert all(p.group is not None for p in attention)
    assert attention[0].n == 17 + 3  # rows of lora_B
    stand_in = [p for p in pairs if p.kind == "lora" and p.group is None]
    assert stand_in
    assert all("stand in the attention pairs" in p.reason for p in stand_in)
    assert max(verify(model, batch).changes.values()) < 1e-9
    # Forgetting the rows of LoRA moves the outputs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quotient_manifolds.symmetries.attention.lora_factors", lambda module: [])
        assert max(verify(model, batch).changes.values()) > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_dora_breaks_the_attention_symmetry_and_keeps_its_own():
    base, batch = bert_and_batch()
    model = adapted(base, ["query", "value"], use_dora=True)
    model.requires_grad_(True)
    pairs = find_symmetric_pairs(model)
    assert {p.kind for p in pairs if p.group is not None} == {"lora"}
    assert all("Dora" in p.reason for p in pairs if p.group is None)
    assert max(verify(model, batch).changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
def test_merged_and_disabled_adapters_are_listed_with_the_reason():
    base, _ = bert_and_batch()
    model = adapted(base, ["query"])
    model.merge_adapter()
    assert {p.reason for p in find_symmetric_pairs(model) if p.kind == "lora"} == {
        "merged into the base weight; unmerge it"
    }
    model.unmerge_adapter()
    with model.disable_adapter():
        assert {p.reason for p in find_symmetric_pairs(model) if p.kind == "lora"} == {"the adapter is disabled"}
    assert all(p.group is not None for p in find_symmetric_pairs(model) if p.kind == "lora")

"""Adapters of peft."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import (
    Cause,
    adapter_pairs,
    certify,
    find,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.lora import adapter_of, lora_layers
from quotient_manifolds.weights import weights_of
from tests.quotient_manifolds.symmetries.test_certificate import gradients_of
from tests.support import architectures, networks
from tests.support.architectures import adapted, bert_and_batch, gpt2_and_batch


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


def trained(model):
    """What is left of a model's symmetries where only its trainable weights move."""
    return find(model).restricted(name for name, p in weights_of(model).items() if p.requires_grad)


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
    found = trained(model)
    assert {p.kind for p in found.pairs} == {"lora"}  # the base is frozen: attention pairs are listed with that reason
    assert all("frozen" in p.reason or "Dora" in p.reason for p in found.refused)
    assert {p.group.h for p in found.pairs} == ({3, 2} if name == "rank pattern" else {3})
    report = verify(model, batch, found)
    assert len(report.changes) == len(found.pairs) > 0
    assert max(report.changes.values()) < 1e-9
    every = verify(model, batch)  # of frozen weights too, and of LoRA's factors as rows of attention pairs
    assert len(every.changes) == len(find(model).pairs)
    assert max(every.changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
def test_lora_on_multihead_attention():
    base, x = mha_and_batch()
    model = adapted(base, ["attn"])

    def forward(m, b):
        return m.base_model.model["attn"](b, b, b)[0]

    assert [p.kind for p in find(model).pairs] == ["lora", "lora"]
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
    found = trained(model)
    attention = [p for p in found.pairs if p.kind in ("qk", "vo")]
    assert attention == [p for p in find(model).pairs if p.kind in ("qk", "vo")]
    assert attention[0].n == 17 + 3  # rows of lora_B
    assert {(p.kind, p.cause) for p in found.refused} == {("lora", Cause.OVERLAPS)}
    assert all("belong to another pair: that of the attention" in p.reason for p in found.refused)
    names = {name for p in attention for name in p.names}
    assert all(names.isdisjoint(p.names) == (p in found.pairs) for p in find(model).pairs if p.kind == "lora")
    assert max(verify(model, batch, found).changes.values()) < 1e-9
    # Forgetting the rows of LoRA moves the outputs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quotient_manifolds.symmetries.roles.lora_factors", lambda module: [])
        assert max(verify(model, batch, trained(model)).changes.values()) > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_dora_breaks_the_attention_symmetry_and_keeps_its_own():
    base, batch = bert_and_batch()
    model = adapted(base, ["query", "value"], use_dora=True)
    model.requires_grad_(True)
    found = trained(model)
    assert {p.kind for p in found.pairs} == {"lora"}
    assert found.refused
    assert all("Dora" in p.reason for p in found.refused)
    assert max(verify(model, batch).changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
def test_merged_and_disabled_adapters_are_listed_with_the_reason():
    base, _ = bert_and_batch()
    model = adapted(base, ["query"])
    model.merge_adapter()
    assert {p.reason for p in find(model).refused} == {"merged into the base weight; unmerge it"}
    assert not any(p.kind == "lora" for p in find(model).pairs)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert {p.reason for p in find(model).refused} == {"the adapter is disabled"}
        assert not any(p.kind == "lora" for p in find(model).pairs)
    assert any(p.kind == "lora" for p in find(model).pairs)
    assert find(model).refused == ()


TUNERS = {
    "IA3": {"target_modules": ["key", "value"], "feedforward_modules": [], "init_ia3_weights": False},
    "LoHa": {"r": 2, "init_weights": False},
    "LoKr": {"r": 2, "init_weights": False},
    "AdaLora": {"init_r": 2, "target_r": 1, "total_step": 10, "init_lora_weights": False},
    "BOFT": {"boft_block_size": 4, "init_weights": False},
    "OFT": {"oft_block_size": 4, "init_weights": False},
    "HRA": {"r": 2, "init_weights": False},
    "Vera": {"r": 2, "init_weights": False},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tuner", TUNERS)
def test_other_tuners_of_peft_are_refused_layer_by_layer(tuner):
    """Their changes of a weight are no products that can be divided out; the layers that they leave alone stay."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["query", "value"], **TUNERS[tuner]}
    options["target_modules"] = [f"bert.encoder.layer.0.attention.self.{t}" for t in options["target_modules"]]
    model = peft.get_peft_model(networks.bert(), getattr(peft, f"{tuner}Config")(**options))
    model.requires_grad_(True)
    found, weights = find(model), weights_of(model)
    assert found.refused
    assert all("layer.0." in p.module and "no known symmetry of" in p.reason for p in found.refused)
    assert found.pairs
    assert all("layer.1." in p.module for p in found.pairs)
    gradients = gradients_of(model, model(**networks.text()).loss)
    assert certify(stacks(found.pairs, weights), weights, gradients, tolerance=1e-10).failures == ()


@pytest.mark.filterwarnings("ignore")
def test_a_bias_of_lora_is_one_more_row_of_the_attention_pairs():
    """Without it the outputs would move by a seventh."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], lora_bias=True, init_lora_weights=False)
    model = peft.get_peft_model(networks.bert(), config)
    model.requires_grad_(True)
    for name, p in model.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            p.data.normal_()
    report = verify(model, networks.text())
    assert report.ok, str(report)
    rows = [s.name for p in find(model).pairs if p.kind != "lora" for s in p.G]
    assert any(name.endswith("lora_B.default.bias") for name in rows)


@pytest.mark.filterwarnings("ignore")
def test_lora_on_a_quantised_base_keeps_its_own_symmetry():
    peft = pytest.importorskip("peft")
    model, batch = networks.quantised_bert("4 bit")
    options = {"target_modules": ["query", "value"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, **options)).eval()
    found, weights = trained(model), weights_of(model)
    assert [(p.kind, str(p.group)) for p in found.pairs] == [("lora", "GL(3)")] * 4
    assert found.refused
    assert all(p.reason.startswith(("quantised", "frozen")) for p in found.refused)
    gradients = gradients_of(model, model(**batch).loss)
    assert certify(stacks(found.pairs, weights), weights, gradients, tolerance=1e-4).failures == ()


def test_what_belongs_to_an_adapter():
    """And to nothing else: the model may itself hold modules by name, one of which is called as the adapter."""
    peft = pytest.importorskip("peft")
    net = nn.ModuleDict({"one": nn.Linear(4, 5), "words": nn.Embedding(6, 4), "head": nn.Linear(5, 2)})
    config = peft.LoraConfig(
        r=2, target_modules=["one"], modules_to_save=["head"], use_dora=True, trainable_token_indices={"words": [1]}
    )
    model = peft.get_peft_model(net, config, adapter_name="one")
    model.add_adapter("two-b", config)
    layer, words, head = (model.base_model.model[name] for name in ("one", "words", "head"))
    found = {p: adapter_of(name) for name, p in model.named_parameters()}
    assert set(found.values()) == {"one", "two-b", None}
    for name in ("one", "two-b"):
        factors = [part[name].weight for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)]
        tokens = words.token_adapter.trainable_tokens_delta[name]
        expected = {*factors, tokens, *head.modules_to_save[name].parameters()}
        assert {p for p, adapter in found.items() if adapter == name} == expected
        assert len(expected) == 6
    assert [(name, B.shape) for _, name, B in lora_layers(model)] == [("one", (5, 2)), ("two-b", (5, 2))]
    assert adapter_of("lora_A.one.weight") == "one"  # the layer is the model
    assert adapter_of("block.lora_gate.weight") is None  # a layer of the model's own


def test_what_forms_no_pair_has_its_factors_all_the_same():
    """An optimiser tells by them whether it trains such an adapter."""
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2))
    with pytest.warns(UserWarning, match="groups > 1"):
        model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0"]))
    found = adapter_pairs(model)
    (refusal,) = found.refused
    assert found.pairs == ()
    assert refusal.reason == "a grouped convolution"
    assert set(refusal.names) == {name for name, p in weights_of(model).items() if p.requires_grad}
    model.requires_grad_(False)
    assert adapter_pairs(model) == found

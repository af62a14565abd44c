"""Adapters of peft, and their mean."""

import copy
import math

import peft
import pytest
import torch
from torch import nn

from quotient_manifolds import ConvergenceError, GLQuotientInv
from quotient_manifolds.optim import canonicalize_lora_
from quotient_manifolds.symmetries import (
    adapter_pairs,
    apply_random_symmetry_,
    average_lora_,
    certify,
    find_symmetric_pairs,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.lora import adapter_tensors, lora_layers

from ... import architectures, networks
from ...architectures import adapted, bert_and_batch, gpt2_and_batch
from ...training import X, lora
from .test_certificate import gradients_of


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
    assert all("belong to the attention pairs" in p.reason for p in stand_in)
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
    found = find_symmetric_pairs(model)
    refused = [p for p in found if p.group is None]
    assert refused
    assert all("layer.0." in p.module and "no known symmetry of" in p.reason for p in refused)
    assert all("layer.1." in p.module for p in found if p.group is not None)
    loss = model(**networks.text()).loss
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    gradients = {p: g for p, g in zip(model.parameters(), grads, strict=True) if g is not None}
    assert certify(stacks(found), gradients, tolerance=1e-10).failures == ()


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
    assert any(b.attribute == "bias" and "lora" not in p.kind for p in find_symmetric_pairs(model) for b in p.G)


@pytest.mark.filterwarnings("ignore")
def test_lora_on_a_quantised_base_keeps_its_own_symmetry():
    peft = pytest.importorskip("peft")
    model, batch = networks.quantised_bert("4 bit")
    options = {"target_modules": ["query", "value"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, **options)).eval()
    found = find_symmetric_pairs(model)
    assert [str(p.group) for p in found if p.kind == "lora"] == ["GL(3)"] * 4
    assert all(p.reason.startswith(("quantised", "frozen")) for p in found if p.kind != "lora")
    loss = model(**batch).loss
    assert certify(stacks(found), gradients_of(model, loss), tolerance=1e-4).failures == ()


def test_what_belongs_to_an_adapter():
    """And to nothing else: the model may itself hold modules by name, one of which is called as the adapter."""
    peft = pytest.importorskip("peft")
    net = nn.ModuleDict({"one": nn.Linear(4, 5), "head": nn.Linear(5, 2)})
    config = peft.LoraConfig(r=2, target_modules=["one"], modules_to_save=["head"], use_dora=True)
    model = peft.get_peft_model(net, config, adapter_name="one")
    model.add_adapter("two", config)
    found, layer, head = adapter_tensors(model), model.base_model.model["one"], model.base_model.model["head"]
    assert found.keys() == {"one", "two"}
    for name, own in found.items():
        factors = [part[name].weight for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)]
        expected = {id(t) for t in [*factors, *head.modules_to_save[name].parameters()]}
        assert {id(t) for t in own.values()} == expected
        assert len(expected) == 5
    assert found["one"].keys() == found["two"].keys()
    assert [(name, B.shape) for _, name, B in lora_layers(model)] == [("one", (5, 2)), ("two", (5, 2))]


def test_what_forms_no_pair_has_its_factors_all_the_same():
    """An optimiser tells by them whether it trains such an adapter."""
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2))
    with pytest.warns(UserWarning, match="groups > 1"):
        model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0"]))
    (pair,) = adapter_pairs(model)
    assert pair.reason == "a grouped convolution"
    assert {id(p) for p in pair.parameters()} == {id(p) for p in model.parameters() if p.requires_grad}
    assert pair.model is model
    model.requires_grad_(False)
    assert adapter_pairs(model) == []


def three(two=None, mean=None, **options):
    """A model with two adapters near each other, and another for the mean."""
    model = lora(adapter="one", **options)
    for name, changes in (("two", two or {}), ("mean", mean or {})):
        torch.manual_seed(1)
        config = copy.deepcopy(model.peft_config["one"])
        for key, value in changes.items():
            setattr(config, key, value)
        model.add_adapter(name, config)
    for A, B in zip(of(model, "one"), of(model, "two"), strict=False):  # layers of both
        for own, other in ((A.G, B.G), (A.H, B.H)):
            if own[0].tensor.shape == other[0].tensor.shape:
                noise = torch.randn(own[0].tensor.shape, generator=torch.Generator().manual_seed(2)).to(own[0].tensor)
                other[0].tensor.data = own[0].tensor.data + 0.2 * noise * own[0].tensor.data.std()
    return model.double()


def of(model, name):
    return adapter_pairs(model, [name], include_frozen=True)


def products(model, name):
    return [p.scale * GLQuotientInv(p.n, p.m).to_matrix(p.gather().detach()) for p in of(model, name)]


def averaged(model, *arguments, **options):
    model = copy.deepcopy(model)
    average_lora_(model, *arguments, **options)
    return products(model, "mean")


def close(one, two):
    return all(torch.allclose(a, b, atol=1e-7) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_mean_does_not_depend_on_the_factors(metric):
    model = three()
    expected = averaged(model, ["one", "two"], "mean", metric=metric)
    assert not close(expected, products(model, "one"))
    moved = copy.deepcopy(model)
    apply_random_symmetry_(moved, 10.0, seed=3, pairs=of(moved, "two"))
    assert close(products(moved, "two"), products(model, "two"))
    assert close(averaged(moved, ["one", "two"], "mean", metric=metric), expected)

    def of_factors(m):
        both = zip(of(m, "one"), of(m, "two"), strict=True)
        return [a.manifold().to_matrix((a.gather() + b.gather()).detach() / 2) for a, b in both]

    assert not close(of_factors(moved), of_factors(model))


def test_every_layer_has_the_mean_of_its_points():
    model, weights = three(), torch.tensor([0.25, 0.75])
    both = zip(of(model, "one"), of(model, "two"), strict=True)
    points = [(a.manifold(), torch.stack([a.gather(), b.gather()]).detach()) for a, b in both]
    expected = [2.0 * space.to_matrix(space.mean(x, weights)) for space, x in points]
    assert of(model, "one")[0].scale == 2.0
    assert close(averaged(model, ["one", "two"], "mean", weights=[1, 3]), expected)
    assert not close(averaged(model, ["one", "two"], "mean"), expected)


def test_scales_are_part_of_the_products():
    model = three(mean={"lora_alpha": 1, "r": 4})
    assert of(model, "mean")[0].scale == 0.25
    assert close(averaged(model, ["one"], "mean"), products(model, "one"))


def test_frozen_and_inactive_adapters_are_averaged():
    model = three()
    expected = averaged(model, ["one", "two"], "mean")
    model.requires_grad_(False)  # as PEFT loads them
    assert len(adapter_pairs(model)) == 0
    assert close(averaged(model, ["one", "two"], "mean"), expected)
    model.set_adapter("two")
    before = model(X)
    average_lora_(model, ["one", "two"], "mean")
    assert torch.equal(model(X), before)
    model.set_adapter("mean")
    assert not torch.equal(model(X), before)


def test_half_precision_is_rounded_once():
    model = three()
    half = copy.deepcopy(model).to(torch.bfloat16)
    average_lora_(half, ["one", "two"], "mean")
    exact = averaged(half.double(), ["one", "two"], "mean")
    assert of(half, "mean")[0].gather().dtype == torch.float64  # the same model, widened
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(products(half, "mean"), exact, strict=True)]
    assert max(errors) < 1e-2


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (
            {"two": {"target_modules": {"0"}}},
            (["one", "two"], "mean"),
            r"adapter 'mean' has the layer base_model\.model\.2, which 'two' lacks",
        ),
        ({"two": {"r": 2}}, (["one", "two"], "mean"), r"differ in rank: 'two' has GL\(2\), 'mean' GL\(4\)"),
        ({}, (["one", "three"], "mean"), "no layer has an adapter 'three'"),
        ({}, ([], "mean"), "names lists no adapter"),
        ({}, (["one", "two"], "mean", "weights"), "2 points need as many weights"),
        ({}, (["one", "two"], "mean", "metric"), "metric must be one of inv, mix"),
    ],
)
def test_what_cannot_be_averaged_is_named_and_nothing_changes(options, arguments, message):
    model = three(**options)
    more = {"weights": {"weights": [1.0]}, "metric": {"metric": "flat"}}[arguments[2]] if arguments[2:] else {}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        average_lora_(model, *arguments[:2], **more)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_product_without_full_rank_is_refused_and_nothing_changes(value):
    model = three()
    of(model, "two")[1].G[0].tensor.data.fill_(value)
    before = copy.deepcopy(of(model, "mean")[0].gather())
    with pytest.raises(ValueError, match=r"adapter 'two' in base_model\.model\.2 lacks full rank"):
        average_lora_(model, ["one", "two"], "mean")
    assert torch.equal(of(model, "mean")[0].gather(), before)


def test_adapters_that_are_too_far_apart_are_named():
    """A path of square factors cannot change the sign of a determinant."""
    model = lora(adapter="one", targets=["2"], r=9)
    for name in ("two", "mean"):
        model.add_adapter(name, model.peft_config["one"])
    (one,), (two,) = of(model, "one"), of(model, "two")
    two.scatter_(one.gather().detach())
    two.G[0].tensor.data[0] *= -1
    with pytest.raises(ConvergenceError, match=r"no mean of the adapters of base_model\.model\.2 was found \(inv\)"):
        average_lora_(model, ["one", "two"], "mean")


def test_merged_adapters_and_those_without_values_are_refused():
    model = three()
    model.merge_adapter(["mean"])
    base = model.base_model.model[0].base_layer.weight.clone()
    with pytest.raises(ValueError, match="'mean' is merged into the base weights; unmerge it"):
        average_lora_(model, ["one", "two"], "mean")
    model.unmerge_adapter()
    assert not torch.equal(model.base_model.model[0].base_layer.weight, base)
    model.add_adapter("empty", model.peft_config["one"], low_cpu_mem_usage=True)
    for arguments in ((["one", "two"], "empty"), (["one", "empty"], "mean")):
        with pytest.raises(ValueError, match=r"adapter 'empty' of .* is on the meta device"):
            average_lora_(model, *arguments)
    assert len(canonicalize_lora_(model)) == 6
    model.base_model.model[0].scaling["one"] = 0.0
    with pytest.raises(ValueError, match=r"adapter 'one' of .* has the scale 0"):
        average_lora_(model, ["one", "two"], "mean")


def test_the_sign_of_a_scale_belongs_to_the_product():
    model = three()
    expected = averaged(model, ["one", "two"], "mean")
    for layer in (model.base_model.model[0], model.base_model.model[2]):
        layer.scaling["mean"] *= -0.5
    assert close(averaged(model, ["one", "two"], "mean"), expected)


MORE = {
    "plain": {},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["4"]},
    "tokens": {"target_modules": ["1", "4"], "trainable_token_indices": {"0": [1, 3]}},
}


def with_more(kind, alphas=(2, 2, 2)):
    """Adapters with all that may belong to one, and names of the tensors outside products."""
    torch.manual_seed(0)
    net = [nn.Embedding(9, 12), nn.Linear(12, 12), nn.Tanh(), nn.Flatten(), nn.Linear(36, 9), nn.BatchNorm1d(9)]
    options = {"r": 3, "target_modules": ["1"], "init_lora_weights": False, **MORE[kind]}
    if kind == "modules_to_save":
        options["modules_to_save"] = ["4", "5"]
    configs = [peft.LoraConfig(lora_alpha=alpha, **options) for alpha in alphas]
    model = peft.get_peft_model(nn.Sequential(*net), configs[0], adapter_name="one")
    for name, config in zip(("two", "mean"), configs[1:], strict=True):
        model.add_adapter(name, config)
    others = {}
    for key, t in [*model.named_parameters(), *model.named_buffers()]:
        words = key.split(".")
        found = next((n for n in ("one", "two", "mean") if n in words), None)
        product = "lora_" in key and key.endswith("weight") and "magnitude" not in key
        if found and t.is_floating_point() and not product and "trainable_tokens_original" not in key:
            t.data += torch.rand(t.shape)
            others.setdefault(key.replace(f".{found}", ""), {})[found] = t
    for a, b in zip(of(model, "one"), of(model, "two"), strict=True):
        for p, q in zip(a.G + a.H, b.G + b.H, strict=True):
            q.tensor.data = p.tensor.data + 0.1 * torch.randn(p.tensor.shape)
    return model.double(), others


IDS = torch.arange(24).reshape(8, 3) % 9


@pytest.mark.parametrize("kind", MORE)
def test_the_mean_of_an_adapter_with_itself_is_that_adapter(kind):
    """Biases, magnitudes and saved modules were left out without a word."""
    if kind == "tokens" and not hasattr(peft, "TrainableTokensConfig"):
        pytest.skip("this peft trains no tokens")
    model, others = with_more(kind)
    model.eval()
    assert bool(others) is (kind != "plain")
    model.set_adapter("one")
    outputs = model(IDS)
    model.set_adapter("mean")
    assert not torch.allclose(model(IDS), outputs, atol=1e-3)
    average_lora_(model, ["one", "one"], "mean")
    assert torch.allclose(model(IDS), outputs, atol=1e-10)
    average_lora_(model, ["one", "one", "one"], "mean", weights=[1, 2, 4])
    assert torch.allclose(model(IDS), outputs, atol=1e-10)


@pytest.mark.parametrize("kind", [k for k in MORE if k != "plain"])
def test_what_is_no_product_is_averaged_number_by_number(kind):
    if kind == "tokens" and not hasattr(peft, "TrainableTokensConfig"):
        pytest.skip("this peft trains no tokens")
    model, others = with_more(kind, alphas=(3, 6, 12))
    scales = dict(zip(("one", "two", "mean"), (1.0, 2.0, 4.0), strict=True))
    expected = {}
    for key, t in others.items():
        s = scales if "lora_B.bias" in key else dict.fromkeys(scales, 1.0)
        expected[key] = (0.25 * s["one"] * t["one"] + 0.75 * s["two"] * t["two"]) / s["mean"]
    average_lora_(model, ["one", "two"], "mean", weights=[1, 3])
    assert expected
    for key, t in others.items():
        assert torch.allclose(t["mean"], expected[key], atol=1e-12), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"two": {"lora_bias": True}}, r"'two' and 'mean' differ in .*\.0\.lora_B\.bias, \(20,\): one of them"),
        ({"mean": {"use_dora": True}}, r"'one' and 'mean' differ in .*lora_magnitude_vector\.weight"),
    ],
)
def test_what_one_adapter_lacks_is_named_and_nothing_changes(change, message):
    model = three(**change)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        average_lora_(model, ["one", "two"], "mean")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_numbers_that_have_no_mean_are_refused():
    model, _ = with_more("modules_to_save")
    model.base_model.model[5].modules_to_save["two"].num_batches_tracked += 1
    with pytest.raises(ValueError, match=r"num_batches_tracked has no mean: its numbers are of torch\.int64"):
        average_lora_(model, ["one", "two"], "mean")
    model.base_model.model[5].modules_to_save["one"].num_batches_tracked += 1
    average_lora_(model, ["one", "two"], "mean", weights=[1, 2])
    assert int(model.base_model.model[5].modules_to_save["mean"].num_batches_tracked) == 1


def test_a_rank_above_a_width_is_refused():
    model = lora(targets=("2",), r=10)
    with pytest.raises(ValueError, match=r"adapter 'default' of base_model\.model\.2 has a rank above a width"):
        average_lora_(model, ["default"], "default")


KINDS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_variants_of_lora(kind):
    model = three(**KINDS[kind])
    both = zip(of(model, "one"), of(model, "two"), strict=True)
    points = [(a.scale, a.manifold(), torch.stack([a.gather(), b.gather()]).detach()) for a, b in both]
    assert close(averaged(model, ["one", "two"], "mean"), [s * m.to_matrix(m.mean(x)) for s, m, x in points])


def test_embeddings_and_convolutions():
    torch.manual_seed(0)
    net = nn.ModuleDict({"words": nn.Embedding(9, 6), "conv": nn.Conv2d(3, 5, 3)}).double()
    config = peft.LoraConfig(r=2, target_modules=["words", "conv"], init_lora_weights=False)
    model = peft.get_peft_model(net, config, adapter_name="one").double()
    model.add_adapter("mean", config)
    assert len(of(model, "one")) == 2
    average_lora_(model, ["one"], "mean")
    assert close(products(model, "mean"), products(model, "one"))

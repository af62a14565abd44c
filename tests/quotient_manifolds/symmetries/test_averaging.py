"""The mean of adapters."""

import copy
import math

import peft
import pytest
import torch
from torch import nn

from quotient_manifolds import ConvergenceError, GLQuotientInv
from quotient_manifolds.optim import canonicalize_lora_
from quotient_manifolds.symmetries import adapter_pairs, apply_random_symmetry_, average_lora_

from ...training import X, lora


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

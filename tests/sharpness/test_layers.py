"""Shares of layers and heads in a worst direction."""

from dataclasses import replace

import pytest
import torch

import sharpness
from quotient_manifolds.symmetries import GL, PairStack, block, find_symmetric_pairs, pair
from sharpness.layers import LayerShare, LayerShares, _layer, layer_shares

from .. import networks


def by_hand(model, result, metric):
    """Shares of every pair and of what is left of every parameter, from the direction's tensors alone."""
    direction = result.direction(0)
    tensors = {p: direction.tensors[name] for name, p in model.named_parameters()}
    total, found = direction.norm**2, {}
    left = {name: (direction.tensors[name] / p.detach()).nan_to_num(0).square()
            for name, p in model.named_parameters()}  # fmt: skip
    names = {p: name for name, p in model.named_parameters()}
    for p in find_symmetric_pairs(model):
        one = PairStack([p])
        found[p.name] = float(one.manifold(metric).norm(one.gather().detach(), one.gather(tensors)) ** 2) / total
        mask = {p: torch.zeros(p.shape, dtype=torch.bool) for p in model.parameters()}
        one.mark_(mask)
        for q, taken in mask.items():
            left[names[q]] = left[names[q]].masked_fill(taken, 0)
    return found, {name: float(v.sum()) / total for name, v in left.items()}


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_shares_against_the_metric_pair_by_pair(metric):
    model, batch = networks.train(networks.vit(), networks.images()), networks.images()
    result = sharpness.evaluate(model, [batch], measure=f"geodesic-{metric}", rho=0.05, progress=False)
    found = result.by_layer()
    pairs, rest = by_hand(model, result, metric)
    assert sum(s.share for s in found) == pytest.approx(1)
    heads = {f"{s.layer}.attention {s.kind} head {s.head}": s.share for s in found if s.head is not None}
    assert heads == pytest.approx(pairs, rel=1e-6)
    assert len({round(v, 6) for v in heads.values()}) == len(heads)  # an exchange of heads would be seen
    layers = [name for name, m in model.named_modules() if m in set(networks.vit_layers(model))]
    for s in found:
        if s.kind == "weights" and s.layer in layers:
            mine = sum(v for name, v in rest.items() if name.startswith(f"{s.layer}."))
            assert s.share == pytest.approx(mine, rel=1e-6)
    order = list(dict.fromkeys(s.layer for s in found))
    assert order.index(layers[0]) < order.index(layers[1]) < order.index("classifier")


def test_a_measure_without_pairs_has_layers_only():
    model, batch = networks.bert(), networks.text()
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, progress=False)
    found = result.by_layer()
    assert {s.kind for s in found} == {"weights"}
    assert {"bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"} <= {s.layer for s in found}
    assert sum(s.share for s in found) == pytest.approx(1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_have_layers():
    peft = pytest.importorskip("peft")
    base = networks.bert()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    result = sharpness.evaluate(model, [networks.text()], rho=0.01, progress=False)
    lora = [s for s in result.by_layer() if s.kind == "lora"]
    assert [s.layer.rpartition("encoder.")[2] for s in lora] == ["layer.0", "layer.1"]


def test_several_batches_and_radii_and_the_table():
    model = networks.vit()
    batches = [networks.images(seed=s) for s in (0, 1)]
    result = sharpness.evaluate(model, batches, rho=[0.01, 0.05], progress=False)
    with pytest.raises(ValueError, match="several radii"):
        result.by_layer()
    found = result[0.05].by_layer()
    assert sum(s.share for s in found) == pytest.approx(1)
    single = sharpness.evaluate(model, batches[:1], rho=0.05, progress=False).by_layer()
    assert [s.share for s in found] != pytest.approx([s.share for s in single], rel=1e-3)
    text = str(found)
    assert text.splitlines()[0].split() == ["layer", "qk", "vo", "weights"]
    assert len(text.splitlines()) == 1 + len(found.by_layer())
    without = sharpness.evaluate(model, batches, rho=0.01, keep_directions=False, progress=False)
    with pytest.raises(KeyError, match="keep_directions=True"):
        without.by_layer()


def test_names_that_collide_make_no_difference():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4)))
    pairs = [
        pair([block(model[i], "weight", transpose=True)], [block(model[i + 1], "weight")], GL(4), name=name)
        for i, name in ((0, "pair"), (2, "3.weight"))
    ]
    batch = torch.randn(8, 4), torch.arange(8) % 4
    result = sharpness.evaluate(model, [batch], rho=0.1, pairs=pairs, progress=False)
    assert sum(s.share for s in result.by_layer()) == pytest.approx(1)
    assert sum(s.share for s in result.by_layer() if s.kind == "user") == pytest.approx(1)


def test_a_direction_without_length():
    model = torch.nn.Linear(4, 3)
    batch = torch.randn(6, 4), torch.arange(6) % 3
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, progress=False)
    direction = result.direction(0)
    still = replace(direction, norm=0.0, squares=dict.fromkeys(direction.squares, 0.0))
    assert layer_shares([direction, still]) == layer_shares([direction])
    with pytest.raises(ValueError, match="the loss did not rise at this radius"):
        layer_shares([still])
    average = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, statistic="average", progress=False)
    with pytest.raises(KeyError, match="no worst direction for statistic='average'"):
        average.by_layer()


def test_wrapped_and_bare_attention():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model, batch = networks.vit(), networks.images()
    names = [s.layer for s in sharpness.evaluate(model, [batch], rho=0.05, progress=False).by_layer()]
    wrapped = sharpness.evaluate(Wrapper(model), [batch], rho=0.05, progress=False)
    assert [s.layer for s in wrapped.by_layer()] == names
    tiny = networks.shake(networks.TinyAttention(8))
    layers = [s.layer for s in sharpness.evaluate(tiny, [networks.tokens()], rho=0.05, progress=False).by_layer()]
    assert (layers[0], layers[-1]) == ("attention", "head")


def test_a_layer_called_module_keeps_its_name():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(4, 3, bias=False)
            self.weight = torch.nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return self.module(x) + x @ self.weight.T

    batch = torch.randn(6, 4), torch.arange(6) % 3
    result = sharpness.evaluate(Model(), [batch], measure="adaptive", rho=0.1, progress=False)
    assert set(result.direction(0).tensors) == {"weight", "module.weight"}


def test_the_innermost_block_counts():
    assert _layer("a.0.b.1.weight", ["a.0", "a.0.b.1"]) == "a.0.b.1"
    assert _layer("a.0.c.weight", ["a.0", "a.0.b.1"]) == "a.0"


def test_the_table_of_shares():
    found = LayerShares([LayerShare("a.0", "qk", 0, 0.5), LayerShare("a.0", "qk", 1, 0.25),
                         LayerShare("head", "weights", None, 0.25)])  # fmt: skip
    assert found.by_layer() == {"a.0": {"qk": 0.75}, "head": {"weights": 0.25}}
    assert str(found).splitlines()[1:] == ["a.0     75.0%         ", "head             25.0%"]

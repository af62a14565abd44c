"""Shares of layers and heads in a worst direction."""

import pytest
import torch

import sharpness
from quotient_manifolds.symmetries import find, stack
from sharpness.layers import LayerShare, LayerShares

from . import networks


def by_hand(model, result, metric):
    """Shares of every pair and of what is left of every parameter, from the direction's tensors alone."""
    direction = result.direction(0)
    tensors = {p: direction.tensors[name] for name, p in model.named_parameters()}
    total, found = direction.norm**2, {}
    left = {name: (direction.tensors[name] / p.detach()).nan_to_num(0).square()
            for name, p in model.named_parameters()}  # fmt: skip
    names = {p: name for name, p in model.named_parameters()}
    for pair in find(model):
        one = stack([pair])
        found[pair.name] = float(one.manifold(metric).norm(one.gather().detach(), one.gather(tensors)) ** 2) / total
        mask = {p: torch.zeros(p.shape, dtype=torch.bool) for p in model.parameters()}
        one.mark_(mask)
        for p, taken in mask.items():
            left[names[p]] = left[names[p]].masked_fill(taken, 0)
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
    with pytest.raises(KeyError, match="several radii"):
        result.by_layer()
    found = result.by_layer(0.05)
    assert sum(s.share for s in found) == pytest.approx(1)
    single = sharpness.evaluate(model, batches[:1], rho=0.05, progress=False).by_layer()
    assert [s.share for s in found] != pytest.approx([s.share for s in single], rel=1e-3)
    text = str(found)
    assert text.splitlines()[0].split() == ["layer", "qk", "vo", "weights"]
    assert len(text.splitlines()) == 1 + len(found.by_layer())
    without = sharpness.evaluate(model, batches, rho=0.01, keep_directions=False, progress=False)
    with pytest.raises(KeyError, match="keep_directions=True"):
        without.by_layer()


def test_the_table_of_shares():
    found = LayerShares([LayerShare("a.0", "qk", 0, 0.5), LayerShare("a.0", "qk", 1, 0.25),
                         LayerShare("head", "weights", None, 0.25)])  # fmt: skip
    assert found.by_layer() == {"a.0": {"qk": 0.75}, "head": {"weights": 0.25}}
    assert str(found).splitlines()[1:] == ["a.0     75.0%         ", "head             25.0%"]

"""Outputs do not change along the orbits."""

import copy

import pytest
import torch
from torch.nn.utils import prune

from quotient_manifolds.symmetries import (
    GL,
    Projection,
    SymmetricPair,
    attention_pairs,
    block,
    check_coverage,
    find_symmetric_pairs,
    verify,
)
from quotient_manifolds.symmetries.registry import _HANDLERS

from ... import networks
from ...architectures import change, without_first_row

NETWORKS = {
    "vit": (networks.vit, lambda m: m(networks.images()[0]).logits),
    "bert": (networks.bert, lambda m: m(**networks.text()).logits),
    "encoder": (lambda: networks.shake(networks.Encoder()), lambda m: m(networks.tokens()[0])),
}


def wrong_heads(module, name):
    """Heads taken with stride, as a transposed layout would have them."""
    linear = networks.projections(module)
    for p in attention_pairs(name, heads=2, **dict(zip("qkvo", map(Projection, linear), strict=True))):
        if p.kind == "qk":
            i = p.head
            rows = slice(i, None, 2)
            G = (block(linear[0], "weight", rows, transpose=True), block(linear[0], "bias", rows))
            yield SymmetricPair(name, "qk", GL(8), G, p.H, head=p.head)
        else:
            yield p


def no_bias(module, name):
    projections = [Projection(linear, bias="absent") for linear in networks.projections(module)]
    return attention_pairs(name, heads=2, **dict(zip("qkvo", projections, strict=True)))


@pytest.mark.parametrize("handler", [wrong_heads, no_bias])
def test_a_wrong_handler_is_seen(handler, monkeypatch):
    model, run = networks.vit(), NETWORKS["vit"][1]
    cls = type(networks.vit_layers(model)[0].attention)
    monkeypatch.setitem(_HANDLERS, f"{cls.__module__}.{cls.__qualname__}", handler)
    assert change(model, run) > 1e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_do_not_change_along_the_orbits(name):
    make, run = NETWORKS[name]
    model = make()
    pairs = find_symmetric_pairs(model)
    layers, heads = (1, 2) if name == "encoder" else (2, 2)
    assert [p.kind for p in pairs] == ["qk", "vo"] * heads * layers
    assert change(model, run) < 1e-12
    assert check_coverage(model, lambda: run(model)) is not None


def test_verify_leaves_the_model_alone_and_sees_what_is_no_symmetry(monkeypatch):
    model, batch = networks.vit(), networks.images()
    before = copy.deepcopy(model.state_dict())
    model.train()
    assert verify(model, batch).ok
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    cls = "transformers.models.vit.modeling_vit.ViTAttention"
    right = _HANDLERS[cls]
    monkeypatch.setitem(_HANDLERS, cls, lambda m, n: [without_first_row(p) for p in right(m, n)])
    report = verify(model, batch)
    assert not report.ok
    assert "NOT A SYMMETRY" in str(report)


def test_one_backward_pass_sees_what_moves_see():
    model, batch = networks.vit(), networks.images()
    sound = verify(model, batch, moves=False)
    assert sound.ok
    assert sound.changes == {}
    assert len(sound.certificate.residuals) == len([p for p in find_symmetric_pairs(model) if p.group is not None])
    values = networks.projections(networks.vit_layers(model)[0].attention)[2]
    values.register_forward_hook(lambda module, x, y: y + 0.1 * y.tanh())
    by_gradient, by_moves = verify(model, batch, moves=False), verify(model, batch)
    moved = {n for n, change in by_moves.changes.items() if change > by_moves.tolerance}
    assert set(by_gradient.failures) == moved != set()
    assert "NOT A SYMMETRY" in str(by_gradient)


def test_a_forward_pass_that_autograd_cannot_follow_is_verified_by_moves():
    model, batch = networks.vit(), networks.images()
    whole = type(model).forward
    model.forward = lambda *a, **k: torch.no_grad()(whole)(model, *a, **k)
    found = verify(model, batch)
    assert found.ok
    assert found.certificate.residuals == {}
    assert found.changes


def test_a_pruned_model_is_verified():
    """Its weights have a graph after a pass, and tensors with a graph cannot be copied."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    prune.l1_unstructured(layer.linear1, "weight", 0.3)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(1, 3, 8)
    layer(x)
    assert verify(layer, x).ok


def test_inside_inference_mode_pairs_are_certified_too():
    """Without a gradient nothing was certified, and without moves that passed for a success."""
    model = networks.bert()
    with torch.inference_mode():
        batch = {name: t.clone() for name, t in networks.text().items()}
        found = verify(model, batch, moves=False)
    assert found.ok
    assert len(found.certificate.residuals) == len([p for p in find_symmetric_pairs(model) if p.group is not None])
    assert found.certificate.unreached == ()

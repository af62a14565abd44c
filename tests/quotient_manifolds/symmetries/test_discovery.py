"""From a model to its pairs; outputs do not change along the orbits."""

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import sharpness
from quotient_manifolds.symmetries import (
    GL,
    Heads,
    PairStack,
    Projection,
    SymmetricPair,
    attention_pairs,
    block,
    check_coverage,
    find_symmetric_pairs,
    pair,
    register_attention,
    registry,
    skip,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.pairs import CHANGES
from quotient_manifolds.symmetries.registry import _HANDLERS, ByClass
from quotient_manifolds.symmetries.stacks import PairList

from ... import networks
from ...architectures import change, transformers_model, without_first_row
from .test_registry import Mystery


def test_pairs_that_share_a_block_are_merged():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 4)
            self.v, self.o = nn.Linear(6, 4), nn.Linear(8, 6)

    @register_attention(Grouped)
    def grouped(module, name):
        q, k, v, o = map(Projection, (module.q, module.k, module.v, module.o))
        return attention_pairs(name, Heads(4, 2), q=q, k=k, v=v, o=o)

    model = nn.Sequential(Grouped(), Grouped())
    model[1] = model[0]  # shared: named once by named_modules
    pairs = find_symmetric_pairs(model)
    assert [(p.kind, p.n, p.m) for p in pairs] == [("qk", 14, 7), ("vo", 7, 12)] * 2
    assert sorted(p.name for p in pairs) == ["0 qk head 0", "0 qk head 2", "0 vo head 0", "0 vo head 2"]


def test_frozen_parameters_are_listed_with_the_reason():
    model = networks.bert()
    model.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    pairs = find_symmetric_pairs(model)
    frozen = [p for p in pairs if p.group is None]
    assert [p.name for p in frozen] == [f"bert.encoder.layer.0.attention qk head {i}" for i in range(2)]
    assert "frozen: weight of Linear" in frozen[0].reason
    assert len(stacks(pairs)) == 2
    with pytest.raises(ValueError, match="no symmetry"):
        PairStack(frozen)


def test_print_groups_by_layer():
    lines = str(find_symmetric_pairs(networks.vit(layers=24, heads=4))).splitlines()
    assert len(lines) == 48
    path, *rest = lines[0].split()
    assert path in ("vit.layers.0.attention", "vit.encoder.layer.0.attention")  # the latter before transformers 5.9
    assert rest == ["qk", "4", "×", "GL(4),", "17+17", "rows"]
    assert str(PairList()) == "no symmetric pairs"


def test_find_is_fast_on_a_large_model():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=8)
    with torch.device("meta"):
        model = ViTModel(config)
    start = time.perf_counter()
    assert len(find_symmetric_pairs(model)) == 24 * 16 * 2
    # Measured at 0.06 s: the bound only catches a change of order.
    assert time.perf_counter() - start < 2


def test_a_skipped_class_counts_without_symmetry(monkeypatch):
    monkeypatch.setattr(registry, "_HANDLERS", ByClass(_HANDLERS))
    skip(Mystery)
    model = Mystery()
    assert [p.reason for p in find_symmetric_pairs(model)] == ["skipped on request"]
    x = torch.randn(2, 3, 4)
    check_coverage(model, lambda: model(x))
    batch = [(x, x)]

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    values = [float(sharpness.evaluate(model, batch, loss, measure=m, rho=0.1)) for m in ("geodesic-inv", "adaptive")]
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_key_bias_can_be_quotiented_out():
    model, batch = networks.bert(), networks.text()
    keep, drop = find_symmetric_pairs(model), find_symmetric_pairs(model, key_bias="drop")
    assert next(p.m for p in keep if p.kind == "qk") == 17
    assert next(p.m for p in drop if p.kind == "qk") == 16
    assert max(verify(model, batch).changes.values()) < 1e-9
    shifted = copy.deepcopy(model)
    with torch.no_grad():
        for layer in shifted.bert.encoder.layer:
            layer.attention.self.key.bias.add_(torch.randn(16))
    torch.testing.assert_close(model(**batch).loss, shifted(**batch).loss)
    for key_bias, moves in (("keep", True), ("drop", False)):
        one, two = (
            float(sharpness.evaluate(m, [batch], rho=0.1, steps=5, pairs=find_symmetric_pairs(m, key_bias=key_bias)))
            for m in (model, shifted)
        )
        assert (abs(one - two) > 1e-3 * one) == moves
        if not moves:
            assert abs(one - two) < 1e-8 * one
    with pytest.raises(ValueError, match="key_bias must be"):
        find_symmetric_pairs(model, key_bias="forget")


def tied(model, *, overlap):
    """Let the first layer's queries and keys be the same weights, or lie half over one another."""
    q, k, *_ = networks.projections(networks.vit_layers(model)[0].attention)
    if overlap:
        memory = torch.randn(24, 16)
        q.weight.data, k.weight.data = memory[:16], memory[8:]
    else:
        q.weight = k.weight
    return model


@pytest.mark.parametrize("overlap", [False, True])
def test_shared_and_overlapping_memory_is_refused_layer_by_layer(overlap):
    model = tied(networks.vit(), overlap=overlap)
    found = find_symmetric_pairs(model)
    refused = [p for p in found if p.group is None]
    assert {(p.kind, p.module) for p in refused} == {("qk", refused[0].module)}
    assert {p.reason.split(";")[0].split(" (")[0] for p in refused} == {
        "its weights are used in another place too" if overlap else "both factors contain the same weights"
    }
    assert len(found) - len(refused) == 3 * len(refused)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_keys_that_are_the_values_are_refused(name):
    """Under RoPE moves changed the outputs by half; without it one pair would have a block on both sides."""
    model, batch = transformers_model(name, "eager")
    for layer in model.layers if name == "llama" else [entry.attention.self for entry in model.encoder.layer]:
        attention = getattr(layer, "self_attn", layer)
        key, value = ("k_proj", "v_proj") if name == "llama" else ("key", "value")
        getattr(attention, value).weight = getattr(attention, key).weight
    found = find_symmetric_pairs(model)
    assert all(p.group is None for p in found)
    assert verify(model, batch).ok


@pytest.mark.parametrize("kind", ["vo", "qk"])
def test_a_batch_certifies_what_the_names_of_classes_claim(kind):
    model, batch = networks.vit(), networks.images()
    attention = networks.vit_layers(model)[0].attention
    networks.projections(attention)["qkvo".index(kind[0])].register_forward_hook(lambda module, x, y: y.relu())
    claimed, found = find_symmetric_pairs(model), find_symmetric_pairs(model, batch=batch)
    assert all(p.group is not None for p in claimed)
    assert [p.name for p in found] == [p.name for p in claimed]
    assert {(p.module, p.kind): p.reason for p in found if p.group is None} == {(found[0].module, kind): CHANGES}
    assert len(find_symmetric_pairs(model, batch=batch, include_frozen=True)) == len(found)


def test_pairs_of_ones_own_are_certified_with_a_batch():
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4))
    G = [block(model[0], "weight", transpose=True), block(model[0], "bias")]
    wrong = pair(G, [block(model[2], "weight")], GL(3), name="layers")
    right = pair(G, [block(model[2], "weight")], GL(3, diagonal=True, positive=True), name="layers")
    x = torch.randn(8, 5)
    assert [p.reason for p in find_symmetric_pairs(model, extra=[wrong], batch=x)] == [CHANGES]
    assert find_symmetric_pairs(model, extra=[right], batch=x) == [right]
    assert [p.name for p in verify(model, x, extra=[wrong]).failures] == ["layers"]


class Residual(nn.Module):
    """Attention whose values the next layer adds to its own; it hands them over in an object, not as a tensor."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, before=None):
        v = self.v_proj(x)
        out = nn.functional.scaled_dot_product_attention(
            self.q_proj(x), self.k_proj(x), v if before is None else v + before.values
        )
        return self.o_proj(out), SimpleNamespace(values=v)


class Residuals(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = Residual(), Residual(), Residual()

    def forward(self, x):
        y, before = self.one(x)
        return self.three(self.two(x + y, before)[0])[0]


def test_what_leaves_a_module_by_another_way_counts():
    """Alone, each layer keeps its outputs when its values move; the model does not."""
    found = find_symmetric_pairs(Residuals(), batch=torch.randn(2, 5, 4))
    reasons = {(p.module, p.kind): p.reason for p in found}
    assert reasons[("one", "vo")] == CHANGES
    assert {key for key, reason in reasons.items() if not reason} >= {("one", "qk"), ("two", "qk")}


class SinglePrecision(nn.Module):
    """A kernel that takes nothing else, as torch's grouped products of experts."""

    def __init__(self, bent, error=RuntimeError):
        super().__init__()
        self.error = error
        self.attention, self.expert = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)
        self.bent = bent

    def forward(self, x):
        if x.dtype != torch.float32:
            raise self.error(f"expected Float32, got {x.dtype}")
        if self.bent:
            self.attention.out_proj.weight.data.clamp_(-0.3, 0.3)
        return self.expert(self.attention(x, x, x, need_weights=False)[0])


def test_a_kernel_without_float64_is_certified_in_float32():
    x = torch.randn(2, 5, 8, dtype=torch.float32)
    sound, bent = (
        find_symmetric_pairs(SinglePrecision(b, error).float(), batch=x)
        for b, error in ((False, RuntimeError), (True, ValueError))
    )
    assert [p.group is None for p in sound] == [False] * 4
    assert [p.reason for p in bent if p.kind == "vo"] == [CHANGES] * 2


def test_a_model_that_cannot_be_copied_or_moved_has_a_reason():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.key = nn.MultiheadAttention(8, 2, batch_first=True), threading.Lock()

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model, x = Once(), torch.randn(2, 5, 8)
    found = find_symmetric_pairs(model, batch=x)
    assert {p.reason.split(":")[0] for p in found} == {"could not be examined in the whole model"}


@pytest.mark.parametrize("computed", ["in_proj_weight", "out_proj.weight"])
def test_attention_with_a_computed_weight_is_known_by_its_own_class(computed):
    """torch gives a parametrised module another class, and then it was overlooked."""
    layer = nn.MultiheadAttention(8, 2)
    owner, _, name = f"self.{computed}".rpartition(".")
    nn.utils.parametrizations.weight_norm(layer if owner == "self" else layer.out_proj, name)
    found = [p for p in find_symmetric_pairs(layer) if p.group is None]
    assert found
    assert all("computed" in p.reason or "parametrised" in p.reason for p in found)


NETWORKS = {
    "vit": (networks.vit, lambda m: m(networks.images()[0]).logits),
    "bert": (networks.bert, lambda m: m(**networks.text()).logits),
    "encoder": (lambda: networks.shake(networks.Encoder()), lambda m: m(networks.tokens()[0])),
}


def wrong_heads(module, name):
    """Heads taken with stride, as a transposed layout would have them."""
    linear = networks.projections(module)
    for p in attention_pairs(name, Heads(2), **dict(zip("qkvo", map(Projection, linear), strict=True))):
        if p.kind == "qk":
            i = p.head
            rows = slice(i, None, 2)
            G = (block(linear[0], "weight", rows, transpose=True), block(linear[0], "bias", rows))
            yield SymmetricPair(name, "qk", GL(8), G, p.H, head=p.head)
        else:
            yield p


def no_bias(module, name):
    projections = [Projection(linear, bias="absent") for linear in networks.projections(module)]
    return attention_pairs(name, Heads(2), **dict(zip("qkvo", projections, strict=True)))


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
    assert len(sound.residuals) == len([p for p in find_symmetric_pairs(model) if p.group is not None])
    values = networks.projections(networks.vit_layers(model)[0].attention)[2]
    values.register_forward_hook(lambda module, x, y: y + 0.1 * y.tanh())
    by_gradient, by_moves = verify(model, batch, moves=False), verify(model, batch)
    moved = {p.name for p, change in by_moves.changes.items() if change > 1e-9}
    assert {p.name for p in by_gradient.failures} == moved != set()
    assert "NOT A SYMMETRY" in str(by_gradient)


def test_a_forward_pass_that_autograd_cannot_follow_is_verified_by_moves():
    model, batch = networks.vit(), networks.images()
    whole = type(model).forward
    model.forward = lambda *a, **k: torch.no_grad()(whole)(model, *a, **k)
    found = verify(model, batch)
    assert found.ok
    assert found.residuals == {}
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
    assert len(found.residuals) == len([p for p in find_symmetric_pairs(model) if p.group is not None])
    assert found.unreached == ()

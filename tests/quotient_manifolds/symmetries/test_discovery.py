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
    Cause,
    Heads,
    PairStack,
    Projection,
    SymmetricPair,
    Symmetries,
    attention_pairs,
    check_coverage,
    find,
    move_,
    pair,
    register_attention,
    skip,
    slot,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.attention import HANDLERS
from quotient_manifolds.weights import ByClass, weights_of
from tests.quotient_manifolds.symmetries.test_handlers import Mystery
from tests.support import networks
from tests.support.architectures import change, transformers_model, without_first_row


def test_pairs_that_share_a_slot_are_merged():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 4)
            self.v, self.o = nn.Linear(6, 4), nn.Linear(8, 6)

    @register_attention(Grouped)
    def grouped(module):
        return attention_pairs(Heads(4, 2), **{name: Projection(module, name) for name in "qkvo"})

    model = nn.Sequential(Grouped(), Grouped())
    model[1] = model[0]  # shared: named once by named_modules
    pairs = find(model).pairs
    assert [(p.kind, p.n, p.m) for p in pairs] == [("qk", 14, 7), ("vo", 7, 12)] * 2
    assert sorted(p.name for p in pairs) == ["0 qk head 0", "0 qk head 2", "0 vo head 0", "0 vo head 2"]


def test_frozen_parameters_are_listed_with_the_reason():
    model = networks.bert()
    model.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    found = find(model).restricted(name for name, p in weights_of(model).items() if p.requires_grad)
    assert [p.name for p in found.refused] == [f"bert.encoder.layer.0.attention qk head {i}" for i in range(2)]
    assert {p.cause for p in found.refused} == {Cause.FROZEN}
    assert found.refused[0].reason == "frozen: bert.encoder.layer.0.attention.self.query.weight"
    assert len(stacks(found.pairs, weights_of(model))) == 2
    with pytest.raises(TypeError, match=r"SymmetricPair objects, as in find\(model\).pairs, got Refusal"):
        PairStack(found.refused)


def test_print_groups_by_layer():
    lines = str(find(networks.vit(layers=24, heads=4))).splitlines()
    assert len(lines) == 48
    path, *rest = lines[0].split()
    assert path in ("vit.layers.0.attention", "vit.encoder.layer.0.attention")  # the latter before transformers 5.9
    assert rest == ["qk", "4", "×", "GL(4),", "17+17", "rows"]
    assert str(Symmetries()) == "no symmetric pairs"


def test_find_is_fast_on_a_large_model():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=8)
    with torch.device("meta"):
        model = ViTModel(config)
    start = time.perf_counter()
    assert len(find(model).pairs) == 24 * 16 * 2
    # Measured at 0.06 s: the bound only catches a change of order.
    assert time.perf_counter() - start < 2


def test_a_skipped_class_counts_without_symmetry(monkeypatch):
    monkeypatch.setattr(HANDLERS, "of", (handlers := ByClass(HANDLERS)).of)
    monkeypatch.setattr(HANDLERS, "register", handlers.register)
    skip(Mystery)
    model = Mystery()
    assert [p.reason for p in find(model).refused] == ["skipped on request"]
    assert find(model).pairs == ()
    x = torch.randn(2, 3, 4)
    check_coverage(model, lambda: model(x))
    batch = [(x, x)]

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    values = [float(sharpness.evaluate(model, batch, loss, measure=m, rho=0.1)) for m in ("geodesic-inv", "adaptive")]
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_key_bias_can_be_quotiented_out():
    model, batch = networks.bert(), networks.text()
    keep, drop = find(model), find(model).without_null()
    assert next(p.m for p in keep.pairs if p.kind == "qk") == 17
    assert next(p.m for p in drop.pairs if p.kind == "qk") == 16
    assert max(verify(model, batch).changes.values()) < 1e-9
    shifted = copy.deepcopy(model)
    with torch.no_grad():
        for layer in shifted.bert.encoder.layer:
            layer.attention.self.key.bias.add_(torch.randn(16))
    torch.testing.assert_close(model(**batch).loss, shifted(**batch).loss)
    for found, moves in ((keep, True), (drop, False)):
        one, two = (float(sharpness.evaluate(m, [batch], rho=0.1, steps=5, symmetries=found)) for m in (model, shifted))
        assert (abs(one - two) > 1e-3 * one) == moves
        if not moves:
            assert abs(one - two) < 1e-8 * one


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
    found = find(model)
    assert {(p.kind, p.module) for p in found.refused} == {("qk", found.refused[0].module)}
    assert {p.cause for p in found.refused} == {Cause.SHARED if overlap else Cause.TIED}
    assert {p.reason.split(";")[0].split(" (")[0] for p in found.refused} == {
        "its weights are used in another place too" if overlap else "both factors contain the same weights"
    }
    assert len(found.pairs) == 3 * len(found.refused)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_keys_that_are_the_values_are_refused(name):
    """Under RoPE moves changed the outputs by half; without it one pair would have a slot on both sides."""
    model, batch = transformers_model(name, "eager")
    for layer in model.layers if name == "llama" else [entry.attention.self for entry in model.encoder.layer]:
        attention = getattr(layer, "self_attn", layer)
        key, value = ("k_proj", "v_proj") if name == "llama" else ("key", "value")
        getattr(attention, value).weight = getattr(attention, key).weight
    found = find(model)
    assert found.pairs == ()
    assert found.refused
    assert verify(model, batch).ok


@pytest.mark.parametrize("kind", ["vo", "qk"])
def test_a_batch_certifies_what_the_names_of_classes_claim(kind):
    model, batch = networks.vit(), networks.images()
    attention = networks.vit_layers(model)[0].attention
    networks.projections(attention)["qkvo".index(kind[0])].register_forward_hook(lambda module, x, y: y.relu())
    claimed, found = find(model), find(model, batch)
    assert claimed.refused == ()
    module = claimed.pairs[0].module
    assert found.pairs == tuple(p for p in claimed.pairs if (p.module, p.kind) != (module, kind))
    wrong = [p for p in claimed.pairs if p not in found.pairs]
    assert [(p.name, p.slots, p.cause) for p in found.refused] == [(p.name, p.slots, Cause.CHANGES) for p in wrong]


def test_pairs_of_ones_own_are_certified_with_a_batch():
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4))
    G = [slot(model, "0.weight", transpose=True), slot(model, "0.bias")]
    wrong = pair(G, [slot(model, "2.weight")], GL(3), name="layers")
    right = pair(G, [slot(model, "2.weight")], GL(3, diagonal=True, positive=True), name="layers")
    x = torch.randn(8, 5)
    assert verify(model, x, find(model, x).adding(right)).ok
    assert [p.name for p in verify(model, x, find(model, x).adding(wrong)).failures] == ["layers"]


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
    found = find(Residuals(), torch.randn(2, 5, 4))
    assert {(p.module, p.kind): p.cause for p in found.refused}[("one", "vo")] is Cause.CHANGES
    assert {(p.module, p.kind) for p in found.pairs} >= {("one", "qk"), ("two", "qk")}


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
        find(SinglePrecision(b, error).float(), x) for b, error in ((False, RuntimeError), (True, ValueError))
    )
    assert (len(sound.pairs), sound.refused) == (4, ())
    assert [p.cause for p in bent.refused if p.kind == "vo"] == [Cause.CHANGES] * 2
    assert not any(p.kind == "vo" for p in bent.pairs)


def test_a_model_that_cannot_be_copied_or_moved_has_a_reason():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.key = nn.MultiheadAttention(8, 2, batch_first=True), threading.Lock()

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model, x = Once(), torch.randn(2, 5, 8)
    found = find(model, x)
    assert found.pairs == ()
    assert {p.reason.split(":")[0] for p in found.refused} == {"could not be examined in the whole model"}


@pytest.mark.parametrize("computed", ["in_proj_weight", "out_proj.weight"])
def test_attention_with_a_computed_weight_is_known_by_its_own_class(computed):
    """torch gives a parametrised module another class, and then it was overlooked."""
    layer = nn.MultiheadAttention(8, 2)
    owner, _, name = f"self.{computed}".rpartition(".")
    nn.utils.parametrizations.weight_norm(layer if owner == "self" else layer.out_proj, name)
    refused = find(layer).refused
    assert refused
    assert all("computed" in p.reason or "parametrised" in p.reason for p in refused)


NETWORKS = {
    "vit": (networks.vit, lambda m: m(networks.images()[0]).logits),
    "bert": (networks.bert, lambda m: m(**networks.text()).logits),
    "encoder": (lambda: networks.shake(networks.Encoder()), lambda m: m(networks.tokens()[0])),
}


def paths(module):
    """Where the projections of a ViT's attention layer are in it."""
    names = {m: name for name, m in module.named_modules()}
    return dict(zip("qkvo", map(names.get, networks.projections(module)), strict=True))


def wrong_heads(module):
    """Heads taken with stride, as a transposed layout would have them."""
    where = paths(module)
    for p in attention_pairs(Heads(2), **{c: Projection(module, path) for c, path in where.items()}):
        if p.kind == "qk":
            rows = slice(p.head, None, 2)
            queries = slot(module, f"{where['q']}.weight", rows, transpose=True)
            yield SymmetricPair("", "qk", GL(8), (queries, slot(module, f"{where['q']}.bias", rows)), p.H, head=p.head)
        else:
            yield p


def no_bias(module):
    return attention_pairs(
        Heads(2), **{c: Projection(module, path, bias="absent") for c, path in paths(module).items()}
    )


@pytest.mark.parametrize("handler", [wrong_heads, no_bias])
def test_a_wrong_handler_is_seen(handler, monkeypatch):
    model, run = networks.vit(), NETWORKS["vit"][1]
    cls = type(networks.vit_layers(model)[0].attention)
    monkeypatch.setitem(HANDLERS, f"{cls.__module__}.{cls.__qualname__}", handler)
    assert change(model, run) > 1e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_do_not_change_along_the_orbits(name):
    make, run = NETWORKS[name]
    model = make()
    pairs = find(model).pairs
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
    right = HANDLERS[cls]
    monkeypatch.setitem(HANDLERS, cls, lambda m: [without_first_row(p) for p in right(m)])
    report = verify(model, batch)
    assert not report.ok
    assert "NOT A SYMMETRY" in str(report)


def test_one_backward_pass_sees_what_moves_see():
    model, batch = networks.vit(), networks.images()
    sound = verify(model, batch, moves=False)
    assert sound.ok
    assert sound.changes == {}
    assert len(sound.residuals) == len(find(model).pairs)
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


def test_a_seed_is_a_number():
    """Else a certificate of nothing passed for a success, without moves."""
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 3, 8)
    for use in (lambda: verify(model, x, seed=None, moves=False), lambda: move_(model, seed={})):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            use()


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
    assert len(found.residuals) == len(find(model).pairs)
    assert found.unreached == ()

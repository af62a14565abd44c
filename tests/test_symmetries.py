import copy
import time

import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.symmetries import (
    Group,
    Projection,
    SymmetricPair,
    UnknownAttentionError,
    apply_random_symmetry_,
    attention_pairs,
    block,
    check_coverage,
    find_symmetric_pairs,
    pair,
    register_attention,
    registry,
    skip,
    stack,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.registry import _ADAPTERS, PairList

from . import networks

NETWORKS = {
    "vit": (networks.vit, lambda m: m(networks.images()[0]).logits),
    "bert": (networks.bert, lambda m: m(**networks.text()).logits),
    "encoder": (lambda: networks.shake(networks.Encoder()), lambda m: m(networks.tokens()[0])),
}


def change(model, run, condition=10.0):
    """Relative change of the outputs when every pair moves along its orbit."""
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, condition, seed=1) == sum(
        p.group is not None for p in find_symmetric_pairs(model)
    )
    with torch.no_grad():
        before, after = run(model), run(twin)
    moved = max((p - q).abs().max() for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert moved > 0.1
    return float((after - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_do_not_change_along_the_orbits(name):
    make, run = NETWORKS[name]
    model = make()
    pairs = find_symmetric_pairs(model)
    layers, heads = (1, 2) if name == "encoder" else (2, 2)
    assert [p.kind for p in pairs] == ["qk", "vo"] * heads * layers
    assert change(model, run) < 1e-12
    assert check_coverage(model, lambda: run(model)) is not None


def wrong_heads(module, name):
    """Heads taken with stride, as a transposed layout would have them."""
    linear = networks.projections(module)
    for p in attention_pairs(name, heads=2, **dict(zip("qkvo", map(Projection, linear), strict=True))):
        if p.kind == "qk":
            i = int(p.name[-1])
            rows = slice(i, None, 2)
            G = (block(linear[0], "weight", rows, transpose=True), block(linear[0], "bias", rows))
            yield SymmetricPair(p.name, "qk", Group(8), G, p.H)
        else:
            yield p


def no_bias(module, name):
    projections = [Projection(linear, bias="absent") for linear in networks.projections(module)]
    return attention_pairs(name, heads=2, **dict(zip("qkvo", projections, strict=True)))


@pytest.mark.parametrize("adapter", [wrong_heads, no_bias])
def test_a_wrong_adapter_is_seen(adapter, monkeypatch):
    model, run = networks.vit(), NETWORKS["vit"][1]
    cls = type(networks.vit_layers(model)[0].attention)
    monkeypatch.setitem(_ADAPTERS, f"{cls.__module__}.{cls.__qualname__}", adapter)
    assert change(model, run) > 1e-2


@pytest.mark.parametrize(
    "options",
    [{"kdim": 6, "vdim": 7}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=lambda o: next(iter(o)),
)
def test_variants_of_multihead_attention(options):
    layer = networks.shake(nn.MultiheadAttention(8, 2, batch_first=True, **options))
    k, v = torch.randn(3, 5, options.get("kdim", 8)), torch.randn(3, 5, options.get("vdim", 8))
    q = torch.randn(3, 4, 8)
    assert change(layer, lambda m: m(q, k, v)[0]) < 1e-12


def test_gather_and_scatter_are_inverse_and_differentiable():
    model = networks.vit()
    before = copy.deepcopy(model.state_dict())
    for s in stacks(find_symmetric_pairs(model)):
        x = s.gather()
        assert x.shape == (4, s.n + s.m, 8)
        assert x.requires_grad
        s.scatter_(torch.zeros_like(x))
        assert s.gather().abs().max() == 0
        s.scatter_(x)
        for p, one in zip(s.pairs, x, strict=True):
            torch.testing.assert_close(p.gather(), one)
            assert p.manifold("mix").to_matrix(one).shape == (p.n, p.m)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    # The gradient of a stack is the stack of gradients.
    s = stacks(find_symmetric_pairs(model))[0]
    (s.gather() ** 2).sum().backward()
    grads = {p: p.grad for p in s.parameters()}
    torch.testing.assert_close(s.gather(grads), 2 * s.gather().detach())


def test_scatter_into_a_strided_parameter():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).T)
    assert not layer.weight.is_contiguous()
    pair = SymmetricPair("p", "qk", Group(2), (block(layer, "weight", slice(0, 2), transpose=True),),
                         (block(layer, "weight", slice(2, 4), transpose=True),))  # fmt: skip
    expected = layer.weight.detach().clone()
    x = pair.gather().detach()
    torch.testing.assert_close(x, torch.cat([expected[:2].T, expected[2:].T]))
    pair.scatter_(2 * x)
    torch.testing.assert_close(layer.weight.detach(), 2 * expected)


def test_rotary_blocks_read_planes_as_complex_numbers():
    layer = nn.Linear(3, 8, bias=False)
    for pairing, planes in (("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])):
        q = Projection(layer).input_blocks(1, 4, 0, 4, pairing)
        k = Projection(layer).input_blocks(0, 4, 0, 4, pairing)
        pair = SymmetricPair("p", "qk", Group(2, "scalars", "complex"), q, k)
        x = pair.gather()
        assert x.shape == (2, 6, 1)
        for f, (a, b) in enumerate(planes):
            torch.testing.assert_close(x[f, :3, 0], torch.complex(layer.weight[4 + a], layer.weight[4 + b]))
        before = layer.weight.detach().clone()
        pair.scatter_(x.detach())
        assert torch.equal(layer.weight, before)
        # A complex scalar on G and its inverse conjugate on H leave every product g h̄ as it is.
        c = torch.randn(2, 1, 1, dtype=torch.complex128)
        pair.scatter_(pair.manifold().act(x.detach(), c))
        torch.testing.assert_close(pair.manifold().to_matrix(pair.gather()), pair.manifold().to_matrix(x))
        with torch.no_grad():
            layer.weight.copy_(before)


def test_pairs_that_share_a_block_are_merged():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 4)
            self.v, self.o = nn.Linear(6, 4), nn.Linear(8, 6)

    @register_attention(Grouped)
    def grouped(module, name):
        q, k, v, o = map(Projection, (module.q, module.k, module.v, module.o))
        return attention_pairs(name, heads=4, kv_heads=2, q=q, k=k, v=v, o=o)

    model = nn.Sequential(Grouped(), Grouped())
    model[1] = model[0]  # shared: named once by named_modules
    pairs = find_symmetric_pairs(model)
    assert [(p.kind, p.n, p.m) for p in pairs] == [("qk", 14, 7), ("vo", 7, 12)] * 2
    assert sorted(p.name for p in pairs) == ["0 qk head 0", "0 qk head 2", "0 vo head 0", "0 vo head 2"]


def test_tied_and_doubled_blocks_are_errors():
    layer = nn.Linear(4, 4)
    q = Projection(layer).input_blocks(0, 2, 0, 2)
    with pytest.raises(ValueError, match="stands in G and in H"):
        SymmetricPair("tied", "qk", Group(2), q, q)
    k = Projection(layer).input_blocks(1, 2, 0, 2)
    pair = SymmetricPair("twice", "qk", Group(2), q, k)
    with pytest.raises(ValueError, match="belongs to pair"):
        find_symmetric_pairs(layer, extra=[pair, pair])
    assert find_symmetric_pairs(layer, extra=[pair])[0] == pair
    with pytest.raises(ValueError, match="acts on"):
        SymmetricPair("narrow", "qk", Group(3), q, k)
    with pytest.raises(ValueError, match="give the reason"):
        SymmetricPair("nothing", "qk", None)


def test_frozen_parameters_are_listed_with_the_reason():
    model = networks.bert()
    model.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    pairs = find_symmetric_pairs(model)
    frozen = [p for p in pairs if p.group is None]
    assert [p.name for p in frozen] == [f"bert.encoder.layer.0.attention qk head {i}" for i in range(2)]
    assert "frozen: weight of Linear" in frozen[0].reason
    assert len(stacks(pairs)) == 2
    with pytest.raises(ValueError, match="no symmetry"):
        stack(frozen)


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


class Mystery(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class MysteryFused(Mystery):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


class MysterySubclass(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize("module", [Mystery(), MysteryFused(), MysterySubclass(4, 2)], ids=lambda m: type(m).__name__)
def test_unknown_attention_is_named(module):
    model = nn.Sequential(nn.Linear(4, 4), module.double())
    with pytest.raises(
        UnknownAttentionError, match=rf"module '1' of class .*{type(module).__name__}.*register"
    ) as caught:
        check_coverage(model, lambda: model(torch.randn(2, 3, 4)))
    assert caught.value.path == "1"
    assert caught.value.cls is type(module)


def test_a_softmax_over_class_scores_is_no_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    check_coverage(model, lambda: model(torch.randn(2, 4)))


def test_a_block_follows_a_replaced_parameter_and_notices_another_shape():
    layer = nn.Linear(4, 4)
    pair = SymmetricPair("p", "qk", Group(2), Projection(layer).input_blocks(0, 2, 0, 2),
                         Projection(layer).input_blocks(1, 2, 0, 2))  # fmt: skip
    layer.weight = nn.Parameter(torch.ones(4, 4))
    assert pair.gather()[:4].eq(1).all()
    layer.weight = nn.Parameter(torch.ones(6, 4))
    with pytest.raises(ValueError, match="call find"):
        pair.gather()


class TwoLinear(nn.Module):
    """x ↦ W₂(W₁x + b₁): the paper's Example A.2."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 4)

    def forward(self, x):
        return self.second(self.first(x))


class Diagonal(nn.Module):
    """x ↦ (u ⊙ v)ᵀ x."""

    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        return x @ (self.u * self.v)


def own_pair(model):
    if isinstance(model, Diagonal):
        return pair([block(model, "u")], [block(model, "v")], Group(6, "scalars"), name="diagonal")
    G = [block(model.first, "weight", transpose=True), block(model.first, "bias")]
    return pair(G, [block(model.second, "weight")], Group(3), name="linear")


@pytest.mark.parametrize("cls", [TwoLinear, Diagonal])
@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix"])
def test_pairs_of_ones_own(cls, measure):
    model = cls()
    x = torch.randn(20, 5 if cls is TwoLinear else 6)
    y = torch.randn_like(model(x).detach())
    p = own_pair(model)
    assert verify(model, x, extra=[p]).ok
    wrong = pair(p.G[:1], p.H, p.group, name="wrong") if cls is TwoLinear else None
    if wrong is not None:
        assert verify(model, x, extra=[wrong]).failures == ["wrong"]
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 30.0, pairs=[own_pair(twin)]) == 1
    torch.testing.assert_close(twin(x), model(x))

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def value(model, **options):
        return sharpness.evaluate(model, [(x, y)], loss, rho=0.05, **options)

    one = value(model, measure=measure, pairs=find_symmetric_pairs(model, extra=[own_pair(model)]))
    two = value(twin, measure=measure, pairs=find_symmetric_pairs(twin, extra=[own_pair(twin)]))
    assert abs(one.value - two.value) < 1e-8 * one.value
    with sharpness.perturbed(model, one.direction(0)):
        assert float(loss(model, (x, y)).detach()) == pytest.approx(one.per_batch[0].worst_loss, rel=1e-9)
    plain = [value(m, measure="adaptive").value for m in (model, twin)]
    if cls is TwoLinear:
        assert abs(plain[0] - plain[1]) > 0.05 * plain[0]
    else:  # elementwise rescaling is what adaptive sharpness divides out
        assert abs(plain[0] - plain[1]) < 1e-8 * plain[0]


def test_a_skipped_class_counts_without_symmetry(monkeypatch):
    monkeypatch.setattr(registry, "_ADAPTERS", dict(_ADAPTERS))
    skip(Mystery)
    model = Mystery()
    assert [p.reason for p in find_symmetric_pairs(model)] == ["skipped on request"]
    x = torch.randn(2, 3, 4)
    check_coverage(model, lambda: model(x))
    batch = [(x, x)]

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    values = [sharpness.evaluate(model, batch, loss, measure=m, rho=0.1).value for m in ("geodesic-inv", "adaptive")]
    assert values[0] == pytest.approx(values[1], rel=1e-12)

"""Blocks, groups, pairs and stacks: what they read and write, and what groups leave as it is."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import sharpness
from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.symmetries import (
    GL,
    NotASymmetryError,
    Projection,
    SymmetricPair,
    apply_random_symmetry_,
    block,
    factor_pair,
    find_symmetric_pairs,
    pair,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.pairs import SHARED, merged, refused
from quotient_manifolds.symmetries.stacks import without_sharing

from ... import architectures, networks
from ...architectures import adapted, bert_and_batch


def test_scatter_into_a_strided_parameter():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).T)
    assert not layer.weight.is_contiguous()
    pair = SymmetricPair("p", "qk", GL(2), (block(layer, "weight", slice(0, 2), transpose=True),),
                         (block(layer, "weight", slice(2, 4), transpose=True),))  # fmt: skip
    expected = layer.weight.detach().clone()
    x = pair.gather().detach()
    torch.testing.assert_close(x, torch.cat([expected[:2].T, expected[2:].T]))
    pair.scatter_(2 * x)
    torch.testing.assert_close(layer.weight.detach(), 2 * expected)


def test_rotary_blocks_read_planes_as_complex_numbers():
    layer = nn.Linear(3, 8, bias=False)
    for pairing, planes in (("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])):
        q, k = (tuple(b.part(0, 4, pairing) for b in Projection(layer).input_blocks(head, 4)) for head in (1, 0))
        pair = SymmetricPair("p", "qk", GL(2, diagonal=True, field="complex"), q, k)
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


def test_a_block_follows_a_replaced_parameter_and_notices_another_shape():
    layer = nn.Linear(4, 4)
    pair = SymmetricPair("p", "qk", GL(2), Projection(layer).input_blocks(0, 2),
                         Projection(layer).input_blocks(1, 2))  # fmt: skip
    layer.weight = nn.Parameter(torch.ones(4, 4))
    assert pair.gather()[:4].eq(1).all()
    layer.weight = nn.Parameter(torch.ones(6, 4))
    with pytest.raises(ValueError, match="call find"):
        pair.gather()


def test_weights_that_are_computed_anew_are_told_apart():
    """The id of a temporary tensor was taken for its identity: pairs were lost, or called tied."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config)
    for layer in model.encoder.layer:
        for name in ("query", "key"):
            nn.utils.parametrizations.weight_norm(getattr(layer.attention.self, name))
    found = find_symmetric_pairs(model)
    refused = [p for p in found if p.group is None]
    assert len(refused) == 4
    assert all(p.reason.endswith("is computed, not a parameter") for p in refused), refused
    first, other = (block(layer.attention.self.query, "weight") for layer in model.encoder.layer)
    assert first.key == block(model.encoder.layer[0].attention.self.query, "weight").key != other.key


def measured(name):
    if name == "lora":
        base, batch = bert_and_batch()
        return adapted(base, ["query", "value"]), batch, lambda m, b: m(**b).last_hidden_state.square().mean()
    model, batch = architectures.transformers_model(name, "eager")
    return model, batch, lambda m, b: m(**b).last_hidden_state.sin().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox", "qwen3", "lora"])
@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix"])
def test_sharpness_is_invariant_for_every_kind_of_group(name, measure):

    model, batch, loss = measured(name)
    for parameter, p in model.named_parameters():  # LoRA's base is frozen, and the pooler takes no part
        if "pooler" in parameter:
            p.requires_grad_(False)
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 10.0) > 0
    options = {"measure": measure, "rho": 0.02, "steps": 4}
    one, two = (float(sharpness.evaluate(m, [batch], loss, **options)) for m in (model, twin))
    # Models that cast to float32 inside are staircases at 1e-7 of the loss.
    tolerance = 1e-8 if name in ("bert", "lora") else 1e-3
    assert abs(one - two) < tolerance * one
    assert one > 0


def test_groups_and_their_points():
    real, plane = GL(3), GL(2, diagonal=True, field="complex")
    assert [str(g) for g in (real, plane, GL(2, field="complex"), GL(3, diagonal=True))] == [
        "GL(3)", "(ℂ*)^2", "GL(2, ℂ)", "(ℝ*)^3"
    ]  # fmt: skip
    assert [g.dimension for g in (real, plane, GL(2, field="complex"), GL(3, diagonal=True))] == [9, 4, 8, 3]
    for group, shape in ((real, (4, 5, 3)), (plane, (4, 2, 5, 1))):
        rows = torch.randn(4, 5, *group.columns)
        assert group.to_point(rows).shape == shape
        assert torch.equal(group.from_point(group.to_point(rows)), rows)
    for wrong in (
        {"h": 0},
        {"h": True},
        {"h": 2.0},
        {"h": 2, "diagonal": "scalars"},
        {"h": 2, "field": "rational"},
    ):
        with pytest.raises(ValueError, match="no such group"):
            GL(**wrong)


@pytest.mark.parametrize("wrong", [{"positive": True}, {"diagonal": True, "positive": "no"}, {"field": "quaternion"}])
def test_groups_that_do_not_exist(wrong):
    with pytest.raises(ValueError, match="no such group"):
        GL(3, **wrong)
    assert GL(3, diagonal=True, positive=True).dimension == 3


def test_tied_and_doubled_blocks_are_errors():
    layer = nn.Linear(4, 4)
    q = Projection(layer).input_blocks(0, 2)
    with pytest.raises(ValueError, match="is in G and in H"):
        SymmetricPair("tied", "qk", GL(2), q, q)
    k = Projection(layer).input_blocks(1, 2)
    pair = SymmetricPair("twice", "qk", GL(2), q, k)
    with pytest.raises(ValueError, match="belongs to pair 'twice'"):
        find_symmetric_pairs(layer, extra=[pair, replace(pair, module="again")])
    with pytest.raises(ValueError, match="two pairs are called 'twice'; give each of yours another name"):
        find_symmetric_pairs(layer, extra=[pair, pair])
    assert find_symmetric_pairs(layer, extra=[pair])[0] == pair
    with pytest.raises(ValueError, match="acts on"):
        SymmetricPair("narrow", "qk", GL(3), q, k)
    with pytest.raises(ValueError, match="pass the reason"):
        SymmetricPair("nothing", "qk", None)


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
        return pair([block(model, "u")], [block(model, "v")], GL(6, diagonal=True), name="diagonal")
    G = [block(model.first, "weight", transpose=True), block(model.first, "bias")]
    return pair(G, [block(model.second, "weight")], GL(3), name="linear")


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
        assert [p.name for p in verify(model, x, extra=[wrong]).failures] == ["wrong"]
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 30.0, pairs=[own_pair(twin)]) == 1
    torch.testing.assert_close(twin(x), model(x))

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def value(model, **options):
        return sharpness.evaluate(model, [(x, y)], loss, rho=0.05, **options)

    one = value(model, measure=measure, pairs=find_symmetric_pairs(model, extra=[own_pair(model)]))
    two = value(twin, measure=measure, pairs=find_symmetric_pairs(twin, extra=[own_pair(twin)]))
    assert abs(float(one) - float(two)) < 1e-8 * float(one)
    with sharpness.perturbed(model, one.direction(0)):
        assert float(loss(model, (x, y)).detach()) == pytest.approx(one.batches[0].worst_loss, rel=1e-9)
    plain = [float(value(m, measure="adaptive")) for m in (model, twin)]
    if cls is TwoLinear:
        assert abs(plain[0] - plain[1]) > 0.05 * plain[0]
    else:  # elementwise rescaling is what adaptive sharpness divides out
        assert abs(plain[0] - plain[1]) < 1e-8 * plain[0]


def test_factors_outside_networks():
    """Equivalent factors have equivalent paths under the optimiser; with AdamW they have not."""
    torch.manual_seed(0)
    target, A = torch.randn(6, 5), torch.randn(3, 3)
    start = torch.randn(6, 3), torch.randn(5, 3)
    moved = start[0] @ torch.linalg.inv(A), start[1] @ A.T
    ends = {}
    for which in ("quotient", "adamw"):
        for factors in (start, moved):
            G, H = (nn.Parameter(f.clone()) for f in factors)
            optimizer = (
                QuotientAdam([G, H], [factor_pair(G, H)], lr=0.1)
                if which == "quotient"
                else torch.optim.AdamW([G, H], lr=0.1)
            )
            for _ in range(5):
                optimizer.zero_grad()
                (G @ H.T - target).square().mean().backward()
                optimizer.step()
            ends.setdefault(which, []).append((G @ H.T).detach())
    assert torch.allclose(*ends["quotient"], atol=1e-9)
    assert not torch.allclose(*ends["adamw"], atol=1e-2)
    with pytest.raises(ValueError, match=r"matrices \(n, h\) and \(m, h\) with the same h"):
        factor_pair(nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 4)))


def test_pairs_of_different_modules_are_different_pairs():
    """A dict by pair had one entry for both; the true symmetry's residual hid that of the false one."""

    def layers(middle):
        net = nn.Sequential(nn.Linear(5, 3), middle, nn.Linear(3, 4)).double()
        G = [block(net[0], "weight", transpose=True), block(net[0], "bias")]
        return net, pair(G, [block(net[2], "weight")], GL(3))

    torch.manual_seed(0)
    (wrong, first), (right, second) = layers(nn.ReLU()), layers(nn.Identity())
    assert first != second
    assert len({first, second}) == 2
    both, x = nn.Sequential(wrong, nn.Linear(4, 5).double(), right), torch.randn(9, 5, dtype=torch.float64)
    y = torch.randint(4, (9,))
    named = [replace(first, module="first"), replace(second, module="second")]
    assert [p.name for p in verify(both, x, extra=named).failures] == ["first"]
    for pairs in (named, [first, second]):
        with pytest.raises(NotASymmetryError):
            sharpness.evaluate(both, [(x, y)], rho=0.1, steps=1, pairs=pairs)
    copied = copy.deepcopy(named)
    assert copied[0].G[0].module is not named[0].G[0].module


def test_a_pair_of_another_model_cannot_be_verified():
    layer = nn.Linear(4, 3)
    G, H = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(3, 2))
    with pytest.raises(ValueError, match="the pair 'factors' belongs to another model"):
        verify(layer, torch.randn(2, 4), extra=[factor_pair(G, H)])


def test_factors_are_real_parameters_of_one_kind():
    G, H = (nn.Parameter(torch.randn(n, 2)) for n in (4, 3))
    assert factor_pair(G, H).n == 4
    wrong = {
        "real torch.nn.Parameter": [(G.detach(), H), (nn.Parameter(G.to(torch.complex64)), H)],
        "one dtype and device": [(nn.Parameter(G.detach().half()), H)],
        "same h": [(nn.Parameter(torch.randn(4, 3)), H)],
    }
    for words, cases in wrong.items():
        for case in cases:
            with pytest.raises(ValueError, match=words):
                factor_pair(*case)


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


def test_stacks_of_many_layers_are_single_tensors():
    model = networks.vit(layers=3)
    found = stacks(find_symmetric_pairs(model))
    assert [len(s) for s in found] == [6, 6]
    assert sum(len(s._rows.runs) for s in found) == 3 * 7  # one view a parameter and layer, not one a head


def layers(count=4):
    return [nn.Linear(3, 3, bias=False) for _ in range(count)]


def test_pairs_with_a_block_in_common_become_one():
    a, b, c, _ = layers()
    one, two = (pair([block(x, "weight")], [block(c, "weight")], GL(3)) for x in (a, b))
    (found,) = merged([one, two])
    assert (len(found.G), len(found.H)) == (2, 1)
    other = pair([block(c, "weight")], [block(a, "weight")], GL(3))
    assert [p.group for p in merged([one, other])] == [None, None]  # one block on both sides


def sharing(pairs):
    """The pairs that are refused because a weight of theirs is used elsewhere."""
    return {i for i, p in enumerate(without_sharing(pairs)) if p.reason == SHARED}


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_in_common_is_found_whatever_it_is_seen_through(overlap):
    a, b, c, d = layers()
    memory = torch.randn(30)
    a.weight.data = memory[:9].view(3, 3)
    c.weight.data = memory[5:14].view(3, 3) if overlap else memory[9:18].view(3, 3)
    pairs = [pair([block(x, "weight")], [block(y, "weight")], GL(3)) for x, y in ((a, b), (c, d))]
    assert sharing(pairs) == ({0, 1} if overlap else set())


def test_every_pair_that_meets_another_is_found_and_no_other():
    """Against the numbers themselves, for blocks anywhere in one memory: rows, columns, one within another.

    Some weights are transposes of that memory, as those of tied adapters.
    """
    for seed in range(40):
        torch.manual_seed(seed)
        memory, pairs, places = torch.zeros(60), [], []
        for _ in range(4):
            first, second = layers(2)
            rows, columns = torch.randint(1, 4, (2,)).tolist()
            turned = bool(torch.randint(2, ()))
            own = memory[int(torch.randint(50, ())) :][:9].view(3, 3)
            first.weight.data = own.T if turned else own
            transpose = bool(torch.randint(2, ()))
            G = block(first, "weight", slice(0, rows), slice(0, columns), transpose=transpose)
            h = rows if transpose else columns
            pairs.append(pair([G], [block(second, "weight", columns=slice(0, h))], GL(h)))
            numbers = torch.arange(60)[first.weight.storage_offset() :][:9].view(3, 3)
            numbers = (numbers.T if turned else numbers)[:rows, :columns]
            places.append(set(numbers.flatten().tolist()))
        met = {i for i, a in enumerate(places) for j, b in enumerate(places) if i != j and a & b}
        assert sharing(pairs) == met


def test_a_refused_pair_says_why():
    a, b, *_ = layers()
    found = refused(pair([block(a, "weight")], [block(b, "weight")], GL(3)), SHARED, frozen=True)
    assert (found.group, found.reason, found.frozen) == (None, SHARED, True)

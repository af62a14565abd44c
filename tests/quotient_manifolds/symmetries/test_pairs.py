"""Slots, groups, pairs and stacks: what they read and write, and what groups leave as it is."""

import copy
import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import sharpness
from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.symmetries import (
    GL,
    Cause,
    NotASymmetryError,
    Projection,
    Refusal,
    Slot,
    SymmetricPair,
    Symmetries,
    factor_pair,
    find,
    move_,
    pair,
    slot,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.found import _without_sharing, merged
from quotient_manifolds.symmetries.refusals import refused
from quotient_manifolds.weights import weights_of
from tests.support import architectures, networks
from tests.support.architectures import adapted, bert_and_batch


def test_scatter_into_a_strided_parameter():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).T)
    assert not layer.weight.is_contiguous()
    pair = SymmetricPair("p", "qk", GL(2), (slot(layer, "weight", slice(0, 2), transpose=True),),
                         (slot(layer, "weight", slice(2, 4), transpose=True),))  # fmt: skip
    expected, weights = layer.weight.detach().clone(), weights_of(layer)
    x = pair.gather(weights).detach()
    torch.testing.assert_close(x, torch.cat([expected[:2].T, expected[2:].T]))
    pair.scatter_(2 * x, weights)
    torch.testing.assert_close(layer.weight.detach(), 2 * expected)


def test_rotary_slots_read_planes_as_complex_numbers():
    layer = nn.Linear(3, 8, bias=False)
    weights = weights_of(layer)
    for pairing, planes in (("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])):
        q, k = (tuple(b.part(0, 4, pairing) for b in Projection(layer).slots(2, 4)[head]) for head in (1, 0))
        pair = SymmetricPair("p", "qk", GL(2, diagonal=True, field="complex"), q, k)
        x = pair.gather(weights)
        assert x.shape == (2, 6, 1)
        for f, (a, b) in enumerate(planes):
            torch.testing.assert_close(x[f, :3, 0], torch.complex(layer.weight[4 + a], layer.weight[4 + b]))
        before = layer.weight.detach().clone()
        pair.scatter_(x.detach(), weights)
        assert torch.equal(layer.weight, before)
        # A complex scalar on G and its inverse conjugate on H leave every product g h̄ as it is.
        c = torch.randn(2, 1, 1, dtype=torch.complex128)
        pair.scatter_(pair.manifold().act(x.detach(), c), weights)
        torch.testing.assert_close(pair.manifold().to_matrix(pair.gather(weights)), pair.manifold().to_matrix(x))
        with torch.no_grad():
            layer.weight.copy_(before)


def test_a_slot_is_a_place_in_whatever_has_its_name_and_notices_another_shape():
    layer = nn.Linear(4, 4)
    pair = SymmetricPair("p", "qk", GL(2), Projection(layer).slots(2, 2)[0], Projection(layer).slots(2, 2)[1])
    layer.weight = nn.Parameter(torch.ones(4, 4))
    assert pair.gather(weights_of(layer))[:4].eq(1).all()
    assert pair.gather({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}).eq(0).all()  # such as a state dict
    layer.weight = nn.Parameter(torch.ones(6, 4))
    again = r"'weight' had shape \(4, 4\) when its symmetries were found and has \(6, 4\) now; find them again"
    with pytest.raises(ValueError, match=again):
        pair.gather(weights_of(layer))
    with pytest.raises(ValueError, match=again):
        pair.scatter_(torch.ones(10, 2), weights_of(layer))


def test_slots_of_complex_weights_and_of_more_dimensions():
    layer = nn.Module()
    layer.plane = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
    layer.three = nn.Parameter(torch.randn(4, 3, 2))
    plane = torch.view_as_real(layer.plane.detach())
    whole = torch.arange(24.0).view(4, 3, 2)
    three, turned = (slot(layer, "three", slice(1, 3), transpose=t) for t in (False, True))
    assert torch.equal(three.of(whole), whole.flatten(1)[1:3])
    assert torch.equal(turned.of(whole), whole.flatten(1)[1:3].T)
    assert turned == three.transposed()
    real = Slot.from_view("plane", plane, plane[1])
    assert (real.shape, real.size) == ((4, 3, 2), (3, 2))
    assert torch.equal(real.read({"plane": layer.plane}), plane[1])
    layer.number = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="'number' of Module is a single number"):
        slot(layer, "number")
    with pytest.raises(TypeError, match="must be slices, got 1 and"):
        slot(layer, "plane", 1)
    with pytest.raises(TypeError, match="transpose of a slot must be True or False, got 1"):
        slot(layer, "plane", transpose=1)
    layer.inner = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="'inner' of Module is no weight, but of type Linear"):
        slot(layer, "inner")


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
    found = find(model)
    assert len(found.refused) == 4
    assert {p.reason for p in found.refused} == {
        f"computed, not a parameter: encoder.layer.{i}.attention.self.query.weight" for i in range(2)
    }
    assert [p.kind for p in found.pairs] == ["vo"] * 4


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
    trained = find(twin).restricted(name for name, p in weights_of(twin).items() if p.requires_grad)
    assert move_(twin, trained)
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


def test_tied_and_doubled_slots_are_errors():
    layer = nn.Linear(4, 4)
    q = Projection(layer).slots(2, 2)[0]
    with pytest.raises(ValueError, match="is in G and in H"):
        SymmetricPair("tied", "qk", GL(2), q, q)
    k = Projection(layer).slots(2, 2)[1]
    twice = SymmetricPair("twice", "qk", GL(2), q, k)
    with pytest.raises(ValueError, match="already belong to pair 'twice'"):
        find(layer).adding(twice, replace(twice, module="again"))
    with pytest.raises(ValueError, match="two symmetries are called 'twice'; give each of yours another name"):
        find(layer).adding(twice, twice)
    assert find(layer).adding(twice).pairs == (twice,)
    with pytest.raises(ValueError, match="acts on"):
        SymmetricPair("narrow", "qk", GL(3), q, k)
    with pytest.raises(ValueError, match="at least one slot in G and one in H"):
        SymmetricPair("nothing", "qk", GL(2), q)
    for group, slots in ((None, q), (2, q), (GL(2), ("weight",))):
        with pytest.raises(TypeError, match="'other' needs a group, such as GL"):
            pair(slots, k, group, name="other")


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
        return pair([slot(model, "u")], [slot(model, "v")], GL(6, diagonal=True), name="diagonal")
    G = [slot(model, "first.weight", transpose=True), slot(model, "first.bias")]
    return pair(G, [slot(model, "second.weight")], GL(3), name="linear")


@pytest.mark.parametrize("cls", [TwoLinear, Diagonal])
@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix"])
def test_pairs_of_ones_own(cls, measure):
    model = cls()
    x = torch.randn(20, 5 if cls is TwoLinear else 6)
    y = torch.randn_like(model(x).detach())
    p = own_pair(model)
    assert verify(model, x, find(model).adding(p)).ok
    wrong = pair(p.G[:1], p.H, p.group, name="wrong") if cls is TwoLinear else None
    if wrong is not None:
        assert [p.name for p in verify(model, x, find(model).adding(wrong)).failures] == ["wrong"]
    twin = copy.deepcopy(model)
    assert move_(twin, Symmetries((p,)), condition=30.0) == {"user": 1}
    torch.testing.assert_close(twin(x), model(x))

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def value(model, **options):
        return sharpness.evaluate(model, [(x, y)], loss, rho=0.05, **options)

    one, two = (value(m, measure=measure, symmetries=find(model).adding(p)) for m in (model, twin))
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
                QuotientAdam([("G", G), ("H", H)], [factor_pair(G, H)], lr=0.1)
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
    with pytest.raises(ValueError, match=r"factors are real torch\.nn\.Parameter"):
        factor_pair([[1.0]], nn.Parameter(torch.ones(3, 1)))


def test_pairs_of_different_modules_are_different_pairs():
    """A dict by pair had one entry for both; the true symmetry's residual hid that of the false one."""
    torch.manual_seed(0)
    wrong, right = (nn.Sequential(nn.Linear(5, 3), middle, nn.Linear(3, 4)) for middle in (nn.ReLU(), nn.Identity()))
    both, x = nn.Sequential(wrong, nn.Linear(4, 5), right), torch.randn(9, 5)
    y = torch.randint(4, (9,))

    def of_layer(i):
        G = [slot(both, f"{i}.0.weight", transpose=True), slot(both, f"{i}.0.bias")]
        return pair(G, [slot(both, f"{i}.2.weight")], GL(3))

    first, second = of_layer(0), of_layer(2)
    assert first != second
    assert len({first, second}) == 2
    named = Symmetries().adding(replace(first, module="first"), replace(second, module="second"))
    assert [p.name for p in verify(both, x, named).failures] == ["first"]
    for found in (named, Symmetries((first, second))):
        assert not verify(both, x, found).ok
        with pytest.raises(NotASymmetryError):
            sharpness.evaluate(both, [(x, y)], rho=0.1, steps=1, symmetries=found)


def test_a_pair_of_another_model_cannot_be_verified():
    layer = nn.Linear(4, 3)
    G, H = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(3, 2))
    with pytest.raises(ValueError, match="the symmetry 'factors' belongs to another model"):
        verify(layer, torch.randn(2, 4), Symmetries((factor_pair(G, H),)))


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
    before, weights = copy.deepcopy(model.state_dict()), weights_of(model)
    for s in stacks(find(model).pairs, weights):
        x = s.gather(weights)
        assert x.shape == (4, s.n + s.m, 8)
        assert x.requires_grad
        s.scatter_(torch.zeros_like(x), weights)
        assert s.gather(weights).abs().max() == 0
        s.scatter_(x, weights)
        for p, one in zip(s.pairs, x, strict=True):
            torch.testing.assert_close(p.gather(weights), one)
            assert p.manifold("mix").to_matrix(one).shape == (p.n, p.m)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    # The gradient of a stack is the stack of gradients.
    s = stacks(find(model).pairs, weights)[0]
    (s.gather(weights) ** 2).sum().backward()
    grads = {name: weights[name].grad for name in s.names}
    torch.testing.assert_close(s.gather(grads), 2 * s.gather(weights).detach())
    some = dict(list(grads.items())[::2])  # those that are absent are zeros
    expected = s.gather({name: g if name in some else 0 * g for name, g in grads.items()})
    assert torch.equal(s.gather(some, s.gather(weights)), expected)
    lost = next(name for name in s.names if name not in some)
    for use in (lambda: s.gather(some), lambda: s.scatter_(expected, {}), lambda: stacks(s.pairs, {})):
        with pytest.raises(ValueError, match=r"there is no weight '.*'; were these symmetries found in another"):
            use()
    with pytest.raises(ValueError, match=re.escape(lost)):
        s.gather(some)


def test_stacks_of_many_layers_are_single_tensors():
    model = networks.vit(layers=3)
    found = stacks(find(model).pairs, weights_of(model))
    assert [len(s) for s in found] == [6, 6]
    assert sum(len(s.runs) for s in found) == 3 * 7  # one view a parameter and layer, not one a head


def layers(count=4):
    return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "abcdefgh"[:count]})


def test_pairs_with_a_slot_in_common_become_one():
    model = layers()
    a, b, c = (slot(model, f"{name}.weight") for name in "abc")
    one, two = (pair([x], [c], GL(3)) for x in (a, b))
    (found,) = merged([one, two])
    assert (a, b) == found.G
    assert (c,) == found.H
    other = pair([c], [a], GL(3))
    assert [p.cause for p in merged([one, other])] == [Cause.TIED] * 2  # one slot on both sides


def sharing(pairs, weights):
    """The pairs that are refused because a weight of theirs is used elsewhere."""
    found = _without_sharing(pairs, weights)
    assert all(p is q for p, q in zip(found, pairs, strict=True) if not isinstance(p, Refusal))
    return {i for i, p in enumerate(found) if isinstance(p, Refusal) and p.cause is Cause.SHARED}


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_in_common_is_found_whatever_it_is_seen_through(overlap):
    model, memory = layers(), torch.randn(30)
    model["a"].weight.data = memory[:9].view(3, 3)
    model["c"].weight.data = memory[5:14].view(3, 3) if overlap else memory[9:18].view(3, 3)
    a, b, c, d = (slot(model, name) for name in weights_of(model))
    pairs = [pair([x], [y], GL(3)) for x, y in ((a, b), (c, d))]
    assert sharing(pairs, weights_of(model)) == ({0, 1} if overlap else set())


def test_every_pair_that_meets_another_is_found_and_no_other():
    """Against the numbers themselves, for slots anywhere in one memory: rows, columns, one within another.

    Some weights are transposes of that memory, as those of tied adapters.
    """
    for seed in range(40):
        torch.manual_seed(seed)
        memory, pairs, places, model = torch.zeros(60), [], [], layers(8)
        for a, b in ("ab", "cd", "ef", "gh"):
            first = model[a]
            rows, columns = torch.randint(1, 4, (2,)).tolist()
            turned = bool(torch.randint(2, ()))
            own = memory[int(torch.randint(50, ())) :][:9].view(3, 3)
            first.weight.data = own.T if turned else own
            transpose = bool(torch.randint(2, ()))
            G = slot(model, f"{a}.weight", slice(0, rows), slice(0, columns), transpose=transpose)
            h = rows if transpose else columns
            pairs.append(pair([G], [slot(model, f"{b}.weight", columns=slice(0, h))], GL(h)))
            numbers = torch.arange(60)[first.weight.storage_offset() :][:9].view(3, 3)
            numbers = (numbers.T if turned else numbers)[:rows, :columns]
            places.append(set(numbers.flatten().tolist()))
        met = {i for i, a in enumerate(places) for j, b in enumerate(places) if i != j and a & b}
        assert sharing(pairs, weights_of(model)) == met


def test_a_refused_pair_says_why():
    model = layers()
    mine = pair([slot(model, "a.weight")], [slot(model, "b.weight")], GL(3), name="mine")
    found = refused(mine, Cause.SHARED)
    assert str(found) == "mine: its weights are used in another place too (shared or overlapping memory)"
    assert (found.kind, found.slots, found.names) == (mine.kind, mine.slots, ("a.weight", "b.weight"))
    assert refused(found, Cause.FROZEN) is found
    said = {
        "frozen": (Cause.FROZEN, ""), "frozen: a.weight": (Cause.FROZEN, "a.weight"), "no symmetry": (Cause.BROKEN, ""),
        "quantised": (Cause.BROKEN, "quantised"), "could not be examined alone: why": (Cause.FAILED, "alone: why"),
    }  # fmt: skip
    assert {refused(mine, *why).reason: why for why in said.values()} == said

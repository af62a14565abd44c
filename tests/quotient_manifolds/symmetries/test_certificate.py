"""The gradient's certificate, against finite moves and against what is no symmetry."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.symmetries import (
    GL,
    Cause,
    NotASymmetryError,
    Symmetries,
    certify,
    discovery,
    find,
    move_,
    pair,
    slot,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.attention import HANDLERS
from quotient_manifolds.symmetries.orbits import broken, change, move_stacks_
from quotient_manifolds.weights import ByClass, weights_of
from tests.support import networks
from tests.support.architectures import IDS, transformers_model
from tests.support.extent import share
from tests.support.points import close


def gradients_of(model, loss):
    weights = {name: p for name, p in weights_of(model).items() if p.requires_grad}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {name: g for name, g in zip(weights, found, strict=True) if g is not None}


def error(model, batch):
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def projection(model, which):
    """The queries (0), keys, values or outputs of the first layer."""
    return networks.projections(networks.vit_layers(model)[0].attention)[which]


def bend(linear, amount):
    """Let a layer's output pass through something that is not linear; its class stays one that the table knows."""
    return linear.register_forward_hook(lambda module, x, y: y + amount * y.tanh())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_symmetries_are_certified_and_nothing_else(dtype, tolerance):
    torch.set_default_dtype(dtype)
    batch = networks.images()
    model = networks.trained_vit()
    weights = weights_of(model)
    pairs = stacks(find(model).pairs, weights)
    found = certify(pairs, weights, gradients_of(model, error(model, batch)), tolerance=tolerance)
    assert found.failures == found.unreached == ()
    assert len(found.residuals) == sum(len(s) for s in pairs)
    for which, kind in ((0, "qk"), (2, "vo")):
        hook = bend(projection(model, which), 0.01)
        wrong = certify(pairs, weights, gradients_of(model, error(model, batch)), tolerance=1e-4)
        assert {(p.kind, p.module) for p in wrong.failures} == {(kind, pairs[0].pairs[0].module)}
        hook.remove()


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox", "qwen3"])
def test_every_kind_of_group(name):
    """Real and complex, whole and diagonal; a gradient of no network has residuals of the order of 1."""
    torch.manual_seed(0)
    model, batch = transformers_model(name, "eager")
    weights = weights_of(model)
    pairs = stacks(find(model).pairs, weights)
    output = model(**batch)[0]
    found = certify(pairs, weights, gradients_of(model, (output * torch.randn_like(output)).sum()), tolerance=1e-5)
    assert found.failures == ()  # some of these networks cast to float32 inside
    assert found.residuals
    random = certify(pairs, weights, {name: torch.randn_like(p) for name, p in weights.items()}, tolerance=1e-5)
    assert len(random.failures) == sum(len(s) for s in pairs)


def test_a_gradient_that_is_zero_certifies_nothing():
    model = networks.vit()
    pairs = stacks(find(model).pairs, weights_of(model))
    found = certify(pairs, weights_of(model), {})
    assert found.residuals == {}
    assert len(found.unreached) == sum(len(s) for s in pairs)
    assert "not certified: the gradient is zero: " in str(found)


def test_the_weights_are_those_that_are_given():
    """A gradient says nothing of other weights than those it was taken at."""
    model, batch = networks.vit(), networks.images()
    weights = {name: p.detach() for name, p in weights_of(model).items()}
    gradients, pairs = gradients_of(model, error(model, batch)), stacks(find(model).pairs, weights)
    found = certify(pairs, weights, gradients)
    assert found.residuals == certify(pairs, weights_of(model), gradients).residuals
    assert found.ok
    assert not certify(pairs, {name: t + 1 for name, t in weights.items()}, gradients).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("which", [0, 2])
def test_evaluate_refuses_by_name_and_leaves_the_model_alone(dtype, which):
    torch.set_default_dtype(dtype)
    model, batch = networks.trained_vit(), networks.images()
    assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=2)) > 0
    bend(projection(model, which), 0.3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotASymmetryError, match=r"layer.*0.*is not a symmetry of the loss") as caught:
        sharpness.evaluate(model, [batch], rho=0.1, steps=2)
    wrong = caught.value.pair
    assert wrong.kind == ("qk" if which == 0 else "vo")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    others = [p for p in find(model).pairs if (p.kind, p.module) != (wrong.kind, wrong.module)]
    assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=2, symmetries=Symmetries(tuple(others)))) > 0
    assert float(sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, steps=2)) > 0


def test_the_error_travels_between_processes():
    error = NotASymmetryError(find(networks.vit()).pairs[0], 0.5, 1e-8)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.pair.name, again.residual) == (str(error), error.pair.name, 0.5)
    assert again.pair == error.pair
    assert "(residual 5.0e-01, rounding is up to 1e-08)" in str(error)


class Renamed(nn.Linear):
    pass


class Rectified(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Bent(nn.Module):
    def forward(self, weight):
        return weight + 0.3 * weight.tanh()


def of_class(cls):
    def change(layer):
        new = cls(layer.in_features, layer.out_features)
        new.load_state_dict(layer.state_dict())
        return new

    return change


def hooked(hook, before=False):
    def change(layer):
        (layer.register_forward_pre_hook if before else layer.register_forward_hook)(hook)
        return layer

    return change


def parametrised(name):
    return lambda layer: nn.utils.parametrize.register_parametrization(layer, name, Bent())


#: Ways to wrap or replace a projection: which one, the way, and what comes of the layer's pairs: kept as symmetries
#: that they are, refused with a reason, or caught at the first gradient.
WAYS = {
    "subclass": (0, of_class(Renamed), "kept"),
    "subclass with a forward of its own": (2, of_class(Rectified), "own"),
    "forward hook": (0, hooked(lambda m, x, y: y + 0.3 * y.tanh()), "caught"),
    "linear forward hook": (2, hooked(lambda m, x, y: 2 * y), "kept"),
    "pre-hook within the pair": (3, hooked(lambda m, x: (x[0].tanh(),), before=True), "caught"),
    "pre-hook outside of it": (0, hooked(lambda m, x: (x[0].tanh(),), before=True), "kept"),
    "parametrised weight": (0, parametrised("weight"), "computed"),
    "parametrised bias": (2, parametrised("bias"), "computed"),
    "weight norm": (3, nn.utils.parametrizations.weight_norm, "computed"),
    "weight norm by hooks": (0, nn.utils.weight_norm, "computed"),
    "spectral norm": (2, nn.utils.parametrizations.spectral_norm, "computed"),
    "ReLU behind": (0, lambda layer: nn.Sequential(layer, nn.ReLU()), "caught"),
    "two layers": (2, lambda _: nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16)), "replaced"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "table"), [*((way, True) for way in WAYS), *((way, False) for way in share(WAYS, 2))])
def test_ways_to_wrap_a_projection(way, table, monkeypatch):
    """Each is certified and right, or refused: by its class, by its gradient, or by an examination."""
    which, change, outcome = WAYS[way]
    model, batch = networks.vit(), networks.images()
    attention, name = networks.vit_layers(model)[0].attention, "qkvo"[which] + "_proj"
    if not hasattr(attention, name):
        pytest.skip("transformers 5.9 names the projections so")
    setattr(attention, name, change(getattr(attention, name)))
    if not table:
        monkeypatch.setattr(HANDLERS, "of", ByClass().of)
    found = find(model, None if table else batch)
    usable, refused = [p for p in found.pairs if not p.group.positive], found.refused
    reasons = {"own": "its own forward", "computed": "computed, not a", "replaced": "replaced, pruned or parametrised"}
    if outcome == "caught" and table:
        with pytest.raises(NotASymmetryError, match=r"layer.*0.*is not a symmetry of the loss"):
            sharpness.evaluate(model, [batch], rho=0.1, steps=2)
    elif outcome == "kept":
        assert len(usable) == len(found.pairs) == 8
        assert refused == ()
    else:
        assert len(usable) == (4 if outcome == "replaced" else 6)
        assert all(p.reason and (not table or reasons[outcome] in p.reason) for p in refused)
    if outcome != "caught" or not table:
        with torch.no_grad():  # torch's older weight norm cannot be copied before
            model(batch[0])
        assert verify(model, batch).ok


@pytest.mark.filterwarnings("ignore")
def test_what_no_pair_survives_is_not_taken_for_rounding(monkeypatch):
    """Prefix tuning puts keys and values beside those of every layer, so that all residuals are large alike."""
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=32, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = "eager"
    options = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(GPT2LMHeadModel(config), options).requires_grad_(True)
    batch = {**IDS, "labels": IDS["input_ids"]}
    networks.shake(model)
    found = find(model)
    assert found.pairs == ()
    assert {p.reason for p in found.refused} == {"prefix tuning adds keys and values to those of the layer"}
    assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=2)) > 0
    monkeypatch.setattr(discovery, "prefix_tuned", lambda model: False)
    assert find(model).refused == ()
    with pytest.raises(NotASymmetryError):
        sharpness.evaluate(model, [batch], rho=0.1, steps=2)


def first_step(optimizer):
    if isinstance(optimizer, sharpness.GeodesicSAM):
        with optimizer.perturbed():
            return
    optimizer.step()


@pytest.mark.parametrize(
    "train",
    [
        lambda model: QuotientAdam(model.named_parameters(), find(model)),
        lambda model: sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1),
    ],
    ids=["adam", "sam"],
)
def test_optimisers_refuse_before_anything_moves(train):
    batch = networks.images()
    sound = networks.trained_vit()
    error(sound, batch).backward()
    first_step(train(sound))
    broken = networks.trained_vit()
    optimizer = train(broken)
    projection(broken, 0).register_forward_hook(lambda module, x, y: y.relu())
    error(broken, batch).backward()
    before = copy.deepcopy(broken.state_dict())
    with pytest.raises(NotASymmetryError, match="is not a symmetry of the loss"):
        first_step(optimizer)
    assert all(torch.equal(v, before[k]) for k, v in broken.state_dict().items())


def test_gradients_that_are_rounding_are_no_alarm():
    """Examples whose gradients cancel leave rounding, with residuals of the order of 1: moves decide."""
    torch.set_default_dtype(torch.float32)
    model, (x, _) = networks.trained_vit(), networks.images()
    twice = torch.cat([x, x.flip(0)])
    factors = torch.randn(len(x), 3)

    def loss(model, batch):
        logits = model(batch).logits
        return (logits[: len(x)] * factors - logits[len(x) :].flip(0) * factors).sum() + 1.0

    weights = weights_of(model)
    found = certify(stacks(find(model).pairs, weights), weights, gradients_of(model, loss(model, twice)))
    assert max(found.residuals.values()) > 1e-2
    assert sharpness.evaluate(model, [twice], loss, rho=0.1, steps=2).num_uncertified == 0


@pytest.mark.parametrize("group", [GL(3), GL(3, diagonal=True)], ids=str)
def test_gradients_wider_than_the_weights_are_not_rounded(group):
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 4, bias=False))
    both = pair([slot(model, "0.weight", transpose=True)], [slot(model, "1.weight")], group)
    weights = weights_of(model)
    A, B = (w.detach().double().requires_grad_() for w in weights.values())
    gradients = dict(zip(weights, torch.autograd.grad((B @ A - 1).square().sum(), [A, B]), strict=True))
    assert certify(stacks([both], weights), weights, gradients).residuals[both] < 1e-14
    rounded = {name: g.float() for name, g in gradients.items()}
    assert certify(stacks([both], weights), weights, rounded).residuals[both] > 1e-9


class HalfInside(torch.nn.Module):
    """A model that computes in bfloat16 whatever its weights are."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x).logits.float()


def test_half_precision_inside_a_model_is_no_alarm_and_hides_no_relu():
    torch.set_default_dtype(torch.float32)
    model, (x, y) = networks.trained_vit(), networks.images()
    half = HalfInside(model)
    weights = weights_of(half)
    pairs = stacks(find(half).pairs, weights)
    found = certify(pairs, weights, gradients_of(half, F.cross_entropy(half(x), y)), tolerance=1e-4)
    assert found.failures
    assert float(sharpness.evaluate(half, [(x, y)], rho=0.1, steps=2)) > 0
    projection(model, 2).register_forward_hook(lambda module, x, y: y.relu())
    with pytest.raises(NotASymmetryError, match="vo head"):
        sharpness.evaluate(half, [(x, y)], rho=0.1, steps=2)


def test_moves_agree_with_the_certificate():
    """The outputs change under a finite move where, and only where, the residual is large."""
    model, batch = networks.trained_vit(), networks.images()
    bend(projection(model, 2), 0.3)
    seen = set()
    weights = weights_of(model)
    found = certify(stacks(find(model).pairs, weights), weights, gradients_of(model, error(model, batch)))
    for p, residual in found.residuals.items():
        with torch.no_grad():
            before, kept = model(batch[0]).logits, copy.deepcopy(model.state_dict())
            move_(model, Symmetries((p,)))
            moved = float((model(batch[0]).logits - before).abs().max() / before.abs().max())
            model.load_state_dict(kept)
        assert (moved > 1e-8) == (residual > 1e-8), (p.name, moved, residual)
        seen.add(moved > 1e-8)
    assert seen == {True, False}


def test_halving_finds_the_layers_that_single_moves_find():
    """Each layer moved by itself is the oracle; hooks bend some of eight, and the weights are as before."""
    model, (x, _) = networks.vit(layers=4), networks.images()
    layers = networks.vit_layers(model)
    for layer, which in ((0, 2), (2, 0), (3, 0), (3, 2)):
        bend(networks.projections(layers[layer].attention)[which], 0.3)
    pairs, weights = find(model).pairs, weights_of(model)
    before, passes = copy.deepcopy(model.state_dict()), []

    @torch.no_grad()
    def run():
        passes.append(1)
        return [model(x).logits]

    wrong = set()
    for module, kind in dict.fromkeys((p.module, p.kind) for p in pairs):
        outputs, mine = run(), [p for p in pairs if (p.module, p.kind) == (module, kind)]
        move_stacks_(stacks(mine, weights), weights, 100.0, 1)
        wrong |= set(mine) if change(outputs, run()) > 1e-9 else set()
        model.load_state_dict(before)
    assert len(wrong) == 4 * 2
    passes.clear()
    assert set(broken(pairs, weights, run)) == wrong
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    passes.clear()
    assert broken([p for p in pairs if p not in wrong], weights, run) == []
    assert len(passes) == 2  # all of them at once
    assert broken([], weights, run) == []


def test_outputs_that_are_nan_certify_nothing():
    model, batch = networks.vit(), networks.images()
    assert verify(model, batch).ok
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    for moves in (True, False):
        with pytest.raises(ValueError, match="all outputs of ViTForImageClassification are NaN or infinite"):
            verify(model, batch, moves=moves)


def test_clipped_values_are_no_symmetry_however_far_the_clip():
    """Flat at the weights and for small moves: at condition 3 nothing is clipped."""
    model, (x, _) = networks.vit(), networks.images()
    bound = []
    values = projection(model, 2)
    hook = values.register_forward_hook(lambda m, a, y: bound.append(y.abs().max()))
    model(x)
    hook.remove()
    values.register_forward_hook(lambda m, a, y: y.clamp(-2 * bound[0], 2 * bound[0]))
    found = find(model, (x, None))
    assert {(p.module, p.kind): p.cause for p in found.refused} == {(found.pairs[0].module, "vo"): Cause.CHANGES}


@pytest.mark.parametrize("group", [GL(1), GL(3, diagonal=True)], ids=str)
def test_a_move_of_numbers_changes_a_sign_of_every_pair(group):
    """With positive numbers alone a ReLU between the factors passes; balanced points have signs of their own."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(5, group.h), nn.Linear(group.h, 4)) for _ in range(30))
    before, weights = copy.deepcopy(layers), weights_of(layers)
    moved = [
        pair([slot(layers, f"{i}.0.weight", transpose=True)], [slot(layers, f"{i}.1.weight")], group, name=str(i))
        for i in range(30)
    ]
    move_stacks_(stacks(moved, weights), weights, 100.0, 0)
    for now, then in zip(layers, before, strict=True):
        assert (now[0].weight * then[0].weight).sum(1).min() < 0
        close(now[1].weight @ now[0].weight, then[1].weight @ then[0].weight)

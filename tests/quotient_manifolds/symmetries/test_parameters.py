"""Attention weights as points: the same function and numbers, geoopt's optimisers, and ordinary weights again."""

import copy

import geoopt
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharpness
from quotient_manifolds.optim import create_quotient_optimizer
from quotient_manifolds.passes import Wide
from quotient_manifolds.symmetries import (
    GL,
    NotASymmetryError,
    Symmetries,
    find,
    manifold_parameters_,
    move_,
    pair,
    plain_parameters_,
    slot,
    verify,
)
from quotient_manifolds.symmetries.points import Point
from sharpness.patches import PairPatch
from tests.support.architectures import TRANSFORMERS, adapted, open_clip_model, timm_model, transformers_model
from tests.support.extent import checkered


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)


def vision():
    return timm_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2), torch.randn(
        2, 3, 32, 32
    )


MODELS = {
    "torch": encoder,
    "timm": vision,
    "open_clip": open_clip_model,
    **{name: (lambda name=name: transformers_model(name, "eager")) for name in TRANSFORMERS},
}
#: Each kind of layout: with key biases, fused, grouped with RoPE, RoPE of a part, shared layers, relative positions.
USUAL = pytest.mark.parametrize(
    "name", ["torch", "timm", "open_clip", "bert", "vit", "llama", "gpt2", "gpt_neox", "phi3-partial", "albert", "t5"]
)


def outputs(model, batch):
    with Wide():
        found = model(**batch) if isinstance(batch, dict) else model(batch)
    found = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    return next(t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 1)


def loss(model, batch):
    out = outputs(model, batch)
    return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sin().mean()


def made(name):
    model, batch = MODELS[name]()
    return model.double().eval(), batch


def state(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


@USUAL
def test_same_function_same_sharpness_and_back_bit_for_bit(name):
    model, batch = made(name)
    twin = copy.deepcopy(model)
    before, parameters = state(twin), dict(twin.named_parameters())
    expected = outputs(model, batch)
    points = manifold_parameters_(twin, "inv")
    assert all(isinstance(p, geoopt.ManifoldParameter) and p.manifold.metric.name == "inv" for p in points)
    assert sum(map(len, points)) == len(find(model).pairs)
    torch.testing.assert_close(outputs(twin, batch), expected, rtol=1e-12, atol=1e-14)
    one, two = (
        sharpness.evaluate(m, [batch], loss, rho=0.1, steps=2, restarts=1, progress=False) for m in (model, twin)
    )
    assert float(two) == pytest.approx(float(one), rel=1e-8)
    assert [s[:3] for s in two.by_layer()] == [s[:3] for s in one.by_layer()]
    for a, b in zip(one.by_layer(), two.by_layer(), strict=True):
        assert a.share == pytest.approx(b.share, abs=1e-8)
    if name in ("torch", "llama"):
        one, two = (sharpness.gradient_norm(m, [batch], loss, progress=False) for m in (model, twin))
        assert float(two) == pytest.approx(float(one), rel=1e-8)
    if name == "torch":
        one, two = (sharpness.hessian(m, [batch], loss, num_matvecs=3, progress=False) for m in (model, twin))
        assert float(two) == pytest.approx(float(one), rel=1e-8)
    plain_parameters_(twin)
    after = twin.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(p is parameters[key] and p.requires_grad for key, p in twin.named_parameters())
    assert type(twin) is type(model)
    assert find(twin) == find(model)


def test_a_wrong_conversion_is_noticed(monkeypatch):
    """Rows in a wrong order; and points in the measure's metric instead of the one that they state."""
    model, batch = made("bert")
    twin = copy.deepcopy(model)
    manifold_parameters_(twin, "mix")
    options = {"rho": 0.1, "steps": 3, "progress": False}
    one = sharpness.evaluate(model, [batch], loss, measure="geodesic-mix", **options)
    two = sharpness.evaluate(twin, [batch], loss, measure="geodesic-inv", **options)
    assert float(two) == pytest.approx(float(one), rel=1e-8)
    right = PairPatch.horizontal_space

    def of_the_measure(self, gauge, x):
        self.stack.metric = None
        return right(self, gauge, x)

    with monkeypatch.context() as changed:
        changed.setattr(PairPatch, "horizontal_space", of_the_measure)
        two = sharpness.evaluate(twin, [batch], loss, measure="geodesic-inv", **options)
        assert float(two) != pytest.approx(float(one), rel=1e-3)
    rows = Point.rows
    monkeypatch.setattr(Point, "rows", lambda self, pairs: rows(self, pairs).roll(1, 1))
    assert (outputs(twin, batch) - outputs(model, batch)).abs().max() > 1e-6
    with pytest.raises(NotASymmetryError):
        sharpness.evaluate(twin, [batch], loss, **options)


@pytest.mark.parametrize(("name", "metric"), checkered(["bert", "vit", "llama"], ["inv", "mix"]))
def test_riemannian_sgd_runs_alike_from_equivalent_starts(name, metric):
    """Ten steps, the pairs of RoPE included, whose points are complex; the plain weights' SGD does not."""
    model, batch = made(name)
    ends = {}
    for kind in ("points", "moved points", "plain", "moved plain"):
        twin = copy.deepcopy(model)
        if "moved" in kind:
            move_(twin, condition=3.0)
        if "points" in kind:
            manifold_parameters_(twin, metric)
        optimizer = geoopt.optim.RiemannianSGD(twin.parameters(), lr=0.02)
        start = loss(twin, batch).item()
        for _ in range(10):
            optimizer.zero_grad()
            loss(twin, batch).backward()
            optimizer.step()
        ends[kind] = outputs(twin, batch).detach()
        assert loss(twin, batch).item() < start
    scale = ends["points"].abs().max()
    assert (ends["points"] - ends["moved points"]).abs().max() < 1e-8 * scale
    assert (ends["plain"] - ends["moved plain"]).abs().max() > 1e-6 * scale


@pytest.mark.parametrize("name", ["torch", "llama"])
@pytest.mark.parametrize("optimiser", [geoopt.optim.RiemannianAdam, geoopt.optim.RiemannianLineSearch])
def test_other_optimisers_of_geoopt(name, optimiser):
    model, batch = made(name)
    manifold_parameters_(model)
    assert all(p.numel() for p in model.parameters())
    optimizer = optimiser(model.parameters(), **({"lr": 1e-3} if optimiser is geoopt.optim.RiemannianAdam else {}))

    def closure(*_, **__):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        return value

    start = loss(model, batch).item()
    for _ in range(5):
        optimizer.step(closure)
    assert loss(model, batch).item() < start


@pytest.mark.parametrize(
    ("optimiser", "options", "invariant"),
    [
        (geoopt.optim.RiemannianSGD, {"lr": 0.02}, True),
        (geoopt.optim.RiemannianSGD, {"lr": 0.02, "momentum": 0.9}, False),
        (geoopt.optim.RiemannianSGD, {"lr": 0.02, "weight_decay": 0.1}, False),
        (geoopt.optim.RiemannianAdam, {"lr": 0.01}, True),
        (geoopt.optim.RiemannianAdam, {"lr": 0.01, "weight_decay": 0.1}, False),
        (geoopt.optim.RiemannianLineSearch, {}, True),
    ],
)
def test_what_each_optimiser_does_to_invariance(optimiser, options, invariant):
    model, x = made("torch")
    ends = []
    for moved in (False, True):
        twin = copy.deepcopy(model)
        if moved:
            move_(twin, condition=3.0)
        manifold_parameters_(twin)
        optimizer = optimiser(twin.parameters(), **options)

        def closure(twin=twin, optimizer=optimizer):
            optimizer.zero_grad()
            value = loss(twin, x)
            value.backward()
            return value

        for _ in range(5):
            optimizer.step(lambda *_, closure=closure, **__: closure())
        ends.append(outputs(twin, x).detach())
    assert ((ends[0] - ends[1]).abs().max() < 1e-8 * ends[0].abs().max()) == invariant


def test_state_copies_checkpoints_and_assignment(tmp_path):
    model, batch = made("llama")
    manifold_parameters_(model)
    expected = outputs(model, batch).detach()
    torch.save(model.state_dict(), tmp_path / "points.pt")
    twin = copy.deepcopy(model)
    assert all(p.manifold.metric.name == "mix" for p in twin.parameters() if isinstance(p, geoopt.ManifoldParameter))
    with torch.no_grad():
        twin.quotient_point_0.mul_(2.0)
    assert (outputs(twin, batch) - expected).abs().max() > 1e-6
    torch.testing.assert_close(outputs(model, batch), expected, rtol=0, atol=0)  # a copy has points of its own
    twin.load_state_dict(torch.load(tmp_path / "points.pt", weights_only=True))
    torch.testing.assert_close(outputs(twin, batch), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        twin.load_state_dict(made("llama")[0].state_dict())
    projection = twin.layers[0].self_attn.k_proj
    projection.weight = 2 * projection.weight.detach()
    torch.testing.assert_close(projection.weight, 2 * model.layers[0].self_attn.k_proj.weight, rtol=0, atol=0)
    replaced = copy.deepcopy(model)
    replaced.load_state_dict(torch.load(tmp_path / "points.pt", weights_only=True), assign=True)
    with pytest.raises(ValueError, match=r"'quotient_point_0' has been replaced by a plain parameter.*assign"):
        outputs(replaced, batch)
    plain_parameters_(twin)
    torch.testing.assert_close(outputs(model, batch), expected, rtol=0, atol=0)  # whose modules have their class
    plain_parameters_(model)
    assert isinstance(projection.weight, nn.Parameter)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float64)
    torch.testing.assert_close(outputs(loaded.eval(), batch), expected, rtol=0, atol=0)
    plain_parameters_(loaded)  # nothing to do


def test_under_ddp(tmp_path):
    model, x = made("torch")
    twin = copy.deepcopy(model)
    manifold_parameters_(twin)
    expected = outputs(twin, x)
    expected.sin().sum().backward()
    gradients = [p.grad.clone() for p in twin.parameters() if p.requires_grad]
    twin.zero_grad()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(twin)
        found = outputs(parallel, x)
        found.sin().sum().backward()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        values = [float(sharpness.evaluate(m, [x], loss, rho=0.1, progress=False)) for m in (parallel, twin)]
        assert values[0] == pytest.approx(values[1], rel=1e-10)
    finally:
        dist.destroy_process_group()
    for p, g in zip((p for p in twin.parameters() if p.requires_grad), gradients, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-14)


def test_training_on_points_moves_the_function_and_ends_in_ordinary_weights():
    model, x = made("torch")
    names = [name for name, _ in model.named_parameters()]
    points = manifold_parameters_(model)
    optimizer = geoopt.optim.RiemannianSGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    assert all(p.manifold.check_point_on_manifold(p) for p in points)
    expected = outputs(model, x)
    plain_parameters_(model)
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(outputs(model, x), expected, rtol=0, atol=0)
    manifold_parameters_(model)  # and again
    torch.testing.assert_close(outputs(model, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["torch", "llama"])
def test_points_are_certified_as_pairs(name, dtype):
    model, batch = made(name)
    names = {p.name for p in find(model).pairs}
    model.to(dtype)
    manifold_parameters_(model)
    batch = batch.to(dtype) if isinstance(batch, torch.Tensor) else batch
    certificate = verify(model, batch)
    assert certificate.ok
    assert {p.name for p in find(model).pairs} == names


def test_entries_in_no_pair_stay_parameters():
    """Three of four heads: the others' rows are trained as before."""
    model, x = made("torch")
    first = Symmetries(tuple(p for p in find(model).pairs if p.head == 0))
    expected, before = outputs(model, x), state(model)
    manifold_parameters_(model, symmetries=first)
    rest = model.self_attn.parametrizations.in_proj_weight.original
    assert rest.shape == (24, 8)
    assert rest.requires_grad
    assert int((rest == 0).all(1).sum()) == 12
    torch.testing.assert_close(outputs(model, x), expected, rtol=0, atol=0)
    outputs(model, x).sin().sum().backward()
    assert int((rest.grad == 0).all(1).sum()) == 12
    plain_parameters_(model)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


@pytest.mark.parametrize("name", ["torch", "gpt2", "bert"])
def test_dropped_key_biases_stay_parameters(name):
    model, batch = made(name)
    expected, before = outputs(model, batch), state(model)
    points = manifold_parameters_(model, symmetries=find(model).without_null())
    assert points[0].shape[1] == points[0].manifold.n + points[0].manifold.m == 2 * (8 if name == "torch" else 16) + 1
    torch.testing.assert_close(outputs(model, batch), expected, rtol=0, atol=0)
    plain_parameters_(model)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


def test_pairs_of_your_own_with_a_diagonal_group():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double(), torch.randn(5, 4)
    G, H = [slot(model, "0.weight", transpose=True), slot(model, "0.bias")], [slot(model, "1.weight")]
    expected = model(x)
    mine = find(model).adding(pair(G, H, GL(3, diagonal=True)))
    (point,) = manifold_parameters_(model, symmetries=mine)
    assert tuple(point.shape) == (1, 3, 7, 1)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert float(sharpness.evaluate(model, [x], loss, rho=0.1, progress=False)) > 0


def test_what_cannot_become_a_point_is_refused_and_nothing_changes():
    model, _ = made("bert")
    with pytest.raises(ValueError, match="metric must be"):
        manifold_parameters_(model, "euclidean")
    with pytest.raises(ValueError, match="Linear has no symmetric pair"):
        manifold_parameters_(nn.Linear(2, 2))
    lora = adapted(nn.Sequential(nn.Linear(6, 4)), ["0"])
    for name, p in lora.named_parameters():
        if "lora_B" in name:
            p.data.zero_()
    before = state(lora)
    with pytest.raises(ValueError, match=r"LoRA's B = 0.*create_quotient_lora_optimizer"):
        manifold_parameters_(lora)
    assert list(lora.state_dict()) == list(before)
    model, _ = made("torch")
    twice = nn.Sequential(model, nn.Linear(8, 8))
    found = find(twice)
    twice[1].weight = model.self_attn.out_proj.weight
    assert {r.kind for r in find(twice).refused} == {"vo"}
    with pytest.raises(ValueError, match="is a parameter of 2 modules"):
        manifold_parameters_(twice, symmetries=found)
    with pytest.raises(ValueError, match="no point of the quotient"):
        manifold_parameters_(made("torch")[0].bfloat16())
    lora, x = adapted(nn.Sequential(nn.Linear(6, 4)), ["0"]), torch.randn(5, 6)
    expected = lora(x)
    (point,) = manifold_parameters_(lora)
    assert tuple(point.shape) == (1, 10, 3)
    torch.testing.assert_close(lora(x), expected, rtol=0, atol=0)


def test_the_optimisers_of_this_package_train_real_points_and_say_so_of_complex_ones():
    model, batch = made("bert")
    twin = copy.deepcopy(model)
    manifold_parameters_(twin)
    for m in (model, twin):
        optimizer = create_quotient_optimizer(m, lr=1e-2, symmetries=find(m))
        for _ in range(3):
            optimizer.zero_grad()
            loss(m, batch).backward()
            optimizer.step()
    torch.testing.assert_close(outputs(model, batch), outputs(twin, batch), rtol=1e-8, atol=1e-10)
    model, _ = made("llama")
    manifold_parameters_(model)
    with pytest.raises(ValueError, match=r"is a complex point \(RoPE\).*plain_parameters_"):
        create_quotient_optimizer(model, lr=1e-2)


def test_two_kinds_in_two_calls():
    model, batch = made("bert")
    before, expected = find(model), outputs(model, batch)
    manifold_parameters_(model, "inv", symmetries=before.of_kind(["qk"]))
    manifold_parameters_(model, "mix")
    points = [p for p in model.parameters() if isinstance(p, geoopt.ManifoldParameter)]
    assert [p.manifold.metric.name for p in points] == ["inv", "mix"]
    torch.testing.assert_close(outputs(model, batch), expected, rtol=0, atol=0)
    expected = [(p.name, {"qk": "inv", "vo": "mix"}[p.kind]) for p in before.pairs]
    assert [(p.name, p.metric) for p in find(model).pairs] == expected

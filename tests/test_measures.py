"""The switches of the measures, through evaluate."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds.symmetries import apply_random_symmetry_, find_symmetric_pairs
from reproduction.rk4 import RungeKuttaBlock
from sharpness import MEASURES, Measure, get_measure

from . import networks

#: Blocks of one's own, as ablations have them.
ADAPTIVE = "reproduction.adaptive_norm:AdaptiveNormBlock"
ADDITIVE = "reproduction.additive:AdditiveBlock"
RK4 = "reproduction.rk4:RungeKuttaBlock"
FINE, COARSE = f"{__name__}:FineBlock", f"{__name__}:CoarseBlock"


class FineBlock(RungeKuttaBlock):
    substeps = 8


class CoarseBlock(RungeKuttaBlock):
    substeps = 1


@pytest.fixture(scope="module")
def trained():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    batch = networks.images()
    model = networks.train(networks.vit(), batch)
    twin = copy.deepcopy(model)
    apply_random_symmetry_(twin, 30.0, seed=1)
    return model, twin, batch


def values(trained, measure="geodesic-inv", **options):
    """Value of the model and of its twin on the same orbit, with changes of the measure among the options."""
    model, twin, batch = trained
    changes = {k: options.pop(k) for k in list(options) if k in ("geodesic", "symmetry", "relaxation", "pair_block")}
    options = {"measure": get_measure(measure, **changes), "rho": 0.1, "steps": 8, "relative_tol": 0, **options}
    return tuple(float(sharpness.evaluate(m, [batch], **options)) for m in (model, twin))


# -- symmetry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_symmetry_none_equals_adaptive(trained, metric):
    assert values(trained, measure=metric, symmetry="none") == values(trained, measure="adaptive")


def test_symmetry_of_one_kind(trained):
    model, _twin, batch = trained
    one, two = values(trained), values(trained, symmetry="none")
    for kind, other in (("qk", "vo"), ("vo", "qk")):
        half = values(trained, symmetry=kind)
        assert half[0] not in (one[0], two[0])
        # Only what is divided out may be moved.
        moved = copy.deepcopy(model)
        apply_random_symmetry_(moved, 30.0, seed=1, pairs=[p for p in find_symmetric_pairs(moved) if p.kind == kind])
        same = values((moved, moved, batch), symmetry=kind)[0]
        assert same == pytest.approx(half[0], rel=1e-8)
        unlike = values((moved, moved, batch), symmetry=other)[0]
        assert abs(unlike / values(trained, symmetry=other)[0] - 1) > 0.01
        of_kind = get_measure("geodesic-inv", symmetry=kind)
        found = sharpness.evaluate(model, [batch], measure=of_kind, rho=0.1, steps=1).direction(0).pairs
        assert {p.kind for p in found} == {kind}


# -- geodesic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "rho"), [("inv", 0.5), ("mix", 0.03)])
def test_runge_kutta_geodesics(trained, metric, rho):
    model, _twin, batch = trained
    base = MEASURES[f"geodesic-{metric}"]
    fine, coarse = (values(trained, measure=replace(base, pair_block=block), rho=rho) for block in (FINE, COARSE))
    assert fine[0] == pytest.approx(fine[1], rel=1e-8)
    second = values(trained, measure=base, rho=rho)[0]
    assert 0 < abs(coarse[0] - fine[0]) < abs(second - fine[0])
    # The direction that is handed out leads to the loss that was reported.
    result = sharpness.evaluate(model, [batch], measure=replace(base, pair_block=RK4), rho=rho, steps=4)
    with sharpness.perturbed(model, result.direction(0)), torch.no_grad():
        loss = float(F.cross_entropy(model(batch[0]).logits, batch[1]))
    assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)


@pytest.mark.parametrize(
    "how",
    [
        replace(MEASURES["geodesic-inv"], pair_block=RK4),
        replace(MEASURES["geodesic-mix"], pair_block=RK4),
        replace(MEASURES["geodesic-inv"], geodesic="exact"),
        replace(MEASURES["geodesic-mix"], geodesic="exact"),
        replace(MEASURES["geodesic-mix"], pair_block=ADAPTIVE),
        replace(MEASURES["geodesic-inv"], pair_block=ADAPTIVE, geodesic="first-order"),
        replace(MEASURES["geodesic-inv"], relaxation=0.01, pair_block=ADDITIVE),
        replace(MEASURES["geodesic-mix"], relaxation=0.01, pair_block=ADDITIVE),
    ],
    ids=lambda m: f"{m.pair_metric}-{m.geodesic}-{m.pair_block.split(':')[1]}",
)
def test_gradients_of_the_pulled_back_loss(trained, how):
    """By central differences along horizontal vectors."""
    model, _, (x, y) = trained
    space = sharpness.WeightSpace(model, how)
    generator = torch.Generator().manual_seed(3)
    xi, v = (space.random(generator) for _ in range(2))
    xi, v = xi * (0.02 / xi.norm()), v / v.norm()
    with space.attached():

        def loss(c):
            space.move_to(c)
            return F.cross_entropy(model(x).logits, y)

        g = space.gradient(loss(xi))
        with torch.no_grad():
            expected = float(loss(xi + 1e-5 * v) - loss(xi - 1e-5 * v)) / 2e-5
    assert float(g @ v) == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("metric", "rho"), [("inv", 0.5), ("mix", 0.03)])
def test_exact_geodesics(trained, metric, rho):
    model, _, batch = trained
    base = MEASURES[f"geodesic-{metric}"]
    exact = values(trained, measure=base, geodesic="exact", rho=rho)
    assert exact[0] == pytest.approx(exact[1], rel=1e-8)
    fine = values(trained, measure=replace(base, pair_block=FINE), rho=rho)[0]
    assert exact[0] == pytest.approx(fine, rel=1e-5)
    assert abs(exact[0] - values(trained, measure=base, rho=rho)[0]) > 10 * abs(exact[0] - fine)
    result = sharpness.evaluate(model, [batch], measure=replace(base, geodesic="exact"), rho=rho, steps=4)
    with sharpness.perturbed(model, result.direction(0)), torch.no_grad():
        loss = float(F.cross_entropy(model(batch[0]).logits, batch[1]))
    assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)
    assert result.batches[0].num_exited_pairs == 0


def test_geodesics_that_would_leave_the_manifold_are_shortened():
    """Scalar pairs leave at t = −1/(2B), where the product has shrunk to zero."""
    torch.manual_seed(3)
    model = networks.shake(nn.MultiheadAttention(1, 1, bias=False, batch_first=True), 0.7)
    x, y = torch.randn(6, 5, 1), torch.randn(6, 5, 1)

    def loss(model, batch):
        return -F.mse_loss(model(batch[0], batch[0], batch[0], need_weights=False)[0], batch[1])

    options = {"measure": get_measure("geodesic-mix", geodesic="exact"), "relative_tol": 0, "steps": 10}
    far = sharpness.evaluate(model, [(x, y)], loss, rho=3.0, **options)
    assert far.batches[0].num_exited_pairs > 0
    assert "geodesic would leave the manifold; it was shortened" in str(far)
    assert math.isfinite(float(far))
    near = sharpness.evaluate(model, [(x, y)], loss, rho=1e-3, **options)
    assert near.batches[0].num_exited_pairs == 0
    with sharpness.perturbed(model, far.direction(0)), torch.no_grad():
        assert float(loss(model, (x, y))) == pytest.approx(far.batches[0].worst_loss, rel=1e-6)


# -- norm --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_adaptive_norm_of_horizontal_vectors(trained, metric):
    model, _, batch = trained
    measure = get_measure(metric, pair_block=ADAPTIVE)
    result = sharpness.evaluate(model, [batch], measure=measure, rho=0.1, steps=5, relative_tol=0)
    direction = result.direction(0)
    parameters = dict(model.named_parameters())
    square = sum(float((v / parameters[n].detach()).square().sum()) for n, v in direction.tensors.items())
    assert math.sqrt(square) == pytest.approx(0.1, rel=1e-9)
    by_parameter = {parameters[n]: v for n, v in direction.tensors.items()}
    for pair in direction.pairs:
        manifold, x = pair.manifold(metric.removeprefix("geodesic-")), pair.gather().detach()
        u = torch.cat([by_parameter[b.tensor].as_strided(b.size, b.stride, b.offset) for b in pair.G + pair.H])
        assert float((manifold.proju(x, u) - u).norm()) < 1e-7 * float(u.norm())
    one, two = values(trained, measure=metric, pair_block=ADAPTIVE)
    assert abs(one / two - 1) > 0.05  # it is the metric's norm that makes the measure invariant


# -- relaxation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_relaxation(trained, metric):
    exact = values(trained, measure=metric, rho=0.02)
    floor = values(trained, measure=metric, rho=0.02, relaxation=0.3)
    assert floor[0] == pytest.approx(floor[1], rel=1e-8)
    assert abs(floor[0] / exact[0] - 1) > 1e-3
    tiny = values(trained, measure=metric, rho=0.02, relaxation=1e-12, pair_block=ADDITIVE)
    assert tiny[0] == pytest.approx(exact[0], rel=1e-6)
    large = values(trained, measure=metric, rho=0.02, relaxation=0.1, pair_block=ADDITIVE)
    assert abs(large[0] / large[1] - 1) > 0.01


def test_directions_at_the_floor_are_counted(trained):
    model, _, batch = trained
    sigma = [
        torch.linalg.svdvals(p.manifold().to_matrix(p.gather().detach()))[: p.group.h]
        for p in find_symmetric_pairs(model)
    ]
    expected = sum(int((s < 0.2 * s[0]).sum()) for s in sigma)
    relaxed = get_measure("geodesic-mix", relaxation=0.2)
    result = sharpness.evaluate(model, [batch], measure=relaxed, rho=0.01, steps=1)
    assert result.num_clamped == expected > 0
    assert f"floor replaces {expected} singular values" in str(result)
    assert result.to_dict()["num_clamped"] == expected
    assert sharpness.evaluate(model, [batch], measure="geodesic-mix", rho=0.01, steps=1).num_clamped == 0


# -- statistic and ball -----------------------------------------------------------------------------------------------


def test_average_case_of_a_quadratic_is_half_the_trace():
    model = nn.Linear(3, 1, bias=False)
    H = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 0.5]])

    def loss(model, batch):
        w = model.weight[0]
        return 0.5 * w @ H @ w

    options = {"rho": 0.1, "statistic": "average", "num_samples": 4000}
    plain = sharpness.evaluate(model, [0], loss, measure="euclidean", **options).batches[0]
    assert plain.value == pytest.approx(0.5 * 0.1**2 * float(H.trace()), abs=4 * plain.std_error)
    w = model.weight.detach()[0]
    scaled = sharpness.evaluate(model, [0], loss, measure="adaptive", **options).batches[0]
    assert scaled.value == pytest.approx(0.5 * 0.1**2 * float(w**2 @ H.diagonal()), abs=4 * scaled.std_error)
    assert plain.passes == 4001
    assert len(plain.history) == 4000


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_average_case_and_gradient_norm_are_invariant(trained, metric):
    rho = 0.01 if metric == "geodesic-inv" else 0.002
    one, two = values(trained, measure=metric, statistic="average", rho=rho)
    assert one == pytest.approx(two, rel=1e-6)
    one, two = values(trained, measure="adaptive", statistic="average", rho=rho)
    assert abs(one / two - 1) > 0.01
    one, two = (sharpness.gradient_norm(m, [trained[2]], measure=metric).gradient_norm for m in trained[:2])
    assert one == pytest.approx(two, rel=1e-8)
    small = values(trained, measure=metric, rho=1e-4)[0] / 1e-4
    assert small == pytest.approx(one, rel=0.02)
    one, two = (sharpness.gradient_norm(m, [trained[2]], measure="adaptive").gradient_norm for m in trained[:2])
    assert abs(one / two - 1) > 0.01


@pytest.mark.parametrize("ascent", ["power", "apgd"])
def test_the_cube(trained, ascent):
    model, _, (x, y) = trained
    result = sharpness.evaluate(
        model,
        [(x, y)],
        measure=get_measure("adaptive", ball_norm=math.inf),
        rho=1e-5,
        steps=5,
        relative_tol=0,
        ascent=ascent,
        restarts=1,
    )
    loss = F.cross_entropy(model(x).logits, y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    slope = sum(float((g * p.detach()).abs().sum()) for g, p in zip(gradients, model.parameters(), strict=True))
    assert float(result) == pytest.approx(1e-5 * slope, rel=0.01)
    parameters = dict(model.named_parameters())
    for name, v in result.direction(0).tensors.items():
        assert float((v / parameters[name].detach()).abs().max()) <= 1e-5 * (1 + 1e-9)
    assert "ball_norm=inf" in str(result)


def test_every_ascent_and_radius_is_independent_of_the_list(trained):
    model, _, batch = trained
    options = {"rho": [0.05, 0.2], "restarts": 1, "steps": 6}
    together = sharpness.evaluate(model, [batch, batch], **options)
    for rho in options["rho"]:
        alone = sharpness.evaluate(model, [batch, batch], **{**options, "rho": rho})
        assert float(alone) == float(together[rho])


# -- bad combinations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "switches", "words"),
    [
        ("adaptive", {"geodesic": "first-order"}, "geodesic says how symmetric pairs are treated"),
        ("euclidean", {"pair_block": ADAPTIVE}, "pair_block says how symmetric pairs"),
        ("adaptive", {"symmetry": "qk"}, "symmetry says how"),
        ("adaptive", {"relaxation": 1e-3}, "relaxation says how"),
        ("geodesic-inv", {"ball_norm": math.inf}, "not defined on a quotient"),
        ("geodesic-inv", {"ball_norm": 3}, "ball_norm must be one of"),
        ("geodesic-inv", {"geodesic": "third-order"}, "geodesic must be one of"),
        ("geodesic-inv", {"relaxation": -1.0}, "relaxation must not be negative"),
        ("geodesic-inv", {"pair_block": "nowhere"}, "pair_block must be 'module:class'"),
    ],
)
def test_combinations_without_meaning(name, switches, words):
    with pytest.raises(ValueError, match=words):
        get_measure(name, **switches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measure": get_measure("geodesic-inv", pair_block=ADDITIVE, geodesic="exact")}, "no geodesic equation"),
        ({"measure": get_measure("geodesic-inv", pair_block=ADDITIVE, relaxation=0.0)}, "must be positive"),
        ({"statistic": "average", "restarts": 1}, "restarts belong to statistic='worst'"),
        (
            {"measure": get_measure("adaptive", ball_norm=math.inf), "statistic": "average"},
            "ball_norm = inf means nothing",
        ),
        ({"ascent": "newton"}, "unknown ascent 'newton'; choose one of power, apgd"),
        ({"relative_tol": -1}, "relative_tol must be a number of at least 0"),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1"),
        ({"measure": Measure("own"), "rho": None}, "the measure 'own' has no default"),
    ],
)
def test_bad_arguments(trained, options, words):
    model, _, batch = trained
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(model, [batch], **{"rho": 0.1, **options})

import copy
import io
import re
import sys

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import sharpness
from quotient_manifolds import GLQuotientInv, GLQuotientMix, symmetries
from quotient_manifolds.symmetries import UnknownAttentionError, find, move_, stacks
from quotient_manifolds.weights import ByClass
from sharpness import evaluation
from tests.support import networks
from tests.support.extent import EXHAUSTIVE, checkered
from tests.support.measured import values
from tests.support.snapshots import ALL, GEODESIC, assert_same, snapshot


@pytest.mark.parametrize("measure", ALL)
def test_invariance_along_orbits_in_float64(trained_model, measure):
    model, batch = trained_model
    twin = copy.deepcopy(model)
    assert move_(twin, condition=1e3, seed=2)
    options = {"measure": measure, "rho": 0.05 if measure == "geodesic-mix" else 0.2, "steps": 5, "restarts": 1}
    one, two = (float(sharpness.evaluate(m, [batch], **options)) for m in (model, twin))
    if measure in GEODESIC:
        assert abs(two - one) < 1e-8 * one
    else:
        assert abs(two - one) > 0.05 * one


@pytest.mark.parametrize(("measure", "rho"), checkered(ALL, (0.1, 0.5)))
def test_invariance_along_orbits_in_float32(measure, rho):
    torch.set_default_dtype(torch.float32)
    batch = networks.images()
    model = networks.trained_vit()
    twin = copy.deepcopy(model)
    move_(twin, condition=1e3, seed=2)
    one, two = (float(sharpness.evaluate(m, [batch], measure=measure, rho=rho)) for m in (model, twin))
    if measure in GEODESIC:
        # The moved weights are rounded, which an ascent may enlarge: as much as it does in float64 for these weights.
        wide, options = [(batch[0].double(), batch[1])], {"measure": measure, "rho": rho}
        first, second = (float(sharpness.evaluate(copy.deepcopy(m).double(), wide, **options)) for m in (model, twin))
        assert abs(two - one) < 1e-3 * one + abs(second - first)
    else:
        assert abs(two - one) > 0.05 * one


class Reference:
    """The loss over the ball of a measure from the manifolds' public methods, without WeightSpace and its coordinates.

    The variable is an unconstrained ambient tangent vector; pairs are projected and retracted by the manifold.
    """

    def __init__(self, model, batch, measure):
        self.model, self.batch = model, batch
        self.names = [n for n, _ in model.named_parameters()]
        self.params = [p.detach() for p in model.parameters()]
        cls = {"geodesic-inv": GLQuotientInv, "geodesic-mix": GLQuotientMix}.get(measure)
        weights = dict(model.named_parameters())
        self.stacks = [] if cls is None else stacks(find(model).pairs, weights)
        self.manifolds = [cls(s.n, s.m) for s in self.stacks]
        self.points = [s.gather(weights).detach() for s in self.stacks]
        covered = {name for s in self.stacks for name in s.names}
        self.free = [i for i, name in enumerate(weights) if name not in covered]
        self.weights = [1.0 if measure == "euclidean" else self.params[i].abs() for i in self.free]
        sizes = [self.params[i].numel() for i in self.free] + [x.numel() for x in self.points]
        self.sizes, self.dim = sizes, sum(sizes)

    def vectors(self, v):
        parts = v.split(self.sizes)
        free = [p.view_as(self.params[i]) for p, i in zip(parts, self.free, strict=False)]
        pairs = [p.view_as(x) for p, x in zip(parts[len(self.free) :], self.points, strict=True)]
        return free, [m.proju(x, u) for m, x, u in zip(self.manifolds, self.points, pairs, strict=True)]

    def square(self, v):
        """Squared norm of the horizontal part."""
        free, pairs = self.vectors(v)
        total = sum(((f / w) ** 2).sum() for f, w in zip(free, self.weights, strict=True))
        return total + sum(m.inner(x, u).sum() for m, x, u in zip(self.manifolds, self.points, pairs, strict=True))

    def loss(self, v):
        free, pairs = self.vectors(v)
        moved = dict(zip(self.names, self.params, strict=True))
        for f, i in zip(free, self.free, strict=True):
            moved[self.names[i]] = self.params[i] + f
        for s, m, x, u in zip(self.stacks, self.manifolds, self.points, pairs, strict=True):
            end = m.retr(x, u)
            for run in s.runs:
                name, part = run.slot.name, end[run.points, run.rows]
                flat = moved[name].reshape(-1)
                index = run.slot.of(torch.arange(flat.numel()).view(moved[name].shape))
                moved[name] = flat.index_put((index.reshape(-1),), part.reshape(-1)).view(moved[name].shape)
        return F.cross_entropy(torch.func.functional_call(self.model, moved, (self.batch[0],)), self.batch[1])

    def basis(self):
        """Columns that span the horizontal vectors, orthonormal in the metric, from its matrix."""
        weights = [
            torch.as_tensor(w).expand(self.params[i].shape) for w, i in zip(self.weights, self.free, strict=True)
        ]
        scale = torch.cat([w.reshape(-1) for w in weights] + [torch.ones(x.numel()) for x in self.points])
        form = torch.func.hessian(lambda v: self.square(scale * v) / 2)(torch.zeros(self.dim))
        values, vectors = torch.linalg.eigh(form)
        keep = values > 1e-9 * values.max()
        assert keep.sum() == self.dim - sum(len(s) * s.group.h**2 for s in self.stacks)
        return scale[:, None] * vectors[:, keep] / values[keep].sqrt()

    def coordinates(self, basis, direction):
        """Coordinates of a result's direction, from its definition: what the basis makes of them is the direction."""
        twin = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, p in twin.named_parameters():
                p.copy_(direction.tensors[name])
        weights = dict(twin.named_parameters())
        tensors = [p.detach() for p in weights.values()]
        pairs = [s.gather(weights).detach() for s in (stacks(find(twin).pairs, weights) if self.stacks else [])]
        v = torch.cat([t.reshape(-1) for t in [*(tensors[i] for i in self.free), *pairs]])
        horizontal = torch.stack([torch.cat([u.reshape(-1) for us in self.vectors(b) for u in us]) for b in basis.T], 1)
        z = torch.linalg.lstsq(horizontal, v[:, None]).solution[:, 0]
        torch.testing.assert_close(horizontal @ z, v, rtol=1e-6, atol=1e-9)
        return z.numpy()

    def best(self, rho, basis, starts):
        """The largest loss that SLSQP finds within the ball from some starts."""

        def loss(z):
            v = torch.from_numpy(z.copy()).requires_grad_()
            value = -self.loss(basis @ v)
            return float(value.detach()), torch.autograd.grad(value, v)[0].numpy()

        found = []
        for z in starts:
            constraint = {"type": "ineq", "fun": lambda z: rho**2 - z @ z, "jac": lambda z: -2 * z}
            result = scipy.optimize.minimize(
                loss, z * rho / np.linalg.norm(z), jac=True, method="SLSQP", constraints=constraint,
                options={"maxiter": 100, "ftol": 1e-9},
            )  # fmt: skip
            inside = result.x * min(1.0, rho / np.linalg.norm(result.x))
            found.append(-loss(inside)[0])
        return max(found)


@pytest.mark.parametrize("measure", ALL)
def test_value_against_constrained_maximisation(measure):
    batch = networks.tokens(count=10, width=4)
    model = networks.train(networks.shake(networks.TinyAttention(), 0.5), batch, steps=60)
    assert sum(p.numel() for p in model.parameters()) < 200
    rho = {"geodesic-inv": 0.1, "geodesic-mix": 0.3, "adaptive": 0.5, "euclidean": 0.3}[measure]
    reference = Reference(model, batch, measure)
    base = float(reference.loss(torch.zeros(reference.dim)))
    result = sharpness.evaluate(model, [batch], measure=measure, rho=rho, steps=100, restarts=5)
    found, basis = float(result), reference.basis()
    assert found > 0.01
    # The oracle has the value at the place found, within the ball. It climbs from there, and from random places. These
    # may end in other maxima, which no search of so many steps finds for certain; half of them are not larger.
    z = reference.coordinates(basis, result.direction(0))
    assert np.linalg.norm(z) < rho * (1 + 1e-9)
    assert float(reference.loss(basis @ torch.from_numpy(z))) - base == pytest.approx(found, rel=1e-6)
    rng = np.random.default_rng(0)
    others = [reference.best(rho, basis, [rng.standard_normal(basis.shape[1])]) for _ in range(31 if EXHAUSTIVE else 3)]
    assert found > 0.9 * (reference.best(rho, basis, [z]) - base)
    assert found > 0.9 * (np.median(others) - base)


def test_first_order_inv_equals_adaptive_for_scalar_pairs():
    # Paper, App. F: with h = n = m = 1 the linear horizontal ball holds the maximum of the adaptive one.
    torch.manual_seed(3)
    model = networks.shake(nn.MultiheadAttention(1, 1, bias=False, batch_first=True), 0.7)
    x, y = torch.randn(6, 5, 1), torch.randn(6, 5, 1)

    def loss(model, batch):
        return F.mse_loss(model(batch[0], batch[0], batch[0], need_weights=False)[0], batch[1])

    options = {"rho": 0.1, "steps": 200, "restarts": 2, "relative_tol": 1e-10}
    inv = float(
        sharpness.evaluate(
            model, [(x, y)], loss, measure=sharpness.get_measure("geodesic-inv", geodesic="first-order"), **options
        )
    )
    adaptive = float(sharpness.evaluate(model, [(x, y)], loss, measure="adaptive", **options))
    curved = float(sharpness.evaluate(model, [(x, y)], loss, measure="geodesic-inv", **options))
    assert abs(inv - adaptive) < 1e-8 * adaptive
    assert abs(curved - adaptive) > 1e-4 * adaptive


def test_inside_no_grad_and_inference_mode():
    model, batch = networks.vit(), networks.images()
    expected = float(sharpness.evaluate(model, [batch], rho=0.1, steps=3))
    with torch.no_grad():
        assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=3)) == expected
    with torch.inference_mode():
        assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=3)) == expected
    for rho in (np.float64(0.1), torch.tensor(0.1)):
        assert float(sharpness.evaluate(model, [batch], rho=rho, steps=3)) == expected


def test_several_radii_and_batches():
    model = networks.vit()
    batches = [networks.images(seed=s) for s in range(3)]
    result = sharpness.evaluate(model, iter(batches), rho=[0.05, 0.1], steps=5)
    assert result.rhos == (0.05, 0.1)
    with pytest.raises(ValueError, match=r"several radii were measured; take result\[rho\]"):
        float(result)
    for rho in (0.05, 0.1):
        alone = sharpness.evaluate(model, batches, rho=rho, steps=5)
        assert float(alone) == float(result[rho])
        assert float(alone) == pytest.approx(sum(b.value for b in alone.batches) / 3)
        assert [b.batch for b in alone.batches] == [0, 1, 2]
        assert result[rho].batches[1].worst_loss == alone.batches[1].worst_loss
    one = sharpness.evaluate(model, [batches[1]], rho=0.1, steps=5)
    assert float(one) == result[0.1].batches[1].value


def test_error_rates():
    model, (x, y) = networks.vit(), networks.images()
    y = model(x).logits.argmax(1)  # everything right at the weights
    result = sharpness.evaluate(model, [(x, y)], rho=0.8)
    found = result.batches[0]
    assert found.base_error == 0
    with sharpness.perturbed(model, result.direction(0)):
        worst = float((model(x).logits.argmax(1) != y).double().mean())
    assert 0 < worst <= found.worst_error == result.error_increase
    custom = sharpness.evaluate(model, [(x, y)], lambda m, b: F.cross_entropy(m(b[0]).logits, b[1]), rho=0.8)
    assert float(custom) == pytest.approx(float(result))
    assert custom.error_increase is None


def with_dropout(model, batch):
    return F.cross_entropy(F.dropout(model(batch[0]).logits, 0.5, training=True), batch[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": 0.0}, "rho must be one or several positive"),
        ({"rho": -1}, "rho must be one or several positive"),
        ({"rho": []}, "rho must be one or several positive"),
        ({"rho": [0.1, 0.1]}, "names a radius twice"),
        ({"rho": float("nan")}, "rho must be one or several positive"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"restarts": -1}, "restarts must be a whole number of at least 0"),
        ({"measure": "flatness"}, "unknown measure 'flatness'; choose one of geodesic-inv"),
        ({"batches": []}, "batches is empty"),
        ({"batches": [(torch.ones(0, 1, 8, 8), torch.ones(0).long())]}, "a batch has no labels; leave it out"),
        ({"batches": [torch.ones(3)]}, "a batch is a dict .* pass loss_fn"),
        ({"batches": {"pixel_values": 1}}, "batches is a single dict; wrap it in a list"),
        ({"batches": networks.images()}, "wrap a single batch in a list"),
        ({"rho": "0.1"}, "rho must be one or several positive"),
        ({"loss_fn": nn.CrossEntropyLoss()}, "CrossEntropyLoss cannot be one"),
        ({"batches": [{"pixel_values": torch.ones(2, 1, 8, 8)}]}, "returned no loss for a dict .* add the labels"),
        ({"loss_fn": with_dropout}, "two identical passes .*gave different losses"),
        ({"loss_fn": lambda m, b: F.cross_entropy(m(b[0]).logits, b[1]) * float("nan")}, "the loss of batch 0 is nan"),
        ({"loss_fn": lambda m, b: m(b[0]).logits}, "must be a scalar"),
        ({"loss_fn": lambda m, b: 1.0}, "must return a scalar tensor"),
        ({"loss_fn": lambda m, b: torch.tensor(1.0)}, "depends on none of the weights that are measured"),
    ],
    ids=lambda v: v.replace(" ", "-") if isinstance(v, str) else next(iter(v)),
)
def test_bad_input_is_named(options, words):
    model = networks.vit()
    before = snapshot(model)
    arguments = {"batches": [networks.images()], "rho": 0.1, "steps": 2, **options}
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(model, arguments.pop("batches"), arguments.pop("loss_fn", None), **arguments)
    assert_same(snapshot(model), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_in_main_memory_of_a_model_on_a_gpu():
    model, batch = networks.vit(), networks.images()
    expected = float(sharpness.evaluate(model, [batch], rho=0.1, steps=2))
    assert float(sharpness.evaluate(model.cuda(), [batch], rho=0.1, steps=2)) == pytest.approx(expected, rel=1e-6)


class Mystery(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.out(F.scaled_dot_product_attention(*self.mix(x).chunk(3, -1)).mean(1)))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


class Readable(nn.Module):
    """Attention that can be examined, beside a second layer that the batch does not reach."""

    def __init__(self):
        super().__init__()
        self.used, self.idle, self.head = Attending(), Attending(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.used(x).mean(1))


@pytest.mark.filterwarnings("ignore:.*no adapter describes")
@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix", "complete-inv", "complete-mix"])
def test_unknown_attention_is_examined_on_the_first_batch(measure):
    model, batch = networks.shake(Readable()), networks.tokens()
    before, options = snapshot(model), {"measure": measure, "rho": 0.1, "steps": 3}
    found = sharpness.evaluate(model, [batch, batch], **options)
    assert_same(snapshot(model), before)
    remark = "layers of classes without a handler were examined on the first batch: Attending (2 pairs; "
    assert found.remarks[0] == remark + "the batch does not reach it)"
    assert found.remarks[-1].endswith("so the result says nothing about them: idle")
    known = find(model, batch)
    assert {p.name for p in found.direction(0).symmetries.pairs} == {p.name for p in known.pairs}
    given = sharpness.evaluate(model, [batch, batch], symmetries=known, **options)
    assert float(given) == float(found)
    twin = copy.deepcopy(model)
    move_(twin, find(twin, batch), condition=30.0)
    assert float(sharpness.evaluate(twin, [batch, batch], **options)) == pytest.approx(float(found), rel=1e-8)
    with torch.no_grad(), sharpness.perturbed(model, found.direction(0)) as moved:
        loss = float(F.cross_entropy(moved(batch[0]), batch[1]))
    assert loss == pytest.approx(found.batches[0].worst_loss, rel=1e-8)
    if "geodesic" in measure:
        for local in (sharpness.gradient_norm, *([sharpness.hessian] if EXHAUSTIVE or "inv" in measure else [])):
            one, two = (local(m, [batch], measure=measure) for m in (model, twin))
            assert float(one) == pytest.approx(float(two), rel=1e-8)
            assert one.remarks[0] == found.remarks[0]


def test_attention_that_cannot_be_examined_is_refused_with_what_to_do(monkeypatch):
    model, batch = networks.shake(nn.Sequential(Mystery())), networks.tokens()
    before = snapshot(model)
    for measure in GEODESIC:
        with pytest.raises(UnknownAttentionError, match=r"module '0' of class .*Mystery computes attention") as caught:
            sharpness.evaluate(model, [batch], measure=measure, rho=0.1)
    assert_same(snapshot(model), before)
    for measure in ("adaptive", "euclidean"):
        assert float(sharpness.evaluate(model, [batch], measure=measure, rho=0.1)) > 0
    known = symmetries.attention.HANDLERS
    monkeypatch.setattr(known, "of", (handlers := ByClass(known)).of)
    monkeypatch.setattr(known, "register", handlers.register)
    name = f"{__name__}.Mystery"
    assert f"skip({name!r})" in str(caught.value)
    symmetries.skip(name)
    assert float(sharpness.evaluate(model, [batch], rho=0.1)) > 0


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit, self.readable = networks.vit(), Readable()

    def forward(self, x):
        return self.vit(x).logits + self.readable(x.squeeze(1))


def test_a_hook_beside_unknown_attention_is_named_too():
    """All pairs of such a model are certified on the batch, those of known classes too."""
    model, batch = networks.shake(Both()), networks.images()
    attention = networks.vit_layers(model.vit)[0].attention
    networks.projections(attention)[2].register_forward_hook(lambda m, x, y: y.relu())
    wrong = [p.name for p in find(model).pairs if "vo" in p.name and ".0." in p.name]
    assert sharpness.evaluate(model, [batch], rho=0.1, steps=1).remarks[:2] == (
        "layers of classes without a handler were examined on the first batch: Attending (2 pairs; "
        "the batch does not reach it)",
        f"left out, for {symmetries.Cause.CHANGES.value}: {', '.join(wrong)}",
    )


def test_registered_attention_is_measured(monkeypatch):
    known = symmetries.attention.HANDLERS
    monkeypatch.setattr(known, "of", (handlers := ByClass(known)).of)
    monkeypatch.setattr(known, "register", handlers.register)

    @symmetries.register_attention(Mystery)
    def mystery(module):
        q, k, v = (symmetries.Projection(module, "mix", start=8 * i) for i in range(3))
        out = symmetries.Projection(module, "out")
        return symmetries.attention_pairs(symmetries.Heads(1, size=8), q=q, k=k, v=v, o=out)

    model, batch = networks.shake(Mystery()), networks.tokens()
    twin = copy.deepcopy(model)
    assert sum(move_(twin).values()) == 2
    one, two = (float(sharpness.evaluate(m, [batch], rho=0.1)) for m in (model, twin))
    assert abs(one - two) < 1e-8 * one


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model():
    model, batch = networks.shake(networks.Encoder()), networks.tokens()
    expected = sharpness.evaluate(model, [batch], rho=0.1, steps=3)
    compiled = torch.compile(model, backend="eager")
    result = sharpness.evaluate(compiled, [batch], rho=0.1, steps=3)
    assert float(result) == pytest.approx(float(expected), rel=1e-10)
    with sharpness.perturbed(compiled, expected.direction(0)) as moved, torch.no_grad():
        loss = float(F.cross_entropy(moved(batch[0]), batch[1]))
    assert loss == pytest.approx(expected.batches[0].worst_loss, rel=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_computed_weights_count_without_symmetry():
    model, batch = networks.vit(), networks.images()
    prune.random_unstructured(networks.projections(networks.vit_layers(model)[0].attention)[0], "weight", amount=0.2)
    refused = find(model).refused
    assert [r.cause for r in refused] == [symmetries.Cause.COMPUTED] * 2
    assert refused[0].reason.startswith(f"computed, not a parameter: {refused[0].module}.")
    assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=2)) > 0


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_by_geodesic_measures():
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 3))
    batch = (torch.randn(4, 8), torch.randint(3, (4,)))
    with pytest.raises(UnknownAttentionError, match="TorchScript"):
        sharpness.evaluate(model, [batch], rho=0.1)


def test_a_flat_start_begins_in_a_random_direction_and_says_so():
    model = networks.TinyAttention()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    x, y = networks.tokens(count=9, width=4)
    y = torch.arange(9) % 3  # balanced: the gradient of the bias vanishes too

    def saddle(model, batch):
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1]) + scores.square().mean()

    result = sharpness.evaluate(model, [(x, y)], saddle, measure="euclidean", rho=0.5)
    assert not result.batches[0].random_start
    result = sharpness.evaluate(model, [(x, y)], lambda m, b: m(b[0]).square().mean(), measure="euclidean", rho=0.5)
    assert result.batches[0].random_start
    assert float(result) > 0.01
    assert "random direction" in str(result)


def test_a_point_of_a_smaller_ball_says_nothing_of_the_search_in_a_larger_one():
    """It kept the gap of the smaller ball, and stood as converged where nothing was known."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)

    def peak(model, x):  # at the smaller radius; on the way in from the larger one there is a lower slope
        return torch.exp(-(((model(x) - 1.1) / 0.03) ** 2)).sum()

    for tol in (3e-4, 0.0):
        options = {"measure": "euclidean", "rho": [0.1, 0.3], "relative_tol": tol, "progress": False}
        small, large = sharpness.evaluate(model, [torch.ones(1, 1)], peak, **options).batches
        assert (large.value, large.worst_loss, large.distance) == (small.value, small.worst_loss, small.distance)
        assert small.value == pytest.approx(1, abs=1e-4)
        assert (small.converged, large.converged) == ((True, False) if tol else (None, None))
        assert small.fw_gap == pytest.approx(0, abs=1e-6)
        assert large.fw_gap is None


def test_restarts_never_lower_the_value_and_depend_on_the_seed():
    model, batch = networks.vit(), networks.images()
    values = [float(sharpness.evaluate(model, [batch], rho=0.3, steps=3, restarts=k)) for k in range(3)]
    assert values == sorted(values)
    again = float(sharpness.evaluate(model, [batch], rho=0.3, steps=3, restarts=2))
    assert again == values[2]


def test_lora_before_training_has_no_direction_to_move_in():
    layer = nn.Linear(4, 4)
    A, B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))
    layer.requires_grad_(False)
    layer.A, layer.B = A, B
    G, H = symmetries.slot(layer, "B"), symmetries.slot(layer, "A", transpose=True)
    own = symmetries.Symmetries((symmetries.pair([G], [H], symmetries.GL(2)),))

    def loss(model, batch):
        return (batch + batch @ model.A.T @ model.B.T).square().mean()

    with pytest.raises(ValueError, match="no direction to move in"):
        sharpness.evaluate(layer, [torch.randn(3, 4)], loss, rho=0.1, symmetries=own)


BOUNDED = {
    "sine": lambda m, b: torch.sin(3 * m(b[0]).square().sum()),
    "error": lambda m, b: 1 - m(b[0]).softmax(1).gather(1, b[1][:, None]).mean(),
    "bump": lambda m, b: torch.exp(-(m(b[0]) - 1).square().sum()),
    "tanh": lambda m, b: m(b[0]).tanh().mean(),
    "entropy": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "square": lambda m, b: m(b[0]).square().mean(),
}


class Mean(nn.Module):
    """An attention layer whose tokens are averaged to scores."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


@pytest.mark.parametrize(
    ("measure", "loss"), checkered(("geodesic-inv", "geodesic-mix", "adaptive", "euclidean"), BOUNDED)
)
def test_sharpness_never_falls_with_the_radius(measure, loss):
    torch.manual_seed(3)
    model, batch = Mean(), (torch.randn(6, 3, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
    radii = [0.05 * 3**k for k in range(6)]
    for ascent in ("power", "apgd"):
        result = sharpness.evaluate(
            model, [batch], BOUNDED[loss], measure=measure, rho=radii, steps=5, ascent=ascent, progress=False
        )
        values = [float(result[rho]) for rho in radii]
        assert values == sorted(values)
        assert values[0] > 0
        for r in result.batches:
            assert 0 < r.distance <= r.rho * (1 + 1e-9)
            direction = result[r.rho].direction(0)
            assert direction.norm == pytest.approx(r.distance)
            with torch.no_grad(), sharpness.perturbed(model, direction):
                assert float(BOUNDED[loss](model.eval(), batch)) == pytest.approx(r.worst_loss, abs=1e-7)


def test_the_sphere_alone_would_fall(monkeypatch):
    """What the test above is for: one radius by itself finds what lies inside the ball, and the sphere does not."""
    model, batch = nn.Linear(2, 1, bias=False), (torch.tensor([[1.0, 0.3]]), None)
    model.weight.data = torch.tensor([[1.0, 2.0]])

    def sine(m, b):
        return torch.sin(3 * m(b[0])).sum()

    options = {"measure": "euclidean", "progress": False}
    inside = [sharpness.evaluate(model, [batch], sine, rho=rho, **options) for rho in (0.5, 1.0, 2.0)]
    assert all(float(r) > 1 for r in inside)
    monkeypatch.setattr("sharpness.evaluation._HALVINGS", 0)
    on_sphere = [float(sharpness.evaluate(model, [batch], sine, rho=rho, **options)) for rho in (0.5, 1.0, 2.0)]
    assert min(on_sphere) < 0.9 * max(on_sphere)


class Weights(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))


@pytest.mark.parametrize("where", [0.3, 0.55, 0.74])
@pytest.mark.parametrize("ascent", ["power", "apgd"])
def test_a_maximum_inside_the_ball_is_found_and_the_gap_is_that_of_the_whole_ball(where, ascent):
    """1 − |w − p|² has its maximum 1 at p; on spheres of radius r it is 1 − (r − |p|)², where the search ended."""
    model, peak = Weights(3), torch.tensor([where, 0, 0])

    def loss(m, _):
        return 1 - (m.w - peak).square().sum()

    def found(**options):
        options = {"measure": "euclidean", "rho": 1.0, "ascent": ascent, "progress": False, **options}
        return sharpness.evaluate(model, [torch.zeros(1)], loss, **options)

    result = found(steps=40)
    (batch,) = result.batches
    assert batch.value == pytest.approx(where**2, rel=1e-3)
    near = found(steps=40, relative_tol=0.1)
    assert near.batches[0].converged
    for one, tol in ((result, 3e-4), (near, 0.1)):
        (batch,), x = one.batches, one.direction(0).tensors["w"]
        slope = 2 * (peak - x)
        gap = float(slope.norm() - slope @ x)
        assert batch.fw_gap in (None, pytest.approx(gap, rel=1e-6, abs=1e-12))  # None where the last point is the best
        assert batch.converged == (batch.fw_gap is not None and gap <= tol * batch.value)
    assert found(steps=40, relative_tol=0.0).batches[0].converged is None


def test_a_maximum_at_the_weights_stays_there():
    model = Weights(3)
    options = {"measure": "euclidean", "rho": 1.0, "progress": False, "steps": 3}
    result = sharpness.evaluate(model, [0], lambda m, _: 1 - m.w.square().sum(), **options)
    (batch,) = result.batches
    assert (batch.value, batch.distance, batch.fw_gap, batch.converged, batch.random_start) == (0, 0, 0, True, True)


def test_a_gradient_of_zero_is_not_none():
    """At a stationary point every weight takes part; it stood there that the result says nothing about them."""
    model = Weights(3)
    model.idle = nn.Parameter(torch.zeros(1))
    zero = "3 of 4 weights have a gradient of exactly 0 on every batch, so to first order no loss changes with them: w"
    none = "1 of 4 weights got no gradient from any batch, so the result says nothing about them: idle"

    def loss(m, b):
        return (b * m.w).square().sum()

    options = {"measure": "euclidean", "progress": False}
    assert sharpness.gradient_norm(model, [1.0, 2.0], loss, **options).remarks == (none, zero)
    assert sharpness.evaluate(model, [1.0], loss, rho=0.1, **options).remarks == (none, zero)
    with torch.no_grad():
        model.w[0] = 1
    assert sharpness.gradient_norm(model, [0.0, 2.0], loss, **options).remarks == (none,)


def test_of_several_batches_derivatives_are_means():
    """diag(4, 0) and diag(0, 4) have the largest eigenvalue 4, their mean has 2; |(8, 0)| and |(0, 8)| are 8."""
    model, batches = Weights(2), [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    options = {"loss_fn": lambda m, b: 2 * (b @ m.w).square().mean(), "measure": "euclidean", "progress": False}
    with torch.no_grad():
        model.w.fill_(2)
    several = sharpness.hessian(model, batches, **options)
    assert (float(several), several.trace) == (pytest.approx(4), pytest.approx(4))
    assert str(several).startswith("largest eigenvalue 4, trace 4")
    assert "mean over 2 batches (euclidean)" in str(several)
    norm = sharpness.gradient_norm(model, batches, **options)
    assert str(norm) == "gradient norm 8, mean over 2 batches (euclidean)"
    for passes in ({}, {"micro_batch": 1}):
        whole = sharpness.hessian(model, [torch.cat(batches)], **options, **passes)
        assert float(whole) == pytest.approx(2)
        assert "batches" not in str(whole)
        assert float(sharpness.gradient_norm(model, [torch.cat(batches)], **options)) == pytest.approx(4 * 2**0.5)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_canonical_form_is_compared_as_precisely_as_the_model_computes(wrong):
    """Float64 weights, but float32 within, as in ModernBERT's softmax: the loss differs by 1e-8, not by 1e-15."""
    model, batch = networks.vit(layers=1), networks.images()
    options = {"measure": "complete-inv", "rho": 0.05, "steps": 2, "progress": False}
    expected = float(sharpness.evaluate(model, [batch], **options))
    layer = networks.vit_layers(model)[0]

    def rounded(module, _, output):
        return output.float().double() + (1e-2 * next(module.parameters()).norm() if wrong else 0)

    next(m for m in layer.modules() if isinstance(m, nn.LayerNorm)).register_forward_hook(rounded)
    if wrong:
        with pytest.raises(ValueError, match=r"the loss is .* instead of"):
            sharpness.evaluate(model, [batch], **options)
    else:
        assert float(sharpness.evaluate(model, [batch], **options)) == pytest.approx(expected, rel=1e-4)


def test_options_of_an_average_are_named():
    for options, words in (({"num_samples": 0}, "num_samples must be a whole number of at least 1"),
                           ({"seed": -1}, "seed must be a whole number of at least 0")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            sharpness.average(networks.vit(), [networks.images()], **options)
    with pytest.raises(ValueError, match="the gradient norm is that at the weights, without a radius"):
        sharpness.gradient_norm(networks.vit(), [networks.images()], rho=0.1)


def test_average_case_of_a_quadratic_is_half_the_trace():
    """Around its minimum and in many dimensions, where a sample varies by a tenth or so of the mean."""
    torch.manual_seed(1)
    model, draws = nn.Linear(200, 1, bias=False), torch.randn(200, 200)
    H, start = torch.diag(torch.linspace(1, 2, 200)) + 0.002 * (draws + draws.T), model.weight.detach()[0].clone()

    def loss(model, batch):
        w = model.weight[0] - start
        return 0.5 * w @ H @ w

    options = {"rho": 0.1, "num_samples": 200}
    plain = sharpness.average(model, [0], loss, measure="euclidean", **options).batches[0]
    assert plain.value == pytest.approx(0.5 * 0.1**2 * float(H.trace()), abs=4 * plain.std_error)
    w = model.weight.detach()[0]
    scaled = sharpness.average(model, [0], loss, measure="adaptive", **options).batches[0]
    assert scaled.value == pytest.approx(0.5 * 0.1**2 * float(w**2 @ H.diagonal()), abs=4 * scaled.std_error)
    assert max(plain.std_error / plain.value, scaled.std_error / scaled.value) < 0.02
    assert plain.passes == 201
    assert len(plain.history) == 200


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_average_case_and_gradient_norm_are_invariant(trained, metric):
    rho = 0.01 if metric == "geodesic-inv" else 0.002
    one, two = values(trained, statistic=sharpness.average, measure=metric, rho=rho)
    assert one == pytest.approx(two, rel=1e-6)
    one, two = values(trained, statistic=sharpness.average, measure="adaptive", rho=rho)
    assert abs(one / two - 1) > 0.01
    one, two = (float(sharpness.gradient_norm(m, [trained[2]], measure=metric)) for m in trained[:2])
    assert one == pytest.approx(two, rel=1e-8)
    small = values(trained, measure=metric, rho=1e-4)[0] / 1e-4
    assert small == pytest.approx(one, rel=0.02)
    one, two = (float(sharpness.gradient_norm(m, [trained[2]], measure="adaptive")) for m in trained[:2])
    assert abs(one / two - 1) > 0.01


def test_every_ascent_and_radius_is_independent_of_the_list(trained):
    model, _, batch = trained
    options = {"rho": [0.05, 0.2], "restarts": 1, "steps": 6}
    together = sharpness.evaluate(model, [batch, batch], **options)
    for rho in options["rho"]:
        alone = sharpness.evaluate(model, [batch, batch], **{**options, "rho": rho})
        assert float(alone) == float(together[rho])


def test_loss_that_explodes_within_the_ball():
    model, batch = networks.vit(), networks.images()

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]).logits, batch[1])
        return value * (float("nan") if value > 2.5 else 1)

    with pytest.raises(ValueError, match=r"became NaN at a distance of .* use a smaller rho"):
        sharpness.evaluate(model, [batch], loss, measure="euclidean", rho=3.0)


def test_dropout_is_noticed_in_half_precision_too():
    model, (x, y) = networks.vit().bfloat16(), networks.images()
    with pytest.raises(ValueError, match="two identical passes"):
        sharpness.evaluate(model, [(x.bfloat16(), y)], with_dropout, rho=0.1)


def test_nan_data_and_infinite_losses_are_named():
    model, (x, y) = networks.vit(), networks.images()
    with pytest.raises(ValueError, match="the loss of batch 1 is nan; look for NaN in the data"):
        sharpness.evaluate(model, [(x, y), (x * float("nan"), y)], rho=0.1, steps=1)

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]).logits, batch[1])
        return value / (value < 2.5)

    with pytest.raises(ValueError, match=r"became infinite at a distance of .* use a smaller rho"):
        sharpness.evaluate(model, [(x, y)], loss, measure="euclidean", rho=3.0, steps=3)
    with pytest.raises(ValueError, match="one score per example"):
        sharpness.evaluate(nn.Linear(3, 1), [(torch.randn(4, 3), torch.randn(4, 1))], rho=0.1)


# -- progress: on a terminal a bar, in a log once a minute, nothing if nobody asks -------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, *, minutes=0, progress_on=True):
    clock = iter(range(0, 10_000, 60 if minutes else 1))
    monkeypatch.setattr(sys, "stderr", stream)
    with evaluation.progress_bar(5, "measuring", "step", progress=progress_on) as bar:
        bar._time = lambda: next(clock)
        bar.start_t = bar.last_print_t = 0
        for _ in range(5):
            bar.update()
    return stream.getvalue()


def test_a_log_gets_the_bar_once_a_minute(monkeypatch):
    states = shown(monkeypatch, io.StringIO(), minutes=5).strip("\r ").split("\r")
    assert 2 <= len(states) <= 5
    assert all(re.search(r"measuring: .* \d/5 \[\d\d:\d\d<\d\d:\d\d, .*step\]", state) for state in states)


def test_short_work_leaves_no_line(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""


def test_a_terminal_gets_a_bar_and_the_quiet_nothing(monkeypatch):
    assert "\r" in shown(monkeypatch, Terminal())
    assert shown(monkeypatch, Terminal(), progress_on=False) == ""
    assert shown(monkeypatch, io.StringIO(), progress_on=False, minutes=5) == ""


def test_steps_are_counted_and_starts_are_not(monkeypatch):
    """From the weights and from two random points: what is announced is what is done."""
    bars, show = [], evaluation.progress_bar
    monkeypatch.setattr(evaluation, "progress_bar", lambda *a, **k: bars.append(show(*a, **k)) or bars[-1])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    batch = torch.eye(2), torch.arange(2)
    sharpness.evaluate(nn.Linear(2, 2), [batch], measure="euclidean", rho=0.1, steps=3, restarts=2)
    assert bars[0].n == bars[0].total == 9


def test_a_bar_draws_the_losses_of_an_ascent(monkeypatch):
    bars, show = [], evaluation.progress_bar
    monkeypatch.setattr(evaluation, "progress_bar", lambda *a, **k: bars.append(show(*a, **k)) or bars[-1])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    batch = torch.eye(2), torch.arange(2)
    found = sharpness.evaluate(nn.Linear(2, 2), [batch], measure="euclidean", rho=0.5, steps=4, relative_tol=0)
    losses = np.array(found.batches[0].history)
    start, drawn = bars[0].postfix.rsplit(" ", 1)
    assert start == f"rho=0.5, best={losses.max():.4f}"
    heights = np.array(["▁▂▃▄▅▆▇█".index(block) for block in drawn])
    np.testing.assert_allclose(heights / 7, (losses - losses.min()) / np.ptp(losses), atol=0.5 / 7 + 1e-6)

import copy
import math
import subprocess
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
from quotient_manifolds.symmetries import UnknownAttentionError, apply_random_symmetry_, find_symmetric_pairs, stacks

from . import networks

GEODESIC = ["geodesic-inv", "geodesic-mix"]
ALL = [*GEODESIC, "adaptive", "euclidean"]


def snapshot(model):
    """Everything that a measurement must leave alone."""
    return {
        "data": {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "grad": {n: (None if p.grad is None else (id(p.grad), p.grad.clone())) for n, p in model.named_parameters()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "rng": torch.get_rng_state(),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "grad_mode": torch.is_grad_enabled(),
    }


def assert_same(one, two):
    assert one.keys() == two.keys()
    for key in one:
        a, b = one[key], two[key]
        if isinstance(a, dict):
            assert_same(a, b)
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b), key
        elif isinstance(a, tuple):
            assert a[0] == b[0], key
            assert torch.equal(a[1], b[1]), key
        else:
            assert a == b, key


MODELS = {
    "vit": (networks.vit, networks.images),
    "bert": (networks.bert, networks.text),
    "encoder": (lambda: networks.shake(networks.Encoder()), networks.tokens),
}


@pytest.fixture(scope="module", params=MODELS)
def trained(request):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    make, data = MODELS[request.param]
    batch = data()
    return networks.train(make(), batch), batch


@pytest.mark.parametrize("measure", ALL)
def test_invariance_along_orbits_in_float64(trained, measure):
    model, batch = trained
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 1e3, seed=2) > 0
    options = {"measure": measure, "rho": 0.05 if measure == "geodesic-mix" else 0.2, "steps": 10, "restarts": 1}
    one, two = (float(sharpness.evaluate(m, [batch], **options)) for m in (model, twin))
    if measure in GEODESIC:
        assert abs(two - one) < 1e-8 * one
    else:
        assert abs(two - one) > 0.05 * one


@pytest.mark.parametrize("measure", ALL)
@pytest.mark.parametrize("rho", [0.1, 0.5])
def test_invariance_along_orbits_in_float32(measure, rho):
    torch.set_default_dtype(torch.float32)
    batch = networks.images()
    model = networks.train(networks.vit(), batch)
    twin = copy.deepcopy(model)
    apply_random_symmetry_(twin, 1e3, seed=2)
    one, two = (float(sharpness.evaluate(m, [batch], measure=measure, rho=rho)) for m in (model, twin))
    if measure in GEODESIC:
        assert abs(two - one) < 1e-3 * one
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
        self.stacks = [] if cls is None else stacks(find_symmetric_pairs(model))
        self.manifolds = [cls(s.n, s.m) for s in self.stacks]
        self.points = [s.gather().detach() for s in self.stacks]
        covered = {id(p) for s in self.stacks for p in s.parameters()}
        self.free = [i for i, p in enumerate(model.parameters()) if id(p) not in covered]
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
        ids = {id(p): n for n, p in self.model.named_parameters()}
        for s, m, x, u in zip(self.stacks, self.manifolds, self.points, pairs, strict=True):
            for run in s._runs:
                name = ids[id(run.first.tensor)]
                part = m.retr(x, u)[run.start : run.start + run.count, run.row : run.row + run.first.rows]
                flat = moved[name].reshape(-1)
                index = run.view(torch.arange(flat.numel()).view(moved[name].shape))
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

    def best(self, rho, starts, seed=0):
        basis = self.basis()

        def loss(z):
            v = torch.from_numpy(z.copy()).requires_grad_()
            value = -self.loss(basis @ v)
            return float(value.detach()), torch.autograd.grad(value, v)[0].numpy()

        rng = np.random.default_rng(seed)
        found = []
        for _ in range(starts):
            z = rng.standard_normal(basis.shape[1])
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
    best = reference.best(rho, 30) - float(reference.loss(torch.zeros(reference.dim)))
    found = float(sharpness.evaluate(model, [batch], measure=measure, rho=rho, steps=200, restarts=10))
    assert found > 0.01
    assert abs(found - best) < 0.01 * best


def test_first_order_inv_equals_adaptive_for_scalar_pairs():
    # Paper, App. F: with h = n = m = 1 the linear horizontal ball holds the maximum of the adaptive one.
    torch.manual_seed(3)
    model = networks.shake(nn.MultiheadAttention(1, 1, bias=False, batch_first=True), 0.7)
    x, y = torch.randn(6, 5, 1), torch.randn(6, 5, 1)

    def loss(model, batch):
        return F.mse_loss(model(batch[0], batch[0], batch[0], need_weights=False)[0], batch[1])

    options = {"rho": 0.1, "steps": 200, "restarts": 2, "relative_tol": 0}
    inv = float(
        sharpness.evaluate(
            model, [(x, y)], loss, measure=sharpness.get_measure("geodesic-inv", geodesic="first-order"), **options
        )
    )
    adaptive = float(sharpness.evaluate(model, [(x, y)], loss, measure="adaptive", **options))
    curved = float(sharpness.evaluate(model, [(x, y)], loss, measure="geodesic-inv", **options))
    assert abs(inv - adaptive) < 1e-8 * adaptive
    assert abs(curved - adaptive) > 1e-4 * adaptive


@pytest.mark.parametrize("measure", ALL)
def test_a_scaled_metric_has_the_same_geodesics(trained, measure):
    # Paper, App. I.3.
    model, batch = trained
    scaled = sharpness.Measure(
        measure, sharpness.MEASURES[measure].pair_metric, sharpness.MEASURES[measure].elementwise, metric_scale=4.0
    )
    one = sharpness.evaluate(model, [batch], measure=measure, rho=0.05, restarts=1)
    two = sharpness.evaluate(model, [batch], measure=scaled, rho=0.1, restarts=1)
    other = sharpness.evaluate(model, [batch], measure=scaled, rho=0.05, restarts=1)
    assert abs(float(one) - float(two)) < 1e-8 * float(one)
    assert abs(float(one) - float(other)) > 0.1 * float(one)


@pytest.mark.parametrize("measure", ALL)
def test_direction_is_horizontal_of_length_rho_and_leads_to_the_worst_loss(trained, measure):
    model, batch = trained
    apply_random_symmetry_(model := copy.deepcopy(model), 50.0)
    rho = 0.05
    result = sharpness.evaluate(model, [batch], measure=measure, rho=rho)
    direction = result.direction(0)
    assert direction.norm == pytest.approx(rho, rel=1e-6)
    names = {id(p): n for n, p in model.named_parameters()}
    square, covered = 0.0, set()
    if measure in GEODESIC:
        for s in stacks(find_symmetric_pairs(model)):
            x = s.gather().detach()
            u = s.gather({p: direction.tensors[names[id(p)]] for p in s.parameters()})
            manifold = s.manifold(measure.removeprefix("geodesic-"))
            torch.testing.assert_close(manifold.proju(x, u), u, rtol=1e-6, atol=1e-9)
            square += float(manifold.inner(x, u).sum())
            covered |= {names[id(p)] for p in s.parameters()}
    for n, p in model.named_parameters():
        if n not in covered:
            weight = 1.0 if measure == "euclidean" else p.detach().abs()
            square += float(((direction.tensors[n] / weight) ** 2).nan_to_num().sum())
    assert math.sqrt(square) == pytest.approx(rho, rel=1e-6)

    before = snapshot(model)
    base = sharpness.evaluate(model, [batch], measure=measure, rho=rho, steps=1).batches[0].base_loss
    for t, expected in ((1.0, result.batches[0].worst_loss), (0.0, base)):
        with sharpness.perturbed(model, direction, t) as moved, torch.no_grad():
            output = moved(**batch).loss if isinstance(batch, dict) else moved(batch[0])
            if not isinstance(batch, dict):
                output = F.cross_entropy(getattr(output, "logits", output), batch[1])
        assert float(output) == pytest.approx(expected, rel=1e-9)
    assert_same(snapshot(model), before)
    with pytest.raises(RuntimeError, match="boom"), sharpness.perturbed(model, direction):
        raise RuntimeError("boom")
    assert_same(snapshot(model), before)
    with pytest.raises(ValueError, match="belongs to another model"), sharpness.perturbed(nn.Linear(2, 2), direction):
        pass


# -- the model afterwards ------------------------------------------------------------


class Interrupt:
    """A loss that fails at its n-th call."""

    def __init__(self, at, error):
        self.calls, self.at, self.error = 0, at, error

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return F.cross_entropy(model(batch[0]).logits, batch[1])


@pytest.mark.parametrize("measure", ALL)
@pytest.mark.parametrize(
    ("at", "error"),
    [(None, None), (1, RuntimeError("boom")), (3, RuntimeError("boom")), (7, KeyboardInterrupt()), (9, MemoryError())],
    ids=str,
)
def test_the_model_is_as_before_on_every_way_out(measure, at, error):
    model, batch = networks.vit(hidden_dropout_prob=0.3), networks.images()
    F.cross_entropy(model(batch[0]).logits, batch[1]).backward()
    model.train()
    networks.vit_layers(model)[0].eval()
    model.classifier.bias.requires_grad_(False)
    model.register_buffer("counter", torch.zeros(1))
    before = snapshot(model)
    if error is None:
        sharpness.evaluate(model, [batch] * 2, Interrupt(None, None), measure=measure, rho=0.1, steps=4, relative_tol=0)
    else:
        with pytest.raises(type(error)):
            sharpness.evaluate(
                model, [batch] * 2, Interrupt(at, error), measure=measure, rho=0.1, steps=4, relative_tol=0
            )
    assert_same(snapshot(model), before)


def test_the_measured_weights_are_really_moved():
    """The test above would hold for a measurement that moves nothing."""
    model, batch = networks.vit(), networks.images()
    seen = set()

    def loss(model, batch):
        seen.add(networks.projections(networks.vit_layers(model)[0].attention)[0].weight.detach().sum().item())
        return F.cross_entropy(model(batch[0]).logits, batch[1])

    sharpness.evaluate(model, [batch], loss, measure="geodesic-inv", rho=0.1, steps=4)
    assert len(seen) >= 5


def test_buffers_that_the_forward_pass_changes_are_restored():
    class Counting(networks.Encoder):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = networks.shake(Counting())
    before = snapshot(model)
    sharpness.evaluate(model, [networks.tokens()], measure="adaptive", rho=0.1, steps=2)
    assert_same(snapshot(model), before)


def test_inside_no_grad_and_inference_mode():
    model, batch = networks.vit(), networks.images()
    expected = float(sharpness.evaluate(model, [batch], rho=0.1, steps=3))
    with torch.no_grad():
        assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=3)) == expected
    with torch.inference_mode():
        assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=3)) == expected
    for rho in (np.float64(0.1), torch.tensor(0.1)):
        assert float(sharpness.evaluate(model, [batch], rho=rho, steps=3)) == expected


# -- results ------------------------------------------------------------


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


def test_restarts_never_lower_the_value_and_depend_on_the_seed():
    model, batch = networks.vit(), networks.images()
    values = [float(sharpness.evaluate(model, [batch], rho=0.3, steps=3, restarts=k)) for k in range(3)]
    assert values == sorted(values)
    again = float(sharpness.evaluate(model, [batch], rho=0.3, steps=3, restarts=2))
    assert again == values[2]


def test_table_json_and_directions(tmp_path):
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=[0.1, 0.2], steps=2)
    table = str(result).splitlines()
    assert "geodesic-inv sharpness of ViTForImageClassification: 1 batch, power ascent of 2 steps" in table[0]
    assert table[1] == "second-order geodesics"
    assert len([line for line in table if line.split()[0] in ("0.1", "0.2")]) == 2
    result.to_json(tmp_path / "r.json")
    import json

    found = json.loads((tmp_path / "r.json").read_text())
    assert found == result.to_dict()
    assert found["sharpness"]["0.1"] == float(result[0.1])
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]
    with pytest.raises(ValueError, match="several radii"):
        result.direction(0)
    with pytest.raises(KeyError, match="no direction for batch 5"):
        result[0.1].direction(5)
    with pytest.raises(KeyError, match="was not measured"):
        result[0.7]
    without = sharpness.evaluate(model, [batch], rho=0.1, steps=2, keep_directions=False)
    with pytest.raises(KeyError, match="keep_directions"):
        without.direction(0)


# -- bad input ------------------------------------------------------------


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
        ({"statistic": "third"}, "statistic must be 'worst' or 'average'"),
        ({"batches": []}, "batches is empty"),
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
        ({"loss_fn": lambda m, b: torch.tensor(1.0)}, "does not depend on any trainable parameter"),
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


def test_bad_models_are_named():
    model, batch = networks.vit(), networks.images()
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        sharpness.evaluate(frozen, [batch], rho=0.1)
    with pytest.raises(ValueError, match="lie on the meta device"):
        sharpness.evaluate(copy.deepcopy(model).to("meta"), [batch], rho=0.1)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter 'classifier\.bias' has NaN"):
        sharpness.evaluate(model, [batch], rho=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_in_main_memory_of_a_model_on_a_gpu():
    model, batch = networks.vit(), networks.images()
    expected = float(sharpness.evaluate(model, [batch], rho=0.1, steps=2))
    assert float(sharpness.evaluate(model.cuda(), [batch], rho=0.1, steps=2)) == pytest.approx(expected, rel=1e-6)


class Mystery(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)).mean(1)))


def test_unknown_attention_is_refused_by_geodesic_measures_only():
    model, batch = networks.shake(Mystery()), networks.tokens()
    before = snapshot(model)
    for measure in GEODESIC:
        with pytest.raises(UnknownAttentionError, match="Mystery"):
            sharpness.evaluate(model, [batch], measure=measure, rho=0.1)
    for measure in ("adaptive", "euclidean"):
        assert float(sharpness.evaluate(model, [batch], measure=measure, rho=0.1)) > 0
    assert_same(snapshot(model), before)


def test_loss_that_explodes_within_the_ball():
    model, batch = networks.vit(), networks.images()

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]).logits, batch[1])
        return value * (float("nan") if value > 2.5 else 1)

    with pytest.raises(ValueError, match=r"became NaN at a distance of .* use a smaller rho"):
        sharpness.evaluate(model, [batch], loss, measure="euclidean", rho=3.0)


# -- other models ------------------------------------------------------------


def test_frozen_pairs_and_partly_covered_parameters_count_elementwise():
    model, batch = networks.shake(networks.Encoder()), networks.tokens()
    free = float(sharpness.evaluate(model, [batch], rho=0.2))
    attention = model.encoder.layers[0].self_attn
    attention.out_proj.weight.requires_grad_(False)  # the V–O pairs fall away; in_proj_weight is covered in part
    assert [p.group is None for p in find_symmetric_pairs(model)] == [False, True] * 2
    twin = copy.deepcopy(model)
    apply_random_symmetry_(twin, 100.0)
    one, two = (float(sharpness.evaluate(m, [batch], rho=0.2, restarts=1)) for m in (model, twin))
    assert abs(one - two) < 1e-8 * one
    assert one < free
    # What is left of in_proj_weight has the adaptive metric.
    direction = sharpness.evaluate(model, [batch], rho=0.2).direction(0)
    assert (direction.tensors["encoder.layers.0.self_attn.in_proj_weight"][16:] != 0).any()


def test_mixed_and_half_precision_weights():
    torch.set_default_dtype(torch.float32)
    batch = networks.images()
    model = networks.train(networks.vit(), batch)
    expected = float(sharpness.evaluate(model, [batch], rho=0.1))
    half = copy.deepcopy(model).bfloat16()
    before = snapshot(half)
    rough = sharpness.evaluate(half, [(batch[0].bfloat16(), batch[1])], rho=0.1)
    assert float(rough) == pytest.approx(expected, rel=0.3)
    assert_same(snapshot(half), before)


def test_registered_attention_is_measured(monkeypatch):
    monkeypatch.setattr(symmetries.registry, "_HANDLERS", dict(symmetries.registry._HANDLERS))

    @symmetries.register_attention(Mystery)
    def mystery(module, name):
        q, k, v = (symmetries.Projection(module.qkv, start=8 * i) for i in range(3))
        return symmetries.attention_pairs(
            name, heads=1, head_size=8, q=q, k=k, v=v, o=symmetries.Projection(module.out)
        )

    model, batch = networks.shake(Mystery()), networks.tokens()
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 10.0) == 2
    one, two = (float(sharpness.evaluate(m, [batch], rho=0.1)) for m in (model, twin))
    assert abs(one - two) < 1e-8 * one


@pytest.mark.parametrize("measure", GEODESIC)
def test_dead_units_of_a_head_count_as_absent(measure):
    batch = networks.images()
    model = networks.train(networks.vit(), batch)
    with torch.no_grad():
        keys = networks.projections(networks.vit_layers(model)[0].attention)[1]
        keys.weight[3] = 0
        keys.bias[3] = 0
    twin = copy.deepcopy(model)
    for s in stacks(find_symmetric_pairs(twin)):
        A = torch.eye(8) + 0.3 * torch.randn(len(s), 8, 8)
        s.scatter_(s.manifold().act(s.gather().detach(), A))
    results = [sharpness.evaluate(m, [batch], measure=measure, rho=0.01, restarts=1) for m in (model, twin)]
    assert [r.num_null for r in results] == [1, 1]
    assert abs(float(results[0]) - float(results[1])) < 1e-8 * float(results[0])
    assert "1 directions of pairs" in str(results[0])
    alive = sharpness.evaluate(networks.vit(), [batch], measure=measure, rho=0.01)
    assert alive.num_null == 0


def test_mix_reports_when_its_ball_leaves_the_manifold():
    model, batch = networks.vit(), networks.images()
    sigma = min(
        torch.linalg.svdvals(s.manifold().to_matrix(s.gather().detach()))[:, 7].min()
        for s in stacks(find_symmetric_pairs(model))
    )
    result = sharpness.evaluate(model, [batch], measure="geodesic-mix", rho=float(sigma), steps=1)
    assert result.min_singular_value == pytest.approx(float(sigma), rel=1e-6)
    assert "largest rho over the smallest singular value of a pair: 1\n" in str(result)
    assert "leaves the manifold" in str(result)
    small = sharpness.evaluate(model, [batch], measure="geodesic-mix", rho=0.1 * float(sigma), steps=1)
    assert "leaves the manifold" not in str(small)
    assert small.to_dict()["min_singular_value"] == small.weakest


def test_inside_autocast():
    """Autocast keeps casts of weights; they must not survive a move of the weights."""
    torch.set_default_dtype(torch.float32)
    batch = networks.images()
    model = networks.train(networks.vit(), batch)
    expected = float(sharpness.evaluate(model, [batch], rho=0.3))
    cached = torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = float(sharpness.evaluate(model, [batch], rho=0.3))
        assert torch.is_autocast_cache_enabled() == cached
    assert found == pytest.approx(expected, rel=0.15)


def test_dropout_is_noticed_in_half_precision_too():
    model, (x, y) = networks.vit().bfloat16(), networks.images()
    with pytest.raises(ValueError, match="two identical passes"):
        sharpness.evaluate(model, [(x.bfloat16(), y)], with_dropout, rho=0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model():
    model, batch = networks.vit(), networks.images()
    expected = sharpness.evaluate(model, [batch], rho=0.1, steps=3)
    compiled = torch.compile(model, backend="eager")
    result = sharpness.evaluate(compiled, [batch], rho=0.1, steps=3)
    assert float(result) == pytest.approx(float(expected), rel=1e-10)
    with sharpness.perturbed(compiled, expected.direction(0)) as moved, torch.no_grad():
        loss = float(F.cross_entropy(moved(batch[0]).logits, batch[1]))
    assert loss == pytest.approx(expected.batches[0].worst_loss, rel=1e-10)


def test_perturbed_follows_the_geodesic_of_a_frozen_model_and_of_a_copy():
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=0.5, steps=5)
    first_order = sharpness.get_measure("geodesic-inv", geodesic="first-order")
    straight = sharpness.evaluate(model, [batch], measure=first_order, rho=0.5, steps=5)
    assert abs(float(straight) - float(result)) > 1e-4
    model.requires_grad_(False)
    for m in (model, copy.deepcopy(model)):
        with sharpness.perturbed(m, result.direction(0)), torch.no_grad():
            loss = float(F.cross_entropy(m(batch[0]).logits, batch[1]))
        assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_computed_weights_count_without_symmetry():
    model, batch = networks.vit(), networks.images()
    prune.random_unstructured(networks.projections(networks.vit_layers(model)[0].attention)[0], "weight", amount=0.2)
    reasons = [p.reason for p in find_symmetric_pairs(model) if p.group is None]
    assert reasons == ["weight of Linear is computed, not a parameter"] * 2
    assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=2)) > 0


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_by_geodesic_measures():
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 3))
    batch = (torch.randn(4, 8), torch.randint(3, (4,)))
    with pytest.raises(UnknownAttentionError, match="TorchScript"):
        sharpness.evaluate(model, [batch], rho=0.1)


class Merging(nn.Linear):
    """Merges something into its weight whenever it is told to evaluate."""

    def train(self, mode=True):
        if not mode:
            self.weight.data += 1
        return super().train(mode)


def test_layers_that_merge_weights_in_eval_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), Merging(8, 3))
    batch = (torch.randn(4, 8), torch.randint(3, (4,)))
    before = snapshot(model)
    sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1)
    assert_same(snapshot(model), before)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 3), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_() if self.reentrant else x
        h = torch.utils.checkpoint.checkpoint(lambda t: self.first(t).relu(), x, use_reentrant=self.reentrant)
        return self.second(h)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    torch.manual_seed(1)
    model = Checkpointed(reentrant)
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    plain = nn.Sequential(model.first, nn.ReLU(), model.second)
    expected = float(sharpness.evaluate(plain, [(x, y)], measure="adaptive", rho=0.5))
    F.cross_entropy(model(x), y).backward()
    before = snapshot(model)
    found = float(sharpness.evaluate(model, [(x, y)], measure="adaptive", rho=0.5))
    assert found == pytest.approx(expected, rel=1e-10)
    assert_same(snapshot(model), before)


def test_sparse_gradients_and_gradient_penalties():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    batch = (torch.randint(5, (6, 2)), torch.randint(3, (6,)))
    assert float(sharpness.evaluate(model, [batch], measure="adaptive", rho=0.3)) > 0

    def penalty(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().mean()

    smooth = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    assert float(sharpness.evaluate(smooth, [(torch.randn(5, 4),)], penalty, measure="adaptive", rho=0.3)) > 0


def test_nan_data_and_infinite_losses_are_named():
    model, (x, y) = networks.vit(), networks.images()
    with pytest.raises(ValueError, match="the loss of batch 1 is nan; look for NaN in the data"):
        sharpness.evaluate(model, [(x, y), (x * float("nan"), y)], rho=0.1, steps=1)

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]).logits, batch[1])
        return value / (value < 2.5)

    with pytest.raises(ValueError, match=r"became infinite at a distance of .* use a smaller rho"):
        sharpness.evaluate(model, [(x, y)], loss, measure="euclidean", rho=3.0, steps=3)
    with pytest.raises(ValueError, match="one score an example"):
        sharpness.evaluate(nn.Linear(3, 1), [(torch.randn(4, 3), torch.randn(4, 1))], rho=0.1)


def test_lora_before_training_has_no_direction_to_move_in():
    layer = nn.Linear(4, 4)
    A, B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))
    layer.requires_grad_(False)
    layer.A, layer.B = A, B
    pair = symmetries.pair(
        [symmetries.block(layer, "B")], [symmetries.block(layer, "A", transpose=True)], symmetries.GL(2)
    )

    def loss(model, batch):
        return (batch + batch @ model.A.T @ model.B.T).square().mean()

    with pytest.raises(ValueError, match="no direction to move in"):
        sharpness.evaluate(layer, [torch.randn(3, 4)], loss, rho=0.1, pairs=[pair])


def test_a_layer_that_takes_no_part_is_named():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = networks.TinyAttention(), networks.TinyAttention()

        def forward(self, x):
            return self.used(x)

    model, batch = networks.shake(Half()), networks.tokens(width=4)
    with pytest.raises(ValueError, match=r"pair 'unused\.attention qk head 0' gets no gradient"):
        sharpness.evaluate(model, [batch], rho=0.1)
    model.unused.requires_grad_(False)
    assert float(sharpness.evaluate(model, [batch], rho=0.1)) > 0


def test_rows_of_a_dataframe():
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch, batch], rho=[0.01, 0.05], progress=False)
    frame = result.to_dataframe()
    assert len(frame) == 4
    assert set(frame.measure) == {"geodesic-inv"}
    assert frame[frame.rho == 0.05].value.tolist() == [b.value for b in result[0.05].batches]


# -- a larger ball holds the smaller one ------------------------------------------------------------------------------

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


@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix", "adaptive", "euclidean"])
@pytest.mark.parametrize("loss", BOUNDED)
def test_sharpness_never_falls_with_the_radius(measure, loss):
    torch.manual_seed(3)
    model, batch = Mean(), (torch.randn(6, 3, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
    radii = [0.05 * 2**k for k in range(9)]
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
    monkeypatch.setattr("sharpness.ball_search._HALVINGS", 0)
    on_sphere = [float(sharpness.evaluate(model, [batch], sine, rho=rho, **options)) for rho in (0.5, 1.0, 2.0)]
    assert min(on_sphere) < 0.9 * max(on_sphere)


# -- arguments and models that cannot be measured ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": True}, "rho must be one or several positive numbers, got True"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1, got 2.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"relative_tol": "x"}, "relative_tol must be a number of at least 0, got 'x'"),
        ({"micro_batch": 2.5}, "micro_batch must be a whole number of at least 1, got 2.5"),
        ({"measure": 3}, "unknown measure 3"),
        ({"batches": torch.ones(3)}, "batches is a single Tensor; wrap it in a list"),
    ],
)
def test_arguments_are_named(options, words):
    arguments = {"batches": [(torch.ones(2, 3), torch.tensor([0, 1]))], "measure": "adaptive", **options}
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(nn.Linear(3, 2), **arguments)


def test_sharded_models_are_refused(tmp_path):
    """FSDP2's parameters are DTensors, on which measuring ended in a segmentation fault."""
    script = tmp_path / "sharded.py"
    script.write_text("""
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import sharpness
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
try:
    sharpness.evaluate(model, [torch.ones(1, 3, 8)], lambda m, b: m(b).sum())
except ValueError as error:
    print(error)
""")
    found = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=120)
    assert "is a shard of one (FSDP, DTensor or ZeRO-3), but whole weights are measured" in found.stdout, found.stderr

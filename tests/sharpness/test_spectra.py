"""Curvature matrices on the quotient: against dense matrices, after moves along symmetries, and of the mean loss."""

import copy
import functools
import json
from pathlib import Path

import curvlinops
import geoopt
import numpy as np
import pytest
import torch
from curvlinops._torch_base import PyTorchLinearOperator
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sharpness
from quotient_manifolds.symmetries import ALL, GL, Symmetries, find, move_, pair, slot
from quotient_manifolds.weights import preserve_model_state
from sharpness import MEASURES, HessianOperator, WeightSpace, cli, lanczos
from sharpness.curvlinops import PushForward, RiemannianHessian
from sharpness.losses import Objective
from sharpness.measuring import direction_of
from sharpness.spectra import _product
from tests.support import networks
from tests.support.extent import checkered
from tests.support.networks import Encoder, shake, tokens
from tests.support.whole_networks import _stay_double


class OnStiefel(nn.Module):
    """A layer whose rows are orthonormal, as its manifold in geoopt says."""

    def __init__(self):
        super().__init__()
        manifold = geoopt.Stiefel(canonical=False)
        self.frame = geoopt.ManifoldParameter(manifold.random(5, 2), manifold=manifold)
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.frame))


def encoder():
    model = shake(Encoder(width=4, dropout=0.0))
    for name, p in model.named_parameters():
        p.requires_grad_("linear" not in name)
    return model, tokens(5, width=4, length=3)


def lora():
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"]))
    return shake(model.double()), (torch.randn(7, 5), torch.randint(3, (7,)))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=3,
        vocab_size=5, max_position_embeddings=8,
    )  # fmt: skip
    model = shake(LlamaForCausalLM(config).double())
    _stay_double(model)
    for name, p in model.named_parameters():
        p.requires_grad_("attn" in name or "norm" in name)
    ids = torch.randint(5, (3, 5))
    labels = ids.clone()
    labels[0, :3] = labels[1, 1] = -100
    return model, {"input_ids": ids, "labels": labels}


def points():
    torch.manual_seed(3)
    return OnStiefel(), (torch.randn(8, 5), torch.randint(3, (8,)))


NETWORKS = {"encoder": encoder, "lora": lora, "llama": llama, "points": points}
CASES = [(name, "geodesic-inv") for name in NETWORKS]
CASES += [("encoder", "geodesic-mix"), ("encoder", "complete-inv"), ("llama", "complete-inv")]


def rows(model, batch):
    """Scores and labels, one row each, as a user would write it down."""
    if isinstance(batch, dict):
        scores = model(**batch).logits[:, :-1].flatten(0, 1)
        return scores, batch["labels"][:, 1:].flatten()
    return model(batch[0]), batch[1]


def dense(model, batches, matrix):
    """The matrix of the mean cross-entropy over all labels in terms of the weights, from its definition."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes, flat = [p.numel() for p in weights.values()], torch.cat([p.detach().flatten() for p in weights.values()])

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, batch):
            return rows(self.model, batch)[0]

    def scores(flat, batch):
        parts = zip(weights.items(), flat.split(sizes), strict=True)
        return functional_call(Rows(), {f"model.{n}": part.view(p.shape) for (n, p), part in parts}, (batch,))

    counted = sum(int((rows(model, b)[1] != -100).sum()) for b in batches)

    def loss(flat):
        return sum(F.cross_entropy(scores(flat, b), rows(model, b)[1], reduction="sum") for b in batches) / counted

    if matrix == "hessian":
        return torch.autograd.functional.hessian(loss, flat)
    found = torch.zeros(len(flat), len(flat))
    for batch in batches:
        J, p, y = jacrev(scores)(flat, batch), scores(flat, batch).softmax(1).detach(), rows(model, batch)[1]
        for Jn, pn, yn in zip(J, p, y, strict=True):
            if yn != -100:
                g = Jn.T @ (pn - F.one_hot(yn, len(pn)))
                middle = pn.diag() - torch.outer(pn, pn)
                found += (Jn.T @ middle @ Jn if matrix == "ggn" else torch.outer(g, g)) / counted
    return found


def flat(space):
    return torch.cat([space.copies[name].flatten() for name in space.parameters]).clone()


def at(space, v):
    space.move_to(v)
    found = flat(space)
    space.move_to(None)
    return found


def velocities(space, step):
    """C column by column: a difference along the retraction, which is exact where that is quadratic."""
    units = map(space.project, torch.eye(space.dim))
    return torch.stack([(at(space, step * e) - at(space, -step * e)) / (2 * step) for e in units], dim=1)


@pytest.fixture(params=CASES, ids="-".join, scope="module")
def case(request):
    """A network with its attached space, a batch, and C by differences, with how exact that is."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    name, measure = request.param
    model, batch = NETWORKS[name]()
    # Retractions of geoopt are not quadratic: of points the difference has an error of order 1e-8.
    step, tolerance = (1e-4, 1e-7) if name == "points" else (1.0, 1e-8)
    with preserve_model_state(model), sdpa_kernel(SDPBackend.MATH):
        space = WeightSpace(model, MEASURES[measure])
        with space.attached():
            yield space, batch, velocities(space, step), tolerance


def close(found, expected, tolerance):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_push_forward_and_its_adjoint(case):
    space, _, oracle, tolerance = case
    C = PushForward(space)
    close(C @ torch.eye(space.dim), oracle, tolerance)
    close(C.adjoint() @ torch.eye(len(oracle)), oracle.T, tolerance)
    assert C.adjoint().adjoint() is C


@pytest.mark.parametrize("matrix", ["ggn", "fisher"])
def test_matrices_of_scores(case, matrix):
    space, batch, C, tolerance = case
    product = _product(space, Objective(), [(1.0, batch)], matrix)
    vectors = torch.randn(3, space.dim)
    expected = C.T @ dense(space.model, [batch], matrix) @ C
    close(torch.stack([product(v) for v in vectors]), vectors @ expected, tolerance)


class Matrix(PyTorchLinearOperator):
    """A matrix on velocities; for None the identity, which returns the very tensors that it is given."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, C, entries):
        super().__init__(C._out_shape, C._out_shape)
        self.entries, self._of = entries, C

    def _matmat(self, X):
        if self.entries is None:
            return X
        found = self.entries @ torch.cat([x.flatten(0, -2) for x in X])
        return [part.view(x.shape) for part, x in zip(found.split(self._in_shape_flat), X, strict=True)]

    def _adjoint(self):
        return Matrix(self._of, self.entries.T)


def partly():
    """A space with a pair that has some entries of each weight."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    G, H = slot(model, "1.weight", columns=slice(0, 2)), slot(model, "0.weight", slice(0, 2), transpose=True)
    return WeightSpace(model, MEASURES["geodesic-inv"], Symmetries((pair([G], [H], GL(2)),)))


def test_a_matrix_is_pulled_back():
    """It shares memory between velocities, which the matrix may return, and the product, which nothing overwrites."""
    with partly().attached() as space:
        C = PushForward(space)
        oracle, one = velocities(space, 1.0), torch.eye(space.dim)
        M = torch.randn(len(oracle), len(oracle))
        pulled = C.pull_back(Matrix(C, M))
        close(pulled @ one, oracle.T @ M @ oracle, 1e-8)
        close(pulled.adjoint() @ one, oracle.T @ M.T @ oracle, 1e-8)
        for way in (torch.stack([pulled @ e for e in one], 1), (C.adjoint() @ Matrix(C, M) @ C) @ one):
            close(way, oracle.T @ M @ oracle, 1e-8)  # so no product is written over by the next
        close(torch.stack([C.pull_back(Matrix(C, None)) @ e for e in one], 1), oracle.T @ oracle, 1e-8)
        with pytest.raises(ValueError, match=r"matrix has shape \(32, 48\), and velocities have 32 numbers"):
            C.pull_back(C)


def test_hessian_has_the_acceleration_of_geodesics(case):
    """⟨w, Hv⟩ = ∇²ℓ(Cv, Cw) + ∇ℓ·a(v, w), where R(v) = x + Cv + a(v, v)/2; of points H itself is by differences."""
    space, batch, C, tolerance = case
    at_points = tolerance > 1e-8

    def loss():
        scores, y = rows(space.model, batch)
        return F.cross_entropy(scores, y)

    v, w = (space.random(torch.Generator().manual_seed(i)) / space.dim**0.5 for i in range(2))
    h = 1e-3 if at_points else 1.0
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss(), list(space.parameters.values()))])

    def bent(u):
        return (at(space, h * u) + at(space, -h * u) - 2 * flat(space)) / h**2

    acceleration = float(gradient @ (bent(v + w) - bent(v - w))) / 4
    straight = float(w @ C.T @ dense(space.model, [batch], "hessian") @ C @ v)
    found, bound = float(w @ (RiemannianHessian(space, loss) @ v)), 1e-4 if at_points else 1e-8
    assert found == pytest.approx(straight + acceleration, rel=bound)
    if space.measure.name != "geodesic-mix":  # whose acceleration may be small
        assert abs(acceleration) > 1e-3 * abs(straight)
        assert found != pytest.approx(straight - acceleration, rel=bound)
        assert found != pytest.approx(straight, rel=bound)


# -- the spectrum of the mean loss -------------------------------------------------------------------------------------


@functools.cache
def _trained():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = networks.images(8)
        return networks.train(networks.vit(layers=1, hidden=8), batch, steps=10), batch


def top(model, batches, matrix="hessian", **options):
    found = sharpness.spectrum(model, batches, matrix=matrix, **{"k": 3, "progress": False, **options})
    return np.array(found.eigenvalues)


@pytest.mark.parametrize(
    ("measure", "kinds", "matrix"),
    [
        (*measure, matrix)
        for measure, matrix in checkered(
            [("geodesic-inv", ("pairs",)), ("complete-inv", ALL)], ["hessian", "ggn", "fisher"]
        )
    ],
)
def test_equal_networks_have_equal_spectra(measure, kinds, matrix):
    model, batch = _trained()
    twin = copy.deepcopy(model)
    move_(twin, find(twin, scope=ALL) if kinds is ALL else None, condition=30.0, seed=1)
    one, two = (top(m, [batch], matrix, measure=measure) for m in (model, twin))
    np.testing.assert_allclose(two, one, rtol=1e-6)
    plain, moved = (top(m, [batch], matrix, measure="euclidean", k=1) for m in (model, twin))
    assert abs(moved / plain - 1) > 0.1


@pytest.mark.parametrize("matrix", ["hessian", "ggn", "fisher"])
def test_batches_count_by_their_tokens(matrix):
    """Batches of 3 and 8 counted tokens; as many batches of equal weight would give another matrix."""
    model, one = llama()
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name)  # few enough for a dense matrix
    two = {"input_ids": torch.randint(5, (2, 5)), "labels": torch.randint(5, (2, 5))}
    one = {name: t[:1] for name, t in one.items()}
    with preserve_model_state(model), sdpa_kernel(SDPBackend.MATH):
        expected = torch.linalg.eigvalsh(dense(model, [one, two], matrix)).flip(0)[:4]
        halves = sum(dense(model, [b], matrix) for b in (one, two)) / 2
    found = top(model, [one, two], matrix, measure="euclidean", k=4)
    bound = 1e-6 if matrix == "hessian" else 1e-8  # of the model's own loss, which is in single precision
    np.testing.assert_allclose(found, expected, rtol=bound, atol=1e-2 * bound)
    assert abs(float(torch.linalg.eigvalsh(halves)[-1]) / found[0] - 1) > 0.01
    pieces = top(model, [one, two], matrix, measure="euclidean", k=4, micro_batch=1)
    np.testing.assert_allclose(pieces, found, rtol=bound, atol=1e-2 * bound)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def squared_error(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("matrix", ["ggn", "fisher"])
def test_squared_error_from_its_definition(matrix):
    model, batches = Product(), [(torch.randn(n, 3), torch.randn(n, 2)) for n in (2, 5)]
    weights = dict(model.named_parameters())
    found = torch.zeros(14, 14)
    for x, y in ((x, y) for batch in batches for x, y in zip(*batch, strict=True)):
        J = jacrev(lambda w, x=x: functional_call(model, w, (x,)))({n: p.detach() for n, p in weights.items()})
        J = torch.cat([J[n].flatten(1) for n in weights], 1)
        g = J.T @ (model(x) - y).detach()  # of the mean of two squares
        found += (J.T @ J if matrix == "ggn" else torch.outer(g, g)) / 7
    expected = torch.linalg.eigvalsh(found).flip(0)[:3]
    ours = top(model, batches, matrix, loss_fn=squared_error, measure="euclidean")
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_of_probabilities_and_pixels():
    """The second derivative of a cross-entropy does not depend on its labels."""
    model, x = Product(), torch.randn(6, 3)
    y = torch.randint(2, (6,))
    by_class = top(model, [(x, y)], "ggn", measure="euclidean")
    soft = torch.tensor([0.3, 0.7]).expand(6, 2)
    np.testing.assert_allclose(top(model, [(x, soft)], "ggn", measure="euclidean"), by_class, rtol=1e-9)

    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).movedim(-1, 1)

    for matrix in ("ggn", "fisher"):
        expected = top(model, [(x, y)], matrix, measure="euclidean")
        found = top(Pixels(), [(x.view(2, 3, 3), y.view(2, 3))], matrix, measure="euclidean")
        np.testing.assert_allclose(found, expected, rtol=1e-9)


WRONG = {
    "label smoothing": lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
    "a sum": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
    "a penalty": lambda m, b: F.cross_entropy(m(b[0]), b[1]) + m.last.weight.square().sum(),
    "half a gradient": lambda m, b: sum(F.cross_entropy(s, b[1]) / 2 for s in (m(b[0]), m(b[0]).detach())),
    "another function": lambda m, b: m(b[0]).square().mean(),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_losses_have_a_hessian_alone(name):
    model, batch = Product(), (torch.randn(6, 3), torch.randint(2, (6,)))
    for matrix in ("ggn", "fisher"):
        with pytest.raises(ValueError, match=r"Product is neither .*; of other losses take matrix='hessian'"):
            top(model, [batch], matrix, loss_fn=WRONG[name])
    assert len(top(model, [batch], loss_fn=WRONG[name])) == 3


def test_eigenvalues_below_zero_are_not_those_off_the_horizontal_space():
    """Of −|GHᵀ|² on pairs the horizontal space has 5 · 2 − 4 dimensions; eigenvalues of 0 belong to none of them."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    H, G = (layer.weight.detach() for layer in model)
    own = pair([slot(model, "1.weight")], [slot(model, "0.weight", transpose=True)], GL(2))

    def loss(model, batch):
        return -(model[1].weight @ model[0].weight - G @ H).square().sum() / 2

    found = top(model, [torch.zeros(1)], loss_fn=loss, symmetries=Symmetries((own,)), k=10)
    assert len(found) == 6
    assert (found < -1e-3).all()


def test_density_is_a_quadrature(monkeypatch):
    """Exact for polynomials below twice the steps, of the horizontal vectors from which it starts."""
    monkeypatch.setattr(lanczos, "_STEPS", 5)
    A = torch.randn(12, 12)
    A, x = A + A.T, torch.randn(12)
    nodes, weights = lanczos._quadrature(A.__matmul__, x)
    assert len(nodes) == 5
    for power in range(10):
        exact = float(x @ torch.linalg.matrix_power(A, power) @ x / (x @ x))
        assert float((weights * nodes**power).sum()) == pytest.approx(exact, rel=1e-9, abs=1e-9)
    low = torch.outer(x, x)
    nodes, weights = lanczos._quadrature(low.__matmul__, x + torch.randn(12))
    assert len(nodes) == 2  # an invariant subspace ends it
    model, batch = _trained()
    found = sharpness.spectrum(model, [batch], k=1, density=True, progress=False)
    assert sum(w for _, w in found.density) == pytest.approx(1)
    assert max(point for point, _ in found.density) <= found.eigenvalues[0] * 1.01
    assert found.num_matvecs > 3 * 5


def test_operators_are_those_of_curvlinops_and_scipy():
    """The Gauss–Newton matrix of one example and three classes has rank 2, of which Hutch++ has the exact trace."""
    model, (x, y) = lora()
    space, data = WeightSpace(model, MEASURES["geodesic-inv"]), [(x[:1], y[:1])]

    def loss():
        return F.cross_entropy(model(x), y)

    with space.attached():
        C = PushForward(space)
        M = curvlinops.GGNLinearOperator(model, nn.CrossEntropyLoss(), [*space.parameters.values()], data)
        A, H = C.adjoint() @ M @ C, RiemannianHessian(space, loss)
        trace = float((A @ torch.eye(space.dim)).trace())
        assert float(curvlinops.hutchpp_trace(A, 12)) == pytest.approx(trace, rel=1e-9)
        v = np.ones(space.dim)
        np.testing.assert_allclose(H.to_scipy() @ v, HessianOperator(space, loss) @ v)
        assert H.adjoint() is H
        grid, density = curvlinops.lanczos_approximate_spectrum(H, 5, boundaries=(-1.0, 1.0))
        assert density.shape == grid.shape
        # A direction lies at the model's own factors, where M is not.
        u = space.random(torch.Generator().manual_seed(0))
        own = (C.adjoint() @ (M @ [direction_of(space, u).tensors[name] for name in space.parameters]))[0]
        assert (own - A @ u).norm() > 0.1 * own.norm()


def test_a_result_is_printed_and_written():
    model, batch = Product(), (torch.randn(6, 3), torch.randint(2, (6,)))
    found = sharpness.spectrum(model, [batch], matrix="ggn", measure="euclidean", k=2, progress=False)
    one, two = found.eigenvalues
    assert str(found) == f"largest eigenvalues of the Gauss–Newton matrix (euclidean): {one:.3g}, {two:.3g}"
    assert found.to_dict()["eigenvalues"] == [one, two]
    assert found.to_dict()["measure"]["name"] == "euclidean"
    assert found.loss == pytest.approx(F.cross_entropy(model(batch[0]), batch[1]).item())


def test_command(place, capsys, monkeypatch):
    asked = ["spectrum", "sweepmodel:model", "train.pt", "--checkpoint", "collection/net0.pt", "--batch-size", "16"]
    asked += ["--matrix", "ggn", "--measure", "adaptive", "--k", "2", "--quiet"]
    assert cli.main([*asked, "--out", "found.json", "--plot", "found.png"]) == 0
    printed = capsys.readouterr().out
    written = json.loads(Path("found.json").read_text(encoding="utf-8"))
    one, two = written["result"]["eigenvalues"]
    assert printed.startswith(f"largest eigenvalues of the Gauss–Newton matrix (adaptive): {one:.3g}, {two:.3g}\n")
    assert sum(w for _, w in written["result"]["density"]) == pytest.approx(1)
    assert written["settings"]["matrix"] == "ggn"
    assert Path("found.png").stat().st_size > 1000
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(asked) == 2
    assert "sharpness spectrum runs in one process; start it without torchrun" in capsys.readouterr().err


def test_what_is_refused():
    model, batch = Product(), (torch.randn(6, 3), torch.randint(2, (6,)))
    for options, said in (
        ({"matrix": "kfac"}, "matrix must be one of hessian, ggn, fisher, got 'kfac'"),
        ({"k": 0}, "k must be a whole number of at least 1, got 0"),
        ({"measure": "inv"}, "unknown measure 'inv'"),
    ):
        with pytest.raises(ValueError, match=said):
            sharpness.spectrum(model, [batch], **options)
    space = WeightSpace(model, MEASURES["adaptive"])
    with pytest.raises(ValueError, match="the space is not attached"):
        PushForward(space) @ torch.zeros(space.dim)
    with pytest.raises(ValueError, match=r"parameter 'last.weight' is complex"):
        PushForward(WeightSpace(geoopt_complex(), MEASURES["geodesic-inv"]))


def geoopt_complex():
    """A network with a weight that is complex, as only points may be."""
    manifold = geoopt.ComplexEuclidean() if hasattr(geoopt, "ComplexEuclidean") else geoopt.UpperHalf()
    model = Product()
    model.last.weight = geoopt.ManifoldParameter(manifold.random(1, 2, 2, dtype=torch.complex128), manifold=manifold)
    return model

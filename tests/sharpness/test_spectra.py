"""Curvature operators on the quotient against dense matrices, and their spectra at equivalent weights."""

import copy
import math
from functools import partial

import geoopt
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import sharpness
from quotient_manifolds.symmetries import ALL, find, move_
from sharpness.curvature import plain_attention
from sharpness.measures import MEASURES
from tests import networks

curvlinops = pytest.importorskip("curvlinops")
from sharpness.spectra import PushForward, QuotientHessian, spectrum  # noqa: E402


class Attentive(nn.Module):
    """Heads, norms and a classifier."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


class OnSphere(nn.Module):
    """A classifier whose rows lie on a sphere."""

    def __init__(self):
        super().__init__()
        self.rows = geoopt.ManifoldParameter(torch.randn(3, 5), manifold=geoopt.Sphere())
        self.rows.data /= self.rows.data.norm(dim=-1, keepdim=True)
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x @ self.rows.T + self.bias


def attentive():
    return Attentive().eval(), [(torch.randn(n, 3, 4), torch.arange(n) % 3) for n in (5, 2)]


def adapted():
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(net, config).eval()
    return model, [(torch.randn(n, 5), torch.arange(n) % 3) for n in (4, 3)]


def llama():
    """Complex pairs, a causal loss, and labels that do not count: 7 and 2 of them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=4, intermediate_size=5, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8, attention_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    batches = []
    for rows, ignored in ((2, 1), (1, 2)):
        ids = torch.randint(0, 7, (rows, 5))
        labels = ids.clone()
        labels[0, 1 : 1 + ignored] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return model, batches


def on_sphere():
    return OnSphere(), [(torch.randn(n, 5), torch.arange(n) % 3) for n in (4, 2)]


MODELS = {f.__name__: f for f in (attentive, adapted, llama, on_sphere)}


def logits_and_labels(model, values, batch):
    """Of every label that counts."""
    if isinstance(batch, dict):
        scores = functional_call(model, values, (), {"input_ids": batch["input_ids"]}).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        return scores[labels != -100], labels[labels != -100]
    return functional_call(model, values, (batch[0],)), batch[1]


def columns_by_differences(space):
    """C, from moves of the weights to both sides: second-order terms cancel."""
    found, h = [], 1e-5
    for e in space.project(torch.eye(space.dim)[0]).new_zeros(space.dim, space.dim).fill_diagonal_(1.0):
        v, sides = space.project(e), []
        for side in (h, -h):
            space.move_to(side * v)
            sides.append(torch.cat([t.flatten() for t in space.copies.values()]).clone())
        found.append((sides[0] - sides[1]) / (2 * h))
    space.move_to(None)
    return torch.stack(found, 1)


def dense(model, space, batches, matrix):
    """C* G C by autograd over all weights, without any operator."""
    names, values = list(space.copies), {name: t.clone() for name, t in space.copies.items()}
    whole = dict(model.named_parameters())
    G, total = 0.0, sum(len(logits_and_labels(model, values, b)[1]) for b in batches)
    for batch in batches:
        J = jacrev(lambda v, b=batch: logits_and_labels(model, v, b)[0])({n: values[n] for n in names})
        J = torch.cat([J[n].flatten(2) for n in names], -1)  # label, class, weight
        scores, labels = logits_and_labels(model, values, batch)
        p = scores.softmax(-1)
        if matrix == "ggn":
            inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        else:
            g = p - F.one_hot(labels, p.shape[-1])
            inner = g[:, :, None] * g[:, None]
        G = G + torch.einsum("nci,ncd,ndj->ij", J, inner, J).detach() / total
    assert whole
    C = columns_by_differences(space)
    return C.T @ G @ C


@pytest.mark.parametrize("matrix", ["ggn", "fisher"])
@pytest.mark.parametrize("name", MODELS)
def test_matrices_of_outputs_are_the_dense_ones(name, matrix):
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    measure = "geodesic-inv"
    found = spectrum(model, batches, matrix=matrix, measure=measure, k=4)
    space = sharpness.WeightSpace(model, MEASURES[measure])
    # Fused kernels have no forward derivative, and torch's fast path none at all.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with space.attached(), plain_attention():
            expected = torch.linalg.eigvalsh(dense(model, space, batches, matrix)).flip(0)[:4]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert found.eigenvalues == pytest.approx(expected.tolist(), rel=1e-6)
    # With every batch of the same weight, it is another matrix.
    if name == "llama" and matrix == "ggn":
        one = [spectrum(model, [b], matrix=matrix, measure=measure, k=1).eigenvalues[0] for b in batches]
        assert abs(sum(one) / 2 / found.eigenvalues[0] - 1) > 0.01


def test_the_operator_of_a_user_and_what_directions_would_give(monkeypatch):
    torch.manual_seed(0)
    model, batches = attentive()
    move_(model, condition=30.0)
    torch.backends.mha.set_fastpath_enabled(False)
    space = sharpness.WeightSpace(model, MEASURES["geodesic-inv"])
    try:
        with space.attached(), plain_attention():
            C = PushForward(space)
            G = curvlinops.GGNLinearOperator(
                model, nn.CrossEntropyLoss(), C.parameters, batches, num_data=7, batch_size_fn=len
            )
            found = (C.adjoint() @ G @ C) @ torch.eye(space.dim)
            expected = dense(model, space, batches, "ggn")
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
            # What a direction holds are velocities of other weights: of the model's own, not the balanced ones.
            wrong = {name: t for name, t in space.direction(torch.ones(space.dim)).tensors.items()}
            right = space.velocity(torch.ones(space.dim))
            assert any(not torch.allclose(wrong[n], right[n], rtol=0.1) for n in right)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with pytest.raises(ValueError, match="the space is not attached"):
        PushForward(space)


@pytest.mark.parametrize("name", ["attentive", "adapted", "on_sphere"])
def test_the_hessian_is_that_of_the_mean_loss(name):
    """Over unequal batches it is that of one batch with all examples, whose operator has tests of its own."""
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    one, two = (spectrum(model, b, k=3) for b in (batches, [whole]))
    assert one.eigenvalues == pytest.approx(two.eigenvalues, rel=1e-5)
    assert one.loss == pytest.approx(two.loss)
    top = float(sharpness.hessian(model, [whole], num_matvecs=3, progress=False))
    assert one.eigenvalues[0] == pytest.approx(top, rel=1e-4)
    mean = float(sharpness.hessian(model, batches, num_matvecs=3, progress=False))
    assert mean > top * 1.001  # the mean of eigenvalues is at least that of the mean


@pytest.mark.parametrize("matrix", ["hessian", "ggn", "fisher"])
@pytest.mark.parametrize("measure", ["geodesic-inv", "complete-inv"])
def test_equivalent_networks_have_one_spectrum(measure, matrix):
    torch.manual_seed(0)
    model, batches = networks.vit(layers=1, hidden=8), [networks.images(n) for n in (5, 3)]
    twin = copy.deepcopy(model)
    kinds = find(model) if measure == "geodesic-inv" else find(model, kinds=ALL, classes=True)
    move_(twin, kinds, condition=30.0, scale=0.3, seed=1)
    one, two = (spectrum(m, batches, matrix=matrix, measure=measure, k=3).eigenvalues for m in (model, twin))
    assert one == pytest.approx(two, rel=1e-5)
    one, two = (spectrum(m, batches, matrix=matrix, measure="euclidean", k=1).eigenvalues[0] for m in (model, twin))
    assert abs(one / two - 1) > 0.02


def test_micro_batches_and_estimators_of_curvlinops():
    torch.manual_seed(0)
    model, batches = adapted()
    whole = spectrum(model, batches, matrix="ggn", k=3)
    assert spectrum(model, batches, matrix="ggn", k=3, micro_batch=2).eigenvalues == pytest.approx(whole.eigenvalues)
    space = sharpness.WeightSpace(model, MEASURES["geodesic-inv"])
    with space.attached():
        loss = lambda: sum(F.cross_entropy(model(x), y) for x, y in batches)  # noqa: E731
        H = QuotientHessian(sharpness.HessianOperator(space, loss))
        dense_trace = float(torch.trace(H @ torch.eye(space.dim)))
        assert float(curvlinops.hutchpp_trace(H, num_matvecs=30)) == pytest.approx(dense_trace, rel=0.3)
        assert torch.equal(H.adjoint() @ torch.ones(space.dim), H @ torch.ones(space.dim))


def test_squared_errors_are_recognised_by_their_value():
    torch.manual_seed(0)
    model, batches = nn.Linear(4, 2), [(torch.randn(n, 4), torch.randn(n, 2)) for n in (5, 3)]
    found = spectrum(model, batches, lambda f, b: F.mse_loss(f(b[0]), b[1]), matrix="ggn", measure="euclidean", k=10)
    x = torch.cat([torch.cat([x, torch.ones(len(x), 1)], 1) for x, _ in batches])
    expected = torch.linalg.eigvalsh(torch.kron(torch.eye(2), x.T @ x) * 2 / 2 / len(x)).flip(0)
    assert found.eigenvalues == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"matrix": "kfac"}, "matrix must be 'hessian', 'ggn' or 'fisher', got 'kfac'"),
        ({"k": 0}, "k must be a whole number of at least 1"),
        ({"matrix": "ggn", "loss_fn": lambda f, b: f(b[0]).square().mean()}, "and this one is neither; take matrix="),
        ({"matrix": "fisher", "loss_fn": lambda f, b: f(b[0]).tanh().sum()}, "and this one is neither; take matrix="),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_cannot_be_measured_is_named(options, words):
    model, batches = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=words):
        spectrum(model, batches, **options)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_it_says_what_it_found():
    torch.manual_seed(0)
    model, batches = adapted()
    found = spectrum(model, batches, k=2)
    lines = str(found).splitlines()
    assert lines[0] == f"largest eigenvalues of the Hessian (geodesic-inv), loss {found.loss:.3f}"
    assert [float(line.split()[1]) for line in lines[1:3]] == pytest.approx(found.eigenvalues, rel=1e-3)
    assert found.to_dict()["eigenvalues"] == list(found.eigenvalues)
    assert found.num_matvecs > 2
    assert math.isfinite(found.loss)
    assert partial(spectrum, k=2)(model, batches).eigenvalues == pytest.approx(found.eigenvalues)

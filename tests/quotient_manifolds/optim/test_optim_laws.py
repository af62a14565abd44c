"""The laws of the optimisers against their definitions: Adam, Muon, gradient descent, and inverse roots."""

import copy
from dataclasses import replace

import peft
import pytest
import torch
from torch import nn

from quotient_manifolds.linalg import hermitian_power
from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientMuon,
    QuotientSGD,
    create_quotient_lora_optimizer,
    create_quotient_optimizer,
)
from quotient_manifolds.optim.metric import StepMetric, inverse_root, trace
from quotient_manifolds.symmetries import (
    GL,
    adapter_pairs,
    factor_pair,
    find,
    move_,
    pair,
    slot,
)
from quotient_manifolds.symmetries.orbits import random_elements
from tests.support.extent import checkered
from tests.support.networks import Encoder, bert, shake, vit
from tests.support.training import X, lora, loss_of, optimizer_of, point, products, train, trainable


def up_and_down(n, m, h, scale=1.0):
    """A model of two layers, of which one is the product U D, and the pair (U, Dᵀ)."""
    model = nn.ModuleDict({"up": nn.Linear(h, n, bias=False), "down": nn.Linear(m, h, bias=False)})
    p = pair([slot(model, "up.weight")], [slot(model, "down.weight", transpose=True)], GL(h))
    return model, model.up, model.down, replace(p, scale=scale)


def exact_inverse_root(V):
    """V^(-1/2) of a Hermitian matrix, after 1e-3 of its norm is added to its eigenvalues."""
    values, vectors = torch.linalg.eigh(V)
    return vectors @ torch.diag((values + 1e-3 * V.norm()).clamp_min(1e-60) ** -0.5) @ vectors.mH


def frames_of(G, H, s):
    """(Q, R) of sG above (H⁺)ᴴ, and of sH."""
    return torch.linalg.qr(torch.cat([s * G, torch.linalg.pinv(H).mH])), torch.linalg.qr(s * H)


class ExplicitAdam:
    """Adam of one pair with moments in explicit orthonormal frames Q, carried by P = Q_newᴴ Q_old."""

    def __init__(self, scale, G, H, lr):
        self.scale, self.G, self.H, self.lr = scale, G, H, lr * (8 / G.shape[1]) ** 0.5
        h = G.shape[1]
        self.moments = [(torch.zeros_like(X), torch.zeros(h, h), torch.zeros(len(X), 1)) for X in (G, H)]
        self.count = 0

    def step(self, grads):
        self.count += 1
        G, H, lr = self.G, self.H, self.lr
        before, ends, moments = frames_of(G, H, self.scale)[::-1], [], []  # each is measured by the other
        first, second = 1 - 0.9**self.count, 1 - 0.999**self.count
        for k in (0, 1):
            T = torch.linalg.inv(before[k][1])
            m, C, r = self.moments[k]
            g = grads[k] @ T
            m, C = 0.9 * m + 0.1 * g, 0.999 * C + 0.001 * g.mH @ g / len(g)
            root = exact_inverse_root(C / second)
            r = 0.999 * r + 0.001 * (g @ root).square().mean(1, keepdim=True)
            d = (m / first) @ root / ((r / second).sqrt() + 1e-8)
            ends.append((G, H)[k] - lr * d @ T.mH)
            moments.append((m, C, r))
        after = frames_of(*ends, self.scale)[::-1]
        for k in (0, 1):
            P = after[k][0].mH @ before[k][0]
            m, C, r = moments[k]
            self.moments[k] = (m @ P.mH, P @ C @ P.mH, r)
        self.G, self.H = ends


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("start", ["zero", "full"])
def test_adam_against_explicit_frames(scale, start):
    torch.manual_seed(0)
    n, m, h = 9, 7, 3
    G, H = (torch.zeros if start == "zero" else torch.randn)(n, h), torch.randn(m, h)
    target = torch.randn(n, m)
    model, up, down, p = up_and_down(n, m, h, scale)
    with torch.no_grad():
        up.weight.copy_(G)
        down.weight.copy_(H.T)
    optimizer = QuotientAdam(model.named_parameters(), [p], 0.02)
    oracle = ExplicitAdam(scale, G, H, 0.02)
    for _ in range(12):
        optimizer.zero_grad()
        torch.cosh(up.weight @ down.weight - target).sum().backward()
        optimizer.step()
        D = torch.sinh(oracle.G @ oracle.H.T - target)
        oracle.step((D @ oracle.H, D.T @ oracle.G))
    assert torch.allclose(up.weight.detach(), oracle.G, atol=1e-7)
    assert torch.allclose(down.weight.detach(), oracle.H.T, atol=1e-7)
    assert (up.weight.detach() - G).norm() > 0.1


@pytest.mark.parametrize(("h", "scale"), [(2, 1.0), (8, 0.3), (24, 4.0)])
def test_the_first_step_is_as_long_at_any_rank_and_scale(h, scale):
    torch.manual_seed(0)
    model, up, down, p = up_and_down(40, 30, h, scale)
    optimizer = QuotientAdam(model.named_parameters(), [p], 1e-3)
    G, H = point(p, model).split([40, 30])
    (scale * up.weight @ down.weight - torch.randn(40, 30)).square().sum().backward()
    optimizer.step()
    step = point(p, model)[:40] - G
    assert float((scale * step @ H.T).norm()) == pytest.approx(1e-3 * (8 * 40) ** 0.5, rel=1e-6)


def test_a_constant_rate_stays_at_the_optimum():
    """Directions that the answer does not need turn at random, until the factors were ill-conditioned."""
    torch.manual_seed(0)
    x, error = torch.randn(256, 32), 0.1 * torch.randn(256, 24)
    y = (x @ (torch.randn(24, 2) @ torch.randn(2, 32) / 6).mT + error).float()
    G, H = nn.Parameter(torch.zeros(24, 8).float()), nn.Parameter((0.2 * torch.rand(32, 8) - 0.1).float())
    optimizer = QuotientAdam([("G", G), ("H", H)], [factor_pair(G, H)], 0.1)
    losses = []
    for _ in range(500):
        optimizer.zero_grad()
        loss = (x.float() @ (G @ H.mT).mT - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses) < 0.01
    assert max(losses[200:]) < 2 * min(losses)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_complex_pairs(dtype):
    """Planes that RoPE rotates: one complex number each."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 4) for name in "qk"}).to(dtype)
    sides = [[slot(model, f"{name}.weight", transpose=True), slot(model, f"{name}.bias")] for name in "qk"]
    sides = [[s.part(0, 4, "half") for s in side] for side in sides]
    p = pair(*sides, GL(2, diagonal=True, field="complex"))
    C = torch.randn(7, 7, dtype=torch.complex128)

    def loss():
        z = p.gather(dict(model.named_parameters())).to(torch.complex128).squeeze(-1)
        return ((z[:, :7].mT @ z[:, 7:].conj() - C).abs() ** 2).sum()

    for make in (lambda: QuotientAdam(model.named_parameters(), [p], 1e-2),
                 lambda: QuotientSGD(model.named_parameters(), [p], 1e-3, 0.9)):  # fmt: skip
        optimizer = make()
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            found = loss()
            found.backward()
            optimizer.step()
            losses.append(float(found.detach()))
        assert losses[-1] < losses[0]
    assert model.q.weight.dtype == dtype


def numbers(state):
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size() if state.numel() > 1 else 0
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(numbers, values))


def test_the_state_is_no_larger_than_adamw():
    sizes = []
    for make in (lambda m: torch.optim.AdamW(trainable(m)), lambda m: optimizer_of(m, "adam")):
        model = lora(dtype=torch.float32)
        optimizer = make(model)
        train(model, optimizer, 2)
        found = optimizer.state_dict()
        sizes.append(numbers(found["state"]) + sum(numbers(b["state"]) for b in found.get("stacks", [])))
    assert sizes[1] <= sizes[0]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("make", [vit, bert, Encoder])
def test_attention_trains_alike_from_equivalent_weights(make, kind):
    torch.manual_seed(0)
    one = shake(make())
    two = copy.deepcopy(one)
    move_(two, condition=10.0, seed=2)
    if make is vit:
        batch = torch.randn(6, 1, 8, 8)
    elif make is bert:
        batch = torch.randint(20, (6, 7))
    else:
        batch = torch.randn(6, 5, 8)
    labels = torch.arange(6) % 3
    scores = []
    for model in (one, two):
        if kind == "adam":
            optimizer = create_quotient_optimizer(model, lr=3e-3, weight_decay=0.1, max_grad_norm=1.0)
        else:
            # The key bias has no gradient but rounding, which Adam's normalisation would lift out; SGD's does not.
            optimizer = QuotientSGD(model.named_parameters(), find(model), 1e-2, 0.9)
        for _ in range(15):
            optimizer.zero_grad()
            found = model(batch)
            found = found if isinstance(found, torch.Tensor) else found.logits
            nn.functional.cross_entropy(found, labels).backward()
            optimizer.step()
        scores.append(found.detach())
    assert torch.allclose(*scores, atol=1e-6)


def polar(A):
    U, s, Vh = torch.linalg.svd(A, full_matrices=False)
    return (U * (s > 1e-9 * s[0])) @ Vh


def root(S):
    values, vectors = torch.linalg.eigh(S)
    return vectors @ torch.diag(values**-0.5) @ vectors.mH


class ExplicitMuon:
    """Muon of one pair by eigenvalues and singular values, G of n × h and H of m × h."""

    def __init__(self, G, H, lr, momentum, decay, scale):
        self.G, self.H, self.options = G, H, (lr, momentum, decay, scale)
        self.m = [torch.zeros_like(G), torch.zeros_like(H)]

    def step(self, grads):
        lr, momentum, decay, scale = self.options
        G, H, M, N = self.G, self.H, self.G.T @ self.G, self.H.T @ self.H
        ends, floor = [], 1e-6 * torch.trace(M @ N) + (lr / (4 * (1 - momentum) * scale)) ** 2
        for k, (X_, W) in enumerate(((G, N), (H, M + floor * torch.linalg.inv(N)))):
            self.m[k] = momentum * self.m[k] + grads[k]
            u = grads[k] + momentum * self.m[k]
            if not M.any() and k:
                ends.append((1 - lr * decay) ** 0.5 * X_)
                continue
            if k:  # ridge regression: (M + floor N⁻¹)⁻¹ M (M + floor N⁻¹)⁻¹ instead of M⁻¹
                inverse = torch.linalg.inv(W)
                W = torch.linalg.inv(inverse @ M @ inverse)
            R = root(W)
            ends.append((1 - lr * decay) ** 0.5 * X_ - lr / (2 * scale) * polar(u @ R) @ R)
        self.G, self.H = ends


@pytest.mark.parametrize("start", ["zero", "full"])
def test_against_singular_values(start):
    torch.manual_seed(0)
    n, m, h = 9, 7, 3
    G, H = (torch.zeros if start == "zero" else torch.randn)(n, h), torch.randn(m, h)
    target = torch.randn(n, m)
    model, up, down, p = up_and_down(n, m, h, 2.0)
    with torch.no_grad():
        up.weight.copy_(G)
        down.weight.copy_(H.T)
    optimizer = QuotientMuon(model.named_parameters(), [p], 0.05, 0.8, weight_decay=0.1)
    oracle = ExplicitMuon(G, H, 0.05, 0.8, 0.1, 2.0)
    for _ in range(12):
        optimizer.zero_grad()
        torch.cosh(up.weight @ down.weight - target).sum().backward()
        optimizer.step()
        D = torch.sinh(oracle.G @ oracle.H.T - target)
        oracle.step((D @ oracle.H, D.T @ oracle.G))
    assert torch.allclose(up.weight.detach(), oracle.G, atol=1e-7)
    assert torch.allclose(down.weight.detach(), oracle.H.T, atol=1e-7)
    assert (up.weight.detach() - G).norm() > 0.05


@pytest.mark.parametrize("r", [1, 4, 8])
def test_a_step_changes_the_adapted_weight_by_the_rate(r):
    """Whatever the rank and the adapter's scale; and by no more when all singular values are counted."""
    model = lora(r=r, lora_alpha=3 * r)
    optimizer = create_quotient_lora_optimizer(model, lr=1e-3, optimizer="muon")
    before = products(model)
    loss_of(model).backward()
    optimizer.step()
    for old, new in zip(before, products(model), strict=True):
        size = float(torch.linalg.matrix_norm(3 * (new - old), 2))
        assert 0.5e-3 < size < 1.01e-3


def test_it_is_the_steepest_descent():
    """No other step of the same spectral norms descends faster, to first order."""
    torch.manual_seed(0)
    G, H, gradient = torch.randn(6, 3), torch.randn(5, 3), torch.randn(6, 3)
    model, up, down, p = up_and_down(6, 5, 3)
    with torch.no_grad():
        up.weight.copy_(G)
        down.weight.copy_(H.T)
    up.weight.grad, down.weight.grad = gradient, torch.zeros_like(down.weight)
    optimizer = QuotientMuon(model.named_parameters(), [p], 0.1)
    optimizer.certify = False  # no loss has this gradient
    optimizer.step()
    step = up.weight.detach() - G
    fastest = float((step * gradient).sum())
    for _ in range(200):
        other = torch.randn(6, 3)
        other *= torch.linalg.matrix_norm(step @ H.T, 2) / torch.linalg.matrix_norm(other @ H.T, 2)
        assert float((other * gradient).sum()) > fastest
    euclidean = -gradient * torch.linalg.matrix_norm(step @ H.T, 2) / torch.linalg.matrix_norm(gradient @ H.T, 2)
    assert float((euclidean * gradient).sum()) > 0.99 * fastest


def test_scales_of_adapters_and_rates_of_the_rest():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 9))
    config = peft.LoraConfig(
        r=4, lora_alpha=8, rank_pattern={"0": 2}, target_modules=["0", "2"], modules_to_save=["1"], use_rslora=True
    )
    model = peft.get_peft_model(net, config)
    optimizer = create_quotient_lora_optimizer(model, lr=0.02, optimizer="muon")
    assert [(len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [(4, 0.02), (2, 0.001)]
    assert [p.scale for p in adapter_pairs(model).pairs] == [pytest.approx(8 / 2**0.5), 4.0]
    with pytest.raises(ValueError, match='optimizer must be "adam" or "muon"'):
        create_quotient_lora_optimizer(lora(), lr=0.02, optimizer="sgd")


def test_attention_weights():
    torch.manual_seed(0)
    model = shake(vit())
    optimizer = create_quotient_optimizer(model, lr=0.02, optimizer="muon", weight_decay=0.1)
    batch, labels = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        found = model(batch)
        loss = nn.functional.cross_entropy(found if isinstance(found, torch.Tensor) else found.logits, labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def pair_of(G, H, dtype=torch.float64):
    G, H = (nn.Parameter(x.to(dtype, copy=True)) for x in (G, H))
    return G, H, factor_pair(G, H)


def first_step(G, H, T, lr, **options):
    """Size of the first step along T, in the spectral norm, in units of the rate."""
    up, down, p = pair_of(G, H, T.dtype)
    optimizer = QuotientMuon([("G", up), ("H", down)], [p], lr, **options)
    before = (up.double() @ down.double().mT).detach()
    ((up @ down.mT) * T).sum().backward()
    optimizer.step()
    return float(torch.linalg.matrix_norm((up.double() @ down.double().mT).detach() - before, 2)) / lr


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sigma", [0.0, 1e-3, 0.05, 0.5, 1.0, 5.0, 1e3])
def test_no_step_is_long_where_the_product_is_small(sigma, momentum, monkeypatch):
    """Each factor moves the product by η/2 at most, and ξ_G ξ_Hᴴ by (1 - μ) η/2."""
    torch.manual_seed(0)
    G, H = (torch.linalg.qr(torch.randn(k, 3)).Q for k in (9, 7))
    T, lr = torch.randn(9, 7), 1e-2
    options = {"momentum": momentum}
    assert 0.499 < first_step(sigma * lr * G, H, T, lr, **options) <= 1.001 + (1 - momentum) / 2

    def metric(self, stack, grams):  # what a floor that knows nothing of the rate would do
        M, N = grams.unbind(-3)
        floor = 1e-6 * trace(M @ N)[..., None, None]
        return StepMetric(M, N, stack.scale, torch.where(floor > 0, floor, 1))

    monkeypatch.setattr(QuotientMuon, "_metric", metric)
    if sigma == 1e-3:
        assert first_step(sigma * lr * G, H, T, lr, **options) > 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("rank", [1, 2])
def test_the_first_step_is_as_long_where_factors_lack_rank(rank, condition, dtype):
    """Padded adapters, in any basis. The missing directions hold rounding errors, which were taken for directions."""
    torch.manual_seed(0)
    G = torch.randn(40, 4) * torch.tensor([1.0] * rank + [1e-9] * (4 - rank))
    H, A = torch.randn(30, 4), random_elements(torch.empty(4, 4), condition, torch.Generator().manual_seed(0))
    T = torch.randn(40, 30).to(dtype)
    assert 0.5 < first_step(G @ torch.linalg.inv(A), H @ A.mT, T, 0.02) < 1.1


@pytest.mark.parametrize(
    ("case", "dtype"), checkered([(8, 2, 0.1), (8, 1, 0.0), (4, 2, 0.3)], [torch.float32, torch.float64])
)
def test_an_answer_of_lower_rank_is_reached(case, dtype):
    """H turned by a radian a step where singular values stay near 0, and its momentum, a covector, grew with it."""
    (h, rank, noise), _ = case, torch.manual_seed(0)
    n, m, lr = 24, 32, 0.02
    x, error = torch.randn(256, m), noise * torch.randn(256, n)
    U, V = (torch.linalg.qr(torch.randn(k, rank)).Q for k in (n, m))
    y = x @ (2 * U @ V.mT).mT + error  # 100 steps away
    G, H, p = pair_of(torch.zeros(n, h), (2 * torch.rand(m, h) - 1) / m**0.5, dtype)
    x, y = x.to(dtype), y.to(dtype)
    optimizer = QuotientMuon([("G", G), ("H", H)], [p], lr)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (x @ (G @ H.mT).mT - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    # h singular values that change by up to the rate in every step
    assert max(losses[150:]) < noise**2 + 2 * h * lr**2 / n


def test_a_gradient_of_rank_one_moves_one_direction():
    model = lora(full_rank=False)
    before = products(model)
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2, optimizer="muon")
    loss_of(model, X[:1], X[:1, :9]).backward()
    optimizer.step()
    for old, new in zip(before, products(model), strict=True):
        s = torch.linalg.svdvals(new - old)
        assert s[0] > 1e-4
        assert s[1] < 1e-9 * s[0]


@pytest.mark.parametrize("size", [1.0, 1e-18, 1e-30])
@pytest.mark.parametrize("lr", [2e-2, 1e-6])
@pytest.mark.parametrize(("start", "width"), [(True, 64), ("gaussian", 4096)])
def test_the_first_step_in_float32_gives_numbers(start, width, lr, size):
    """At B = 0 the gradient of A is 0, whose direction, however long, is 0; and so that of what is nearly 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 8))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=start)
    model = peft.get_peft_model(net, config).to(torch.float32)
    optimizer = create_quotient_lora_optimizer(model, lr=lr, optimizer="muon")
    layer = model.base_model.model[0]
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    before = A.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        (size * model(torch.randn(5, width, dtype=torch.float32)).square().sum()).backward()
        optimizer.step()
        assert bool(A.isfinite().all() & B.isfinite().all())
        if not step:
            assert torch.equal(A, before)
            assert bool(B.any()) == (size > 1e-20)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_first_step(scale):
    model, up, down, p = up_and_down(6, 5, 3, scale)
    G, H = point(p, model).split([6, 5])
    W = scale**2 * H.T @ H, scale**2 * G.T @ G + torch.linalg.inv(H.T @ H)
    optimizer = QuotientSGD(model.named_parameters(), [p], 0.1, 0.9, weight_decay=0.5)
    (up.weight @ down.weight).sin().sum().backward()
    optimizer.step()
    D = (G @ H.T).cos()
    for factor, gradient, weight, found in ((G, D @ H, W[0], up.weight), (H, D.T @ G, W[1], down.weight.T)):
        step = gradient @ torch.linalg.inv(weight)
        torch.testing.assert_close(found.detach(), (1 - 0.1 * 0.5) ** 0.5 * factor - 0.1 * step)


def test_the_floor_bounds_the_term_of_second_order():
    """ξ_G ξ_Hᴴ is of order η² even where the product is nearly zero; without the floor it would be η²/σ.

    Rows of the first d have norm √h, ‖K_G⁻¹ K_H⁻ᴴ‖₂ ≤ 1, and steps are multiplied by √(8/h): ‖ξ_G ξ_Hᴴ‖ ≤ 8 η² √(nm).
    """
    torch.manual_seed(0)
    model, up, down, p = up_and_down(9, 7, 3)
    with torch.no_grad():
        up.weight.copy_(torch.randn(9, 3) @ torch.diag(torch.tensor([1.0, 1e-3, 1e-9])))
    lr = 1e-2
    optimizer = QuotientAdam(model.named_parameters(), [p], lr)
    before = point(p, model)
    (up.weight @ down.weight - torch.randn(9, 7)).square().sum().backward()
    optimizer.step()
    (dG, dH), H = (point(p, model) - before).split([9, 7]), before[9:]
    assert (dG @ dH.T).norm() <= 8 * lr**2 * (9 * 7) ** 0.5
    assert (dG @ H.T).norm() > lr


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_against_eigenvalues(dtype, size):
    torch.manual_seed(0)
    U = torch.linalg.qr(torch.randn(5, 6, 6, dtype=dtype)).Q
    S = size * (U * torch.logspace(0, -6, 6).to(dtype)) @ U.mH  # singular values of X down to 1e-3
    torch.testing.assert_close(inverse_root(S, torch.eye(6, dtype=dtype)), hermitian_power(S, -0.5), rtol=1e-7, atol=0)


def test_what_is_rounding_stays_small():
    d = torch.tensor([1.0, 1e-5, 1e-8, 0.0])
    values = d * inverse_root(torch.diag(d**2), torch.eye(4)).diagonal()
    assert abs(float(values[0]) - 1) < 1e-12
    assert (values[1:] <= 7000 * d[1:]).all()
    exact = d[:3] * hermitian_power(torch.diag(d[:3] ** 2), -0.5).diagonal()  # which the exact root would not leave
    assert abs(float(exact[2]) - 1) < 1e-12


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-60, 1e-41])
def test_what_is_too_small_becomes_zero(size):
    """Its inverse root, times the metric's, would be infinite in float32, and infinity times 0 is no number."""
    eye = torch.eye(3, dtype=torch.float64)
    S = size * eye.expand(2, 3, 3)
    assert not inverse_root(S, eye).any()
    assert inverse_root(S + 1e-39 * eye, eye).diagonal(dim1=-2, dim2=-1).all()


@pytest.mark.parametrize("momenta", [(0.5, 0.95), (0.9, 0.0, 0.9)], ids=str)
def test_a_schedule_of_momentum_follows_the_rule_of_gradient_descent(momenta):
    """m ← μ m + ∇ with the μ of now; the mean that was kept jumped by (1 - μ) / (1 - μ'), here by ten.

    While H stays, so does the metric of G, and steps are multiples of one gradient.
    """
    torch.manual_seed(0)
    G, H = (nn.Parameter(torch.randn(n, 2)) for n in (9, 7))
    optimizer = QuotientSGD([("G", G), ("H", H)], [factor_pair(G, H)], lr=1e-6, momentum=momenta[0])
    optimizer.certify = False
    G.grad, H.grad = torch.randn(9, 2), torch.zeros(7, 2)
    multiple, lengths, wanted = 0.0, [], []
    for momentum in (m for m in momenta for _ in range(4)):
        optimizer.param_groups[0]["momentum"] = momentum
        before = G.detach().clone()
        optimizer.step()
        multiple = momentum * multiple + 1
        lengths.append(float((G.detach() - before).norm()))
        wanted.append(multiple)
    for length, m in zip(lengths, wanted, strict=True):
        assert length / lengths[0] == pytest.approx(m, rel=1e-6)  # of weights a million times as large

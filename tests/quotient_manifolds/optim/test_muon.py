"""Muon against its definition by singular values, its bound, and what it does where the product lacks rank."""

from dataclasses import replace

import peft
import pytest
import torch
from torch import nn

from quotient_manifolds.optim import QuotientMuon, create_quotient_lora_optimizer, create_quotient_optimizer
from quotient_manifolds.optim.buckets import trace
from quotient_manifolds.optim.preconditioner import Preconditioner
from quotient_manifolds.symmetries import GL, adapter_pairs, block, pair

from ...networks import shake, vit
from ...training import X, lora, loss_of, products


def polar(A):
    U, s, Vh = torch.linalg.svd(A, full_matrices=False)
    return (U * (s > 1e-9 * s[0])) @ Vh


def root(S):
    values, vectors = torch.linalg.eigh(S)
    return vectors @ torch.diag(values**-0.5) @ vectors.mH


class ExplicitMuon:
    """Muon of one pair by eigenvalues and singular values, G of n × h and H of m × h."""

    def __init__(self, G, H, lr, momentum, nesterov, decay, scale):
        self.G, self.H, self.options = G, H, (lr, momentum, nesterov, decay, scale)
        self.m = [torch.zeros_like(G), torch.zeros_like(H)]

    def step(self, grads):
        lr, momentum, nesterov, decay, scale = self.options
        G, H, M, N = self.G, self.H, self.G.T @ self.G, self.H.T @ self.H
        ends, floor = [], 1e-6 * torch.trace(M @ N) + (lr / (2 * scale)) ** 2
        for k, (X_, W) in enumerate(((G, N), (H, M + floor * torch.linalg.inv(N)))):
            self.m[k] = momentum * self.m[k] + grads[k]
            u = grads[k] + momentum * self.m[k] if nesterov else self.m[k]
            if not M.any() and k:
                ends.append((1 - lr * decay) ** 0.5 * X_)
                continue
            R = root(W)
            ends.append((1 - lr * decay) ** 0.5 * X_ - lr / (2 * scale) * polar(u @ R) @ R)
        self.G, self.H = ends


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("start", ["zero", "full"])
def test_against_singular_values(start, nesterov):
    torch.manual_seed(0)
    n, m, h = 9, 7, 3
    G, H = (torch.zeros if start == "zero" else torch.randn)(n, h), torch.randn(m, h)
    target = torch.randn(n, m)
    up, down = nn.Linear(h, n, bias=False), nn.Linear(m, h, bias=False)
    with torch.no_grad():
        up.weight.copy_(G)
        down.weight.copy_(H.T)
    p = replace(pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(h)), scale=2.0)
    optimizer = QuotientMuon([up.weight, down.weight], [p], 0.05, 0.8, 0.1, nesterov=nesterov)
    oracle = ExplicitMuon(G, H, 0.05, 0.8, nesterov, 0.1, 2.0)
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
    up, down = nn.Linear(3, 6, bias=False), nn.Linear(5, 3, bias=False)
    with torch.no_grad():
        up.weight.copy_(G)
        down.weight.copy_(H.T)
    p = pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(3))
    up.weight.grad, down.weight.grad = gradient, torch.zeros_like(down.weight)
    optimizer = QuotientMuon([up.weight, down.weight], [p], 0.1)
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
    assert [p.scale for p in adapter_pairs(model)] == [pytest.approx(8 / 2**0.5), 4.0]
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


@pytest.mark.parametrize("bounded", [True, False])
def test_no_step_is_long_where_the_product_lacks_rank(bounded, monkeypatch):
    """Gradients of rank one leave singular values at 0; another then moves H there, and ξ_G ξ_Hᴴ is of second order."""
    if not bounded:  # what a floor that knows nothing of the rate would do

        def metric(self, bucket, M, N):
            floor = 1e-6 * trace(M @ N)[..., None, None]
            return Preconditioner(M, N, bucket.scale, torch.where(floor > 0, floor, 1))

        monkeypatch.setattr(QuotientMuon, "_metric", metric)
    model = lora(full_rank=False, lora_alpha=4)
    lr, longest = 1e-2, 0.0
    optimizer = create_quotient_lora_optimizer(model, lr=lr, optimizer="muon", momentum=0.0, nesterov=False)
    for i in range(12):
        before = products(model)
        optimizer.zero_grad()
        loss_of(model, X[i : i + 1], X[i : i + 1, :9]).backward()
        optimizer.step()
        for old, new in zip(before, products(model), strict=True):
            longest = max(longest, float(torch.linalg.matrix_norm(new - old, 2)) / lr)
    assert (longest <= 1.501) == bounded


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

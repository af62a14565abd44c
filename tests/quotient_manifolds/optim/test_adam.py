"""Adam against moments in explicit orthonormal bases, and on every kind of pair."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientSGD,
    create_quotient_optimizer,
)
from quotient_manifolds.symmetries import (
    GL,
    apply_random_symmetry_,
    block,
    factor_pair,
    find_symmetric_pairs,
    pair,
)

from ...networks import Encoder, bert, shake, vit
from ...training import (
    lora,
    optimizer_of,
    train,
    trainable,
)


def inverse_root(V):
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
            root = inverse_root(C / second)
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
    up, down = nn.Linear(h, n, bias=False), nn.Linear(m, h, bias=False)
    with torch.no_grad():
        up.weight.copy_(G)
        down.weight.copy_(H.T)
    p = replace(pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(h)), scale=scale)
    optimizer = QuotientAdam([up.weight, down.weight], [p], 0.02)
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
    up, down = nn.Linear(h, 40, bias=False), nn.Linear(30, h, bias=False)
    p = replace(pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(h)), scale=scale)
    optimizer = QuotientAdam([up.weight, down.weight], [p], 1e-3)
    G, H = p.gather().detach().split([40, 30])
    (scale * up.weight @ down.weight - torch.randn(40, 30)).square().sum().backward()
    optimizer.step()
    step = p.gather().detach()[:40] - G
    assert float((scale * step @ H.T).norm()) == pytest.approx(1e-3 * (8 * 40) ** 0.5, rel=1e-6)


def test_a_constant_rate_stays_at_the_optimum():
    """Directions that the answer does not need turn at random, until the factors were ill-conditioned."""
    torch.manual_seed(0)
    x, error = torch.randn(256, 32), 0.1 * torch.randn(256, 24)
    y = (x @ (torch.randn(24, 2) @ torch.randn(2, 32) / 6).mT + error).float()
    G, H = nn.Parameter(torch.zeros(24, 8).float()), nn.Parameter((0.2 * torch.rand(32, 8) - 0.1).float())
    optimizer = QuotientAdam([G, H], [factor_pair(G, H)], 0.1)
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
    q, k = nn.Linear(6, 4).to(dtype), nn.Linear(6, 4).to(dtype)
    sides = [[block(m, "weight", transpose=True, rotary="half"), block(m, "bias", rotary="half")] for m in (q, k)]
    p = pair(*sides, GL(2, diagonal=True, field="complex"))
    C = torch.randn(7, 7, dtype=torch.complex128)

    def loss():
        z = pair(*sides, GL(2, diagonal=True, field="complex")).gather().to(torch.complex128).squeeze(-1)
        return ((z[:, :7].mT @ z[:, 7:].conj() - C).abs() ** 2).sum()

    for make in (lambda: QuotientAdam([*q.parameters(), *k.parameters()], [p], 1e-2),
                 lambda: QuotientSGD([*q.parameters(), *k.parameters()], [p], 1e-3, 0.9)):  # fmt: skip
        optimizer = make()
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            found = loss()
            found.backward()
            optimizer.step()
            losses.append(float(found.detach()))
        assert losses[-1] < losses[0]
    assert q.weight.dtype == dtype


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
        sizes.append(numbers(found["state"]) + sum(numbers(b["state"]) for b in found.get("buckets", [])))
    assert sizes[1] <= sizes[0]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("make", [vit, bert, Encoder])
def test_attention_trains_alike_from_equivalent_weights(make, kind):
    torch.manual_seed(0)
    one = shake(make())
    two = copy.deepcopy(one)
    apply_random_symmetry_(two, 10.0, seed=2)
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
            optimizer = QuotientSGD(model.parameters(), find_symmetric_pairs(model), 1e-2, 0.9)
        for _ in range(15):
            optimizer.zero_grad()
            found = model(batch)
            found = found if isinstance(found, torch.Tensor) else found.logits
            nn.functional.cross_entropy(found, labels).backward()
            optimizer.step()
        scores.append(found.detach())
    assert torch.allclose(*scores, atol=1e-6)

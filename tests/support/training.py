"""Training LoRA factors, and what tells whether two runs are the same."""

import copy

import peft
import peft.optimizers  # noqa: F401
import torch
from torch import nn

from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientMuon,
    QuotientSGD,
)
from quotient_manifolds.symmetries import (
    adapter_pairs,
    find,
    move_,
)
from quotient_manifolds.weights import weights_of

X = torch.randn(48, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

Y = torch.sin(2 * X[:, :9])


def lora(full_rank=True, targets=("0", "2"), r=4, dtype=torch.float64, adapter="default", **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9)).to(dtype)
    config = peft.LoraConfig(r=r, target_modules=list(targets), init_lora_weights=not full_rank, **options)
    return peft.get_peft_model(net, config, adapter_name=adapter).to(dtype)


def loss_of(model, x=X, y=Y):
    p = next(model.parameters())
    return (model(x.to(p.dtype)) - y.to(p.dtype)).square().mean()


def products(model):
    return [p.manifold().to_matrix(point(p, model)) for p in adapter_pairs(model).pairs]


def point(p, model):
    """The factors of a pair, one above the other."""
    return p.gather(weights_of(model)).detach()


def apart(one, two):
    return max(float((a - b).norm() / a.norm()) for a, b in zip(products(one), products(two), strict=True))


def moved(model, condition=100.0):
    """The same function with other factors."""
    model = copy.deepcopy(model)
    if all(bool(p.any()) for p in products(model)):
        move_(model, condition=condition, seed=3)
        return model
    generator = torch.Generator().manual_seed(3)
    for p in adapter_pairs(model).pairs:  # the zero factor stays zero
        x = point(p, model)
        U, _, Vh = torch.linalg.svd(torch.randn(p.group.h, p.group.h, generator=generator, dtype=x.dtype))
        A = (U * torch.logspace(0, 2, p.group.h, dtype=x.dtype)) @ Vh
        G, H = x.split([p.n, p.m])
        p.scatter_(torch.cat([G @ torch.linalg.inv(A), H @ A.mH]), weights_of(model))
    return model


def train(model, optimizer, steps=50, schedule=True):
    warm = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / 5, (steps - t) / steps) if schedule else 1.0
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        warm.step()
        losses.append(float(loss.detach()))
    return losses


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def trained(model):
    """The same with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


KINDS = ["adam", "muon", "sgd"]


def optimizer_of(model, kind, lr=1e-2, symmetries=None, **options):
    symmetries = find(model) if symmetries is None else symmetries
    if kind == "adam":
        return QuotientAdam(trained(model), symmetries, lr, **options)
    if kind == "muon":
        return QuotientMuon(trained(model), symmetries, 5 * lr, **options)
    return QuotientSGD(trained(model), symmetries, 10 * lr, 0.9, **options)

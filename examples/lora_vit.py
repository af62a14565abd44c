"""Adapt a vision transformer with LoRA, on the quotient and with AdamW, from two sets of equivalent factors.

A small ViT is trained on scanned digits, then adapted by rank-4 adapters to the same digits turned by a quarter. Both
optimisers start from one adapter and from equivalent factors of it: (B M, M⁻¹ A) in place of (B, A). On the quotient
the two runs are one; with AdamW they are not. Runs offline in under a minute: ``pip install '.[demo,lora]'``.
"""

from __future__ import annotations

import argparse
import copy

import peft
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.optim import create_quotient_lora_optimizer
from quotient_manifolds.symmetries import adapter_pairs
from sharpness.demo import digits, train, vision_transformer


def adapted(base: nn.Module, condition: float) -> nn.Module:
    """Give the model a fresh adapter (B = 0); A is replaced by M⁻¹ A with M of a condition number."""
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "query", "value"]  # the latter two before transformers 5.9
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, modules_to_save=["classifier"])
    model: nn.Module = peft.get_peft_model(copy.deepcopy(base), config)
    weights = dict(model.named_parameters())
    for pair in adapter_pairs(model).pairs:
        B, At = pair.gather(weights).detach().split([pair.n, pair.m])
        M = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), At.shape[1])
        pair.scatter_(torch.cat([B, At / M]), weights)  # B is zero, so that the product stays
    return model


def adapt(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train the adapter."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for part in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]).logits, y[part]).backward()
            optimizer.step()


def main(arguments: list[str] | None = None) -> dict[str, list[Tensor]]:
    """Run the example; give the test logits of the two runs, by optimiser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-epochs", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args(arguments)
    x, y, x_test, y_test = digits()
    torch.manual_seed(0)
    base = vision_transformer()
    train(base, x, y, epochs=options.base_epochs, progress=False)
    turned, turned_test = x.rot90(dims=(2, 3)), x_test.rot90(dims=(2, 3))
    found = {}
    for name in ("AdamW", "QuotientAdam"):
        scores = []
        for condition in (1.0, 30.0):
            model = adapted(base, condition)
            if name == "AdamW":
                parameters = [p for p in model.parameters() if p.requires_grad]
                optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, options.lr, weight_decay=0.0)
            else:
                optimizer = create_quotient_lora_optimizer(model, lr=options.lr)
            adapt(model, optimizer, turned, y, options.epochs)
            with torch.no_grad():
                scores.append(model(turned_test).logits)
        accuracies = ", ".join(f"{(s.argmax(1) == y_test).double().mean():.1%}" for s in scores)
        change = float((scores[0] - scores[1]).norm() / scores[0].norm())
        print(f"{name:<13} accuracy {accuracies}; logits of the two runs differ by {change:.1e}")
        found[name] = scores
    return found


if __name__ == "__main__":
    main()

"""Exact symmetries that geodesic sharpness does not divide out: what each does to the measures.

The demo's vision transformer, trained for a few epochs; every move leaves its scores as they are.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from _common import write
from torch import Tensor, nn

import sharpness
from quotient_manifolds.symmetries import apply_random_symmetry_
from sharpness.demo import digits, train, vision_transformer

MEASURES = {"geodesic-inv": 0.1, "geodesic-mix": 0.1, "adaptive": 0.5}


def gl(model: nn.Module) -> None:
    """Move every head along its orbit of GL(h); this one is divided out."""
    apply_random_symmetry_(model, condition=30.0)


@torch.no_grad()
def layer_norm(model: nn.Module) -> None:
    """Multiply γ and β before attention by e^N(0,1), and divide the columns of the weights that read them."""
    for layer in model.vit.layers:
        scale = torch.randn(layer.layernorm_before.weight.shape).exp()
        layer.layernorm_before.weight.mul_(scale)
        layer.layernorm_before.bias.mul_(scale)
        for projection in (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj):
            projection.weight.div_(scale)


@torch.no_grad()
def key_bias(model: nn.Module) -> None:
    """Shift the key biases: softmax does not see it."""
    for layer in model.vit.layers:
        layer.attention.k_proj.bias.add_(torch.randn_like(layer.attention.k_proj.bias))


@torch.no_grad()
def value_bias(model: nn.Module) -> None:
    """Shift the value biases, and take away from the output bias what comes of it: attention weights add up to 1."""
    for layer in model.vit.layers:
        shift = torch.randn_like(layer.attention.v_proj.bias)
        layer.attention.v_proj.bias.add_(shift)
        layer.attention.o_proj.bias.sub_(layer.attention.o_proj.weight @ shift)


MOVES: dict[str, Callable[[nn.Module], None]] = {
    "as it is": lambda model: None,
    "GL(h) of every head": gl,
    "LayerNorm against the columns that read it": layer_norm,
    "key bias": key_bias,
    "value bias against output bias": value_bias,
}


def measured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Measure by all measures."""
    found = {}
    for name, rho in MEASURES.items():
        value = float(sharpness.evaluate(model, [batch], measure=name, rho=rho, progress=False))
        assert isinstance(value, float)
        found[name] = round(value, 6)
    return found


def main() -> None:
    """Train once, move in every way, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels, _, _ = digits()
    model = vision_transformer()
    train(model, images, labels, epochs=options.epochs, progress=False)
    batch = (images[:128], labels[:128])
    rows = []
    for name, move in MOVES.items():
        torch.manual_seed(1)
        twin = copy.deepcopy(model)
        move(twin)
        with torch.no_grad():
            change = float((twin(images).logits - model(images).logits).abs().max())
        rows.append({"move": name, "largest change of a score": change, **measured(twin, batch)})
    write("other_symmetries", rows)


if __name__ == "__main__":
    main()

"""Which symmetries move fingerprints, and whether fine-tunes of a pre-trained network are told from unrelated networks.

``python fingerprints.py`` moves a small GPT-2 with random gains and biases along one kind of symmetry after another,
and says how far the features of HuRef (Zeng et al. 2024) and of SELF (Zhang and Zheng 2025) move, written anew from the
papers, beside our distance modulo all symmetries. Everything is in float64.

``python fingerprints.py --bert B --sst2 S --out O`` fine-tunes the BERT in the folder B three times on the sentences of
SST-2, trains two networks of its shape from random weights in the same way, and tests every pair for independence. The
networks are kept in the folder O, and those that are there are not trained again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from _common import write
from lora_text import sst2
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import apply_random_symmetry_
from quotient_manifolds.symmetries.whole import apply_random_moves_, canonical_form

STEPS, BATCH, LENGTH = 40, 16, 32


def small_network(seed: int) -> nn.Module:
    """GPT-2 in float64, of which no gain is 1 and no bias is 0."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def attention(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V (inputs, all heads) and W_O (all heads, outputs) of a layer of GPT-2, x ↦ x W."""
    Q, K, V = layer.attn.c_attn.weight.detach().chunk(3, dim=1)
    return Q, K, V, layer.attn.c_proj.weight.detach()


def huref(model: nn.Module) -> Tensor:
    """HuRef's invariant terms X W_Q W_Kᵀ Xᵀ, X W_V W_O Xᵀ and X W_1 W_2 Xᵀ of the last two layers; X are embeddings."""
    X = model.transformer.wte.weight.detach()
    terms = []
    for layer in model.transformer.h[-2:]:
        Q, K, V, O = attention(layer)
        inner = layer.mlp.c_fc.weight.detach() @ layer.mlp.c_proj.weight.detach()
        terms += [X @ product @ X.T for product in (Q @ K.T, V @ O, inner)]
    return torch.stack(terms).flatten()


def self_features(model: nn.Module) -> Tensor:
    """SELF's features: the singular values and the eigenvalues' sizes of W_Q W_Kᵀ and W_V W_O, layer by layer."""
    found = []
    for layer in model.transformer.h:
        Q, K, V, O = attention(layer)
        for product in (Q @ K.T, V @ O):
            found += [torch.linalg.svdvals(product), torch.linalg.eigvals(product).abs().sort(descending=True).values]
    return torch.cat(found)


def apart(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖one‖, and 1 minus the cosine where both have turned away."""
    return float((one - other).norm() / one.norm())


def permuted(model: nn.Module, seed: int) -> None:
    """Permute the heads and the hidden neurons of every layer."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.transformer.h:
        width = layer.attn.embed_dim
        heads = torch.arange(width).view(layer.attn.num_heads, -1)[
            torch.randperm(layer.attn.num_heads, generator=generator)
        ].flatten()
        neurons = torch.randperm(layer.mlp.c_fc.nf, generator=generator)
        columns = torch.cat([heads + i * width for i in range(3)])
        for conv, order in ((layer.attn.c_attn, columns), (layer.mlp.c_fc, neurons)):
            conv.weight.data = conv.weight.data[:, order]
            conv.bias.data = conv.bias.data[order]
        for conv, order in ((layer.attn.c_proj, heads), (layer.mlp.c_proj, neurons)):
            conv.weight.data = conv.weight.data[order]


def moved(model: nn.Module, kind: str, seed: int) -> nn.Module:
    """A copy that computes the same function, moved along one kind of symmetry."""
    twin = copy.deepcopy(model)
    if kind == "permutations":
        permuted(twin, seed)
    elif kind in ("qk", "vo"):
        apply_random_symmetry_(twin, seed=seed, pairs=[p for p in canonical_form(twin).pairs if p.kind == kind])
    else:
        apply_random_moves_(twin, seed=seed, kinds=[kind])
    return twin

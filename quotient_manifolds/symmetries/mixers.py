"""Layers other than plain attention: possible symmetries of latent attention and state-space layers.

Names and shapes propose pairs; a gradient decides which of them hold (:mod:`.discovery`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from .attention import Projection
from .blocks import GL, block
from .pairs import SymmetricPair
from .roles import PLANES

__all__ = ["proposals"]

_LATENT = (
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
#: The projection of the queries, with that of a gate beside them in the second.
_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")


def proposals(module: nn.Module, name: str) -> list[tuple[SymmetricPair, ...]]:
    """List the possible pairs of a layer, each with its alternatives; empty for a layer of another kind."""
    if all(hasattr(module, a) for a in _LATENT) and any(hasattr(module, a) for a in _QUERIES):
        return list(_latent(module, name))
    conv = getattr(module, "conv1d", None)
    if isinstance(conv, nn.Conv1d) and conv.groups == conv.in_channels == conv.out_channels:
        return [*_convolved(module, name, conv), *_states(module, name)]
    return []


def _latent(m: Any, name: str) -> Iterator[tuple[SymmetricPair, ...]]:
    """Propose pairs where keys and values of all heads come from one latent vector; RoPE acts on a shared key."""
    nope, rope, size = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
    source = next(found for a in _QUERIES if (found := getattr(m, a, None)) is not None)
    v, o = Projection(m.kv_b_proj, start=nope, stride=nope + size), Projection(m.o_proj)
    heads = o.dimensions(into=False) // size
    q, k = Projection(source, stride=Projection(source).dimensions() // heads), Projection(m.kv_b_proj, stride=v.stride)
    for i in range(heads):
        if nope:
            G, H = q.input_blocks(i, nope, 0, nope), k.input_blocks(i, nope, 0, nope)
            yield (SymmetricPair(name, "qk", GL(nope), G, H, head=i),)
        G, H = v.input_blocks(i, size, 0, size), o.output_blocks(i, size)
        gated = GL(size, diagonal=True)  # what a gate leaves
        yield tuple(SymmetricPair(name, "vo", group, G, H, head=i) for group in (GL(size), gated))
    if not rope:
        return
    turned, shared = replace(q, start=nope), Projection(m.kv_a_proj_with_mqa, start=m.kv_lora_rank)
    group = GL(rope // 2, diagonal=True, field="complex")
    yield tuple(
        SymmetricPair(
            name, "qk", group, tuple(b for i in range(heads) for b in turned.input_blocks(i, rope, 0, rope, planes)),
            shared.input_blocks(0, rope, 0, rope, planes), part="rotary",
        ) for planes in PLANES
    )  # fmt: skip


def _convolved(m: Any, name: str, conv: nn.Conv1d) -> Iterator[tuple[SymmetricPair, ...]]:
    """Propose to scale the channels of a projection against the convolution that each channel passes separately."""

    def scaled(projection: nn.Linear, row: int, channel: int, count: int, part: str) -> SymmetricPair:
        rows = slice(row, row + count)
        bias = () if projection.bias is None else (block(projection, "bias", rows),)
        G = (block(projection, "weight", rows, transpose=True), *bias)
        H = block(conv, "weight", slice(channel, channel + count), transpose=True)
        return SymmetricPair(name, "conv", GL(count, diagonal=True), G, (H,), part=part)

    grouped = getattr(m, "in_proj_qkvz", None)
    if isinstance(grouped, nn.Linear):  # rows [head][q, k, v, z], channels [q; k; v]
        keys, values = m.head_k_dim, m.head_v_dim * m.num_v_heads // m.num_k_heads
        for i in range(m.num_k_heads):
            row, all_keys = i * (2 * keys + 2 * values), m.num_k_heads * keys
            yield (scaled(grouped, row, i * keys, keys, f"q {i}"),)
            yield (scaled(grouped, row + keys, all_keys + i * keys, keys, f"k {i}"),)
            yield (scaled(grouped, row + 2 * keys, 2 * all_keys + i * values, values, f"v {i}"),)
    source = getattr(m, "in_proj", None)
    if isinstance(source, nn.Linear):
        count, rest = conv.out_channels, source.out_features - conv.out_channels
        inner = getattr(getattr(m, "out_proj", None), "in_features", 0)
        starts = sorted(s for s in {0, inner, rest} if 0 <= s <= rest)
        yield tuple(scaled(source, s, 0, count, "channels") for s in starts)


def _states(m: Any, name: str) -> Iterator[tuple[SymmetricPair, ...]]:
    """Propose to scale the input of each Mamba state against its output, since states are independent of each other."""
    if not isinstance(getattr(m, "x_proj", None), nn.Linear):
        return
    rank, count = m.time_step_rank, m.ssm_state_size
    B, C = (block(m.x_proj, "weight", slice(s, s + count), transpose=True) for s in (rank, rank + count))
    pairs = [SymmetricPair(name, "state", GL(count, diagonal=True), (B,), (C,), part="states")]
    if hasattr(m, "b_layernorm"):  # Jamba normalises both, with gains
        G, H = (block(norm, "weight") for norm in (m.b_layernorm, m.c_layernorm))
        pairs.append(replace(pairs[0], G=(G,), H=(H,)))
    yield tuple(pairs)

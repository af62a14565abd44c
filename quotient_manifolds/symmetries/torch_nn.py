"""Attention of ``torch.nn``: MultiheadAttention, and with it torch's encoder and decoder layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .attention import Projection, attention_pairs
from .pairs import SymmetricPair
from .peft_lora import is_lora
from .registry import register_attention

_WRAPPED = "peft merges LoRA into this layer at every forward pass; only the adapter's own symmetry is offered"


@register_attention(nn.MultiheadAttention)
def multihead_attention(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``in_proj_weight`` rows [q; k; v], or one weight each where key or value have sizes of their own."""
    d = module.embed_dim
    packed = module.in_proj_weight is not None
    extra = {"k": "bias_k", "v": "bias_v"}  # appended to the sequence after the projection: rows without an input
    wrapped = _WRAPPED if is_lora(module.out_proj) else ""

    def projection(i: int, letter: str) -> Projection:
        rows = tuple(a for a in [extra.get(letter, "")] if getattr(module, a, None) is not None)
        weight, start = ("in_proj_weight", i * d) if packed else (f"{letter}_proj_weight", 0)
        return Projection(module, weight, "in_proj_bias", start=start, bias_start=i * d, rows=rows)

    q, k, v = (projection(i, letter) for i, letter in enumerate("qkv"))
    return attention_pairs(
        name, heads=module.num_heads, head_size=module.head_dim, q=q, k=k, v=v, o=Projection(module.out_proj),
        qk_obstruction=wrapped, vo_obstruction=wrapped,
        # Keys that are appended after the projection do not receive its bias.
        key_bias_null=module.bias_k is None and not module.add_zero_attn,
    )  # fmt: skip

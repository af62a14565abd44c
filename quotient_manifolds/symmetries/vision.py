"""Attention of the ``open_clip`` and ``timm`` libraries. Classes are named, not imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .attention import Projection, attention_pairs
from .groups import GL
from .pairs import SymmetricPair
from .registry import register_attention

_QK_NORM = "queries and keys are normalised: no continuous symmetry"
_INNER_NORM = "the heads' outputs are normalised before the output projection: no symmetry"


def _packed(module: nn.Module, weight: str, bias: str, size: int) -> tuple[Projection, Projection, Projection]:
    """Give the rows [q; k; v] of one matrix."""
    q, k, v = (Projection(module, weight, bias, start=i * size) for i in range(3))
    return q, k, v


@register_attention("open_clip.transformer.Attention")
def open_clip_attention(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``in_proj_weight`` rows [q; k; v], ``out_proj``; norms as options. The default block is torch's own layer."""
    q, k, v = _packed(module, "in_proj_weight", "in_proj_bias", module.out_proj.in_features)
    normalised = module.scaled_cosine or not isinstance(module.ln_q, nn.Identity)
    inner = not isinstance(module.ln_inner, nn.Identity)
    return attention_pairs(
        name, heads=module.num_heads, head_size=module.head_dim, q=q, k=k, v=v, o=Projection(module.out_proj),
        qk_obstruction=_QK_NORM if normalised else "", vo_obstruction=_INNER_NORM if inner else "",
    )  # fmt: skip


@register_attention("timm.layers.attention.Attention")
def timm_attention(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``qkv`` rows [q; k; v], ``proj``; norms and a gate as options."""
    q, k, v = _packed(module.qkv, "weight", "bias", module.num_heads * module.head_dim)
    normalised = not isinstance(module.q_norm, nn.Identity)
    inner = not isinstance(module.norm, nn.Identity)
    gated = getattr(module, "gate", None) is not None
    return attention_pairs(
        name, heads=module.num_heads, head_size=module.head_dim, q=q, k=k, v=v, o=Projection(module.proj),
        qk_obstruction=_QK_NORM if normalised else "", vo_obstruction=_INNER_NORM if inner else "",
        value_group=GL(module.head_dim, diagonal=True) if gated else None,  # a gate of its own on every dimension
    )  # fmt: skip


@register_attention("timm.models.swin_transformer.WindowAttention")
def timm_window(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``qkv`` rows [q; k; v], ``proj``; an additive bias for the position."""
    size = module.proj.in_features
    q, k, v = _packed(module.qkv, "weight", "bias", size)
    return attention_pairs(
        name, heads=module.num_heads, head_size=size // module.num_heads, q=q, k=k, v=v, o=Projection(module.proj)
    )


@register_attention("timm.models.beit.Attention")
def timm_beit(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``qkv`` without bias, ``q_bias`` and ``v_bias`` beside it; the key's bias is a buffer of zeros."""
    size = module.proj.in_features
    q = Projection(module.qkv, bias="q_bias", bias_module=module)
    k = Projection(module.qkv, bias="", start=size)
    v = Projection(module.qkv, bias="v_bias", bias_module=module, start=2 * size, bias_start=0)
    return attention_pairs(
        name, heads=module.num_heads, head_size=size // module.num_heads, q=q, k=k, v=v, o=Projection(module.proj)
    )

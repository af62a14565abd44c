"""Attention of the ``transformers`` library. Classes are named, not imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .attention import Projection, attention_pairs
from .pairs import SymmetricPair
from .registry import register

_MODELS = "transformers.models"


@register(
    f"{_MODELS}.bert.modeling_bert.BertAttention",
    f"{_MODELS}.roberta.modeling_roberta.RobertaAttention",
    f"{_MODELS}.electra.modeling_electra.ElectraAttention",
)
def bert(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``.self.{query,key,value}`` and the sibling ``.output.dense``."""
    inner = module.self
    q, k, v, o = map(Projection, (inner.query, inner.key, inner.value, module.output.dense))
    return attention_pairs(name, heads=inner.num_attention_heads, q=q, k=k, v=v, o=o)


@register(
    f"{_MODELS}.vit.modeling_vit.ViTAttention",
    f"{_MODELS}.deit.modeling_deit.DeiTAttention",
)
def vit(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``{q,k,v,o}_proj``."""
    q, k, v, o = map(Projection, (module.q_proj, module.k_proj, module.v_proj, module.o_proj))
    return attention_pairs(name, heads=module.num_attention_heads, q=q, k=k, v=v, o=o)

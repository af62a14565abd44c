"""Attention of the ``transformers`` library. Classes are named, not imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .attention import Projection, attention_pairs
from .pairs import SymmetricPair
from .registry import register_attention

_QK_NORM = "queries and keys are normalised (q_norm, k_norm): no continuous symmetry"


def _classes(*names: str) -> list[str]:
    """Expand "bert.BertAttention" to the qualified name of the class."""
    return [
        f"transformers.models.{family}.modeling_{family}.{cls}" for family, cls in (name.split(".") for name in names)
    ]


def _projections(module: Any, *names: str) -> dict[str, Any]:
    """Give the projections q, k, v, o under their names in the module."""
    return {c: Projection(getattr(module, name)) for c, name in zip("qkvo", names, strict=True)}


def _bert(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``.self.{query,key,value}`` and the sibling ``.output.dense``."""
    inner = module.self if hasattr(module, "self") else module.attention  # the latter: ViT's before transformers 5.9
    q, k, v, o = map(Projection, (inner.query, inner.key, inner.value, module.output.dense))
    return attention_pairs(name, heads=inner.num_attention_heads, q=q, k=k, v=v, o=o)


register_attention(*_classes(
    "bert.BertAttention", "roberta.RobertaAttention", "electra.ElectraAttention",
    "xlm_roberta.XLMRobertaAttention", "camembert.CamembertAttention",
))(_bert)  # fmt: skip


def _register(heads: str, *names: str, classes: Sequence[str]) -> None:
    """Register classes with the number of heads and four projections under these names.

    The names of the projections follow the order q, k, v, o; layers that lack the first are built as BERT's.
    """

    @register_attention(*_classes(*classes))
    def attention(module: Any, name: str) -> Iterator[SymmetricPair]:
        if not hasattr(module, names[0]):
            return _bert(module, name)
        return attention_pairs(name, heads=getattr(module, heads), **_projections(module, *names))


# Additive biases for the position (MPNet, T5) change nothing; cross-attention has the same layout (T5, BART).
_register("num_attention_heads", "query", "key", "value", "dense", classes=["albert.AlbertAttention"])
_register("n_heads", "q_lin", "k_lin", "v_lin", "out_lin", classes=["distilbert.DistilBertSelfAttention"])
_register("num_attention_heads", "q", "k", "v", "o", classes=["mpnet.MPNetSelfAttention"])
_register("n_heads", "q", "k", "v", "o", classes=["t5.T5Attention"])
_register("num_heads", "q_proj", "k_proj", "v_proj", "out_proj", classes=[
    "bart.BartAttention", "mbart.MBartAttention", "opt.OPTAttention", "clip.CLIPAttention", "siglip.SiglipAttention",
    "whisper.WhisperAttention",
])  # fmt: skip
# Before transformers 5.9 (DINOv2: 5.18) these were built as BERT.
_register("num_attention_heads", "q_proj", "k_proj", "v_proj", "o_proj", classes=[
    "vit.ViTAttention", "deit.DeiTAttention", "dinov2.Dinov2Attention", "beit.BeitAttention", "swin.SwinAttention",
])  # fmt: skip


@register_attention(*_classes("deberta_v2.DebertaV2Attention"))
def deberta(module: Any, name: str) -> Iterator[SymmetricPair]:
    """Positions have queries and keys of their own: more rows of G and H, unless they share the content's."""
    inner = module.self
    q, k, v = map(Projection, (inner.query_proj, inner.key_proj, inner.value_proj))
    positions = {"G": getattr(inner, "pos_query_proj", None), "H": getattr(inner, "pos_key_proj", None)}
    pairs = attention_pairs(
        name, heads=inner.num_attention_heads, q=q, k=k, v=v, o=Projection(module.output.dense),
        key_bias_null=not inner.pos_att_type,  # the bias meets the positions' queries too
    )  # fmt: skip
    d = inner.attention_head_size
    for pair in pairs:
        if pair.kind == "qk" and pair.group is not None:
            for side, p in positions.items():
                rows = () if p is None else Projection(p).input_blocks(pair.head or 0, d, 0, d)
                pair = replace(pair, **{side: getattr(pair, side) + rows})
        yield pair


@register_attention(*_classes("gpt2.GPT2Attention"))
def gpt2(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``c_attn`` is a Conv1D (in, out) with columns [q|k|v]; in cross-attention ``q_attn`` and ``c_attn`` = [k|v]."""
    d = module.embed_dim
    if module.is_cross_attention:
        q = Projection(module.q_attn, conv1d=True)
        k, v = (Projection(module.c_attn, conv1d=True, start=i * d) for i in range(2))
    else:
        q, k, v = (Projection(module.c_attn, conv1d=True, start=i * d) for i in range(3))
    o = Projection(module.c_proj, conv1d=True)
    return attention_pairs(name, heads=module.num_heads, head_size=module.head_dim, q=q, k=k, v=v, o=o)


@register_attention(*_classes("bloom.BloomAttention", "gpt_neox.GPTNeoXAttention"))
def bloom(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``query_key_value`` with rows [head][q, k, v][size]; ALiBi, or RoPE on the leading dimensions, half pairing."""
    size = module.head_dim if hasattr(module, "head_dim") else module.head_size
    heads = module.num_heads if hasattr(module, "num_heads") else module.config.num_attention_heads
    q, k, v = (Projection(module.query_key_value, start=i * size, stride=3 * size) for i in range(3))
    return attention_pairs(
        name, heads=heads, head_size=size, rotary_size=getattr(module, "rotary_ndims", 0), q=q, k=k, v=v,
        o=Projection(module.dense),
    )  # fmt: skip


@register_attention(*_classes("gptj.GPTJAttention"))
def gptj(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``{q,k,v,out}_proj`` without bias; RoPE on the leading dimensions, interleaved pairing."""
    return attention_pairs(
        name, heads=module.num_attention_heads, rotary_size=module.rotary_dim or module.head_dim, rotary="interleaved",
        **_projections(module, "q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip


@register_attention(*_classes(
    "llama.LlamaAttention", "mistral.MistralAttention", "qwen2.Qwen2Attention", "qwen3.Qwen3Attention",
    "gemma.GemmaAttention", "gemma2.Gemma2Attention", "gemma3.Gemma3Attention",
))  # fmt: skip
def llama(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``{q,k,v,o}_proj`` with grouped queries; RoPE with half pairing, or norms on queries and keys.

    A soft cap on the scores (Gemma-2) is a function of the product and changes nothing.
    """
    config = module.config
    return attention_pairs(
        name, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_size=module.head_dim,
        rotary_size=module.head_dim, qk_obstruction=_QK_NORM if hasattr(module, "q_norm") else "",
        **_projections(module, "q_proj", "k_proj", "v_proj", "o_proj"),
    )  # fmt: skip


@register_attention(*_classes("phi3.Phi3Attention"))
def phi3(module: Any, name: str) -> Iterator[SymmetricPair]:
    """``qkv_proj`` with rows [q; k; v] of grouped sizes; RoPE on the leading dimensions."""
    config, size = module.config, module.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    starts = (0, heads * size, (heads + kv_heads) * size)
    q, k, v = (Projection(module.qkv_proj, start=start) for start in starts)
    rotary = int(size * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))
    return attention_pairs(
        name, heads=heads, kv_heads=kv_heads, head_size=size, rotary_size=rotary, q=q, k=k, v=v,
        o=Projection(module.o_proj),
    )  # fmt: skip

"""Attention classes whose symmetries need no examination: the results of discovery, one line each.

Classes are given by their exact names and not imported; the tests compare every line with what discovery finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from .pairs import SymmetricPair
from .peft_lora import is_lora
from .registry import register_attention
from .roles import PLANES, Place, Roles, layout_pairs, places, roles_of

__all__ = ["KNOWN"]

#: Class, what acts on queries and keys, whether RoPE may rotate a part of a head, and whether the rows of one matrix go
#: head by head: [head][q, k, v].
KNOWN = """
albert.AlbertAttention GL
bart.BartAttention GL
beit.BeitAttention GL
bert.BertAttention GL
bloom.BloomAttention GL by head
camembert.CamembertAttention GL
clip.CLIPAttention GL
deberta_v2.DebertaV2Attention GL
deit.DeiTAttention GL
dinov2.Dinov2Attention GL
distilbert.DistilBertSelfAttention GL
electra.ElectraAttention GL
gemma.GemmaAttention half
gemma2.Gemma2Attention half
gemma3.Gemma3Attention half
gpt2.GPT2Attention GL
gpt_neox.GPTNeoXAttention half partial by head
gptj.GPTJAttention interleaved
llama.LlamaAttention half
mbart.MBartAttention GL
mistral.MistralAttention half
mpnet.MPNetSelfAttention GL
opt.OPTAttention GL
phi3.Phi3Attention half partial
qwen2.Qwen2Attention half
qwen3.Qwen3Attention half
roberta.RobertaAttention GL
siglip.SiglipAttention GL
swin.SwinAttention GL
t5.T5Attention GL
vit.ViTAttention GL
whisper.WhisperAttention GL
xlm_roberta.XLMRobertaAttention GL
open_clip.transformer.Attention GL
timm.layers.attention.Attention GL
timm.models.beit.Attention GL
timm.models.swin_transformer.WindowAttention GL
torch.nn.modules.activation.MultiheadAttention GL
"""

_APPENDED = ("bias_k", "add_zero_attn")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_QK_NORM = "queries and keys are normalised (q_norm, k_norm): no continuous symmetry"
_INNER_NORM = "the heads' outputs are normalised before the output projection: no symmetry"
_WRAPPED = "peft merges LoRA into this layer at every forward pass; only the adapter's own symmetry is offered"


class _NoPlaceError(ValueError):
    """The number of heads does not fit the projections."""


def _has(module: nn.Module, *names: str) -> bool:
    """Tell whether one of these parts exists and does something."""
    found = (getattr(module, name, None) for name in names)
    return any(m is not None and m is not False and not isinstance(m, nn.Identity) for m in found)


def _rotary_size(module: Any, size: int, partial: bool) -> int:
    """Return the number of dimensions that RoPE rotates; most classes ignore what a configuration says of a part."""
    given = getattr(module, "rotary_ndims", None) or getattr(module, "rotary_dim", None)
    parameters = getattr(module.config, "rope_parameters", None) or {}
    return int(given or size * (parameters.get("partial_rotary_factor", 1.0) if partial else 1.0))


def _places(module: nn.Module, roles: Roles, group: str, partial: bool, by_head: bool) -> Iterator[Place]:
    """Read where the heads lie from the module's number of heads."""
    owners = (module, *module.children(), getattr(module, "config", None))
    heads = next(n for o in owners for n in (getattr(o, name, None) for name in _HEADS) if isinstance(n, int))
    # The key bias also multiplies the queries of positions; appended keys do not receive it.
    null = not any(getattr(m, "pos_att_type", None) for m in module.children()) and not _has(module, *_APPENDED)
    wrapped = isinstance(module, nn.MultiheadAttention) and is_lora(module.out_proj)
    for kind in ("qk", "vo"):
        fits = (p for p in places(roles, kind, heads) if p.blocks == (p.kv_heads if by_head else 1))
        place = next(fits, None)
        if place is None:
            raise _NoPlaceError(f"the projections of {kind} do not divide into {heads} heads")
        if wrapped:
            yield replace(place, group=_WRAPPED)
        elif kind == "qk":
            normalised = _has(module, "q_norm", "k_norm", "ln_q", "scaled_cosine")
            rotary = _rotary_size(module, place.size, partial) if group in PLANES else 0
            place = replace(place, group=group, rotary_size=rotary, key_bias_null=null)
            yield replace(place, group=_QK_NORM) if normalised else place
        elif _has(module, "norm", "ln_inner"):
            yield replace(place, group=_INNER_NORM)
        else:  # a gate has a separate number for every dimension
            yield replace(place, group="diagonal") if _has(module, "gate") else place


def _register(line: str) -> None:
    name, group, *words = line.split()
    partial, by_head = "partial" in words, "by" in words
    family, cls = name.rsplit(".", 1)
    qualified = name if "." in family else f"transformers.models.{family}.modeling_{family}.{cls}"

    @register_attention(qualified)
    def handler(module: nn.Module, path: str) -> list[SymmetricPair]:
        roles = roles_of(module)
        if roles is None:
            named = qualified.rsplit(".", 1)[1]
            reason = f"a projection is not where {named} has it (replaced, pruned or parametrised?)"
            return [SymmetricPair(path, "attention", None, reason=reason)]
        try:
            return layout_pairs(path, roles, *_places(module, roles, group, partial, by_head))
        except _NoPlaceError as error:
            return [SymmetricPair(path, "attention", None, reason=str(error))]


for _line in KNOWN.split("\n")[1:-1]:
    _register(_line)

"""The table of architectures: transformers' vision and language models, timm's, open_clip's, and torch's encoder.

``architectures.ini`` names the layers of each; the functions here wire what surrounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..weights import plain_class
from .folding import wiring_of
from .layout import affine, first_of, has, norm, table, wire, within
from .notation import Layout, NamedRows, names_of
from .wiring import Affine, Site, Wiring, neurons, register_backbone, register_wiring

#: What finds the wiring of a network, once this table is read.
__all__ = ["wiring_of"]

_HF = "transformers.models.{0}.modeling_{0}.{1}"
_TABLE = ConfigParser(interpolation=None)
_TABLE.read_string(Path(__file__).with_suffix(".ini").read_text(encoding="utf-8"))


def _none(reason: str) -> Wiring:
    """Wire nothing, and say why."""
    return Wiring(closed=False, reason=reason)


def _known(adapter: Callable[..., Wiring]) -> Callable[..., Wiring]:
    """Return an empty wiring, with the reason, where layers were replaced or options are not known here."""

    def adapted(*models: nn.Module) -> Wiring:
        try:
            return adapter(*models)
        except AttributeError as error:
            if type(error.obj).__module__.startswith("quotient_manifolds."):  # a defect of ours
                raise
            return _none(str(error))

    return adapted


def _layout(section: str) -> Layout:
    """Read a section of the table."""
    row = {name: text for name, text in _TABLE[section].items() if name not in ("classifiers", "backbones")}
    base = _layout(row.pop("like")) if "like" in row else Layout()
    return base.read(**row)


# CLIP's and SigLIP's towers, and the kinds of networks that have them.
_TOWERS = "Model TextModel VisionModel TextModelWithProjection VisionModelWithProjection ForImageClassification"
#: What a plain block of timm has, below each name.
_TIMM_PARTS = {"": "Block", "mlp": "Mlp", "norm1": "LayerNorm"}
_TIMM_PARTS |= dict.fromkeys(("mlp.norm", "attn.norm", "attn.q_norm"), "Identity")


def _classifier(name: str, layout: Layout, model: Any) -> Wiring:
    """Wire a network whose head reads the last norm, or two of its outputs side by side."""
    head, d = affine(model, "classifier"), model.config.hidden_size
    parts = [affine(model, "classifier", inputs=slice(i, i + d)) for i in range(0, head.matrix.size[1], d)]
    return wire(Wiring(classifiers=[("classifier", head)]), model, layout, parts, at=name.split(".")[0])


for _section in _TABLE.sections():
    for _name in _TABLE[_section].get("classifiers", "").split():
        register_wiring(_HF.format(*_name.split(".")))(_known(partial(_classifier, _name, _layout(_section))))


@register_wiring(*(_HF.format(name.lower(), name + kind) for name in ("CLIP", "Siglip") for kind in _TOWERS.split()))
@_known
def _towers(model: Any) -> Wiring:
    """Wire towers of images and of text; the outputs of one alone are used raw."""
    parts = [name for name in ("vision_model", "text_model") if has(model, name)] or [""]
    w = Wiring(closed=len(parts) == 1)
    if has(model, "classifier"):
        w.classifiers.append(("classifier", affine(model, "classifier")))
    for name in parts:
        _tower(w, model, f"{name}.{name}" if name and has(model, f"{name}.{name}") else name, name)
    return w


def _tower(w: Wiring, model: Any, at: str, name: str) -> None:
    base: Any = model.get_submodule(at)
    kind = "clip" if has(base, "pre_layrnorm") else "siglip" if has(base, "post_layernorm") else "text"
    layout = _layout(kind)
    head = {"clip": "visual_projection", "siglip": "classifier", "text": "text_projection"}[kind]
    readers = [affine(model, head)] if has(model, head) else []
    if has(base, "head.probe"):  # one query attends to the last norm's outputs
        d = base.config.hidden_size
        readers.append(affine(model, *within(at, "head.attention"), outputs=slice(d, 3 * d)))
        into = affine(model, *within(at, "head.mlp.fc1"))
        w.sites.append(Site(f"{name} head", norm(model, *within(at, "head.layernorm")), (into,)))
        w.closed = False
    elif has(base, "head"):
        readers.append(affine(model, *within(at, "head")))
    if plain_class(model).__name__.endswith(("VisionModel", "TextModel")):
        readers, w.closed = [], False
    if kind == "clip" and not readers:  # the patches' outputs, or the classifier, have no norm
        layout, w.reads_stream_raw = replace(layout, last=()), True
    wire(w, model, layout, readers, f"{name}.", at=at)


@register_wiring("timm.models.vision_transformer.VisionTransformer")
@_known
def _timm(model: Any) -> Wiring:
    """Plain vision transformers; for other kinds of block, pooling or norm only heads are treated."""
    expected = _TIMM_PARTS | {"mlp.act": type(model.blocks[0].mlp.act).__name__}
    plain = all(type(b.get_submodule(n)).__name__ == kind for b in model.blocks for n, kind in expected.items())
    plain &= isinstance(getattr(model.patch_embed, "norm", nn.Identity()), nn.Identity)
    if not plain or model.global_pool not in ("token", "avg") or getattr(model, "reg_token", None) is not None:
        return _none("its blocks, pooling or norms are not plain ones")
    layout = _layout("timm").read(last="norm" if isinstance(model.fc_norm, nn.Identity) else "fc_norm")
    if not isinstance(model.norm_pre, nn.Identity):
        layout = layout.read(first="norm_pre", embeddings="")
    elif model.no_embed_class or not has(model, "cls_token"):
        layout = layout.read(embeddings="cls_token?, pos_embed? + patch_embed.proj")
    heads = [affine(model, "head")] if isinstance(model.head, nn.Linear) else []
    return wire(Wiring(classifiers=[("head", h) for h in heads], closed=bool(heads)), model, layout, heads)


@register_wiring("open_clip.transformer.VisionTransformer")
@_known
def _open_clip(model: Any) -> Wiring:
    """Wire the image tower only; its output is read by the projection."""
    if model.attn_pool is not None or model.final_ln_after_pool or type(model.ln_pre).__name__ == "Identity":
        return _none("its pooling or first norm is not the plain one")
    return wire(Wiring(), model, _layout("open_clip"), [affine(model, "proj")] if model.proj is not None else [])


@register_wiring("open_clip.model.CLIP")
@_known
def _open_clip_both(model: Any) -> Wiring:
    """Wire both towers."""
    w = wiring_of(model, "visual") or Wiring()
    if not w.sites:
        return _none(w.reason)
    return wire(w, model, _layout("open_clip text"), [affine(model, "text_projection")], "text ")


@register_wiring("torch.nn.modules.transformer.TransformerEncoder")
@_known
def _torch(model: Any) -> Wiring:
    """Wire an encoder on its own: its input and, without a last norm, its output are the stream itself."""
    if any(type(layer) is not nn.TransformerEncoderLayer for layer in model.layers):
        return _none("its layers are not all nn.TransformerEncoderLayer")
    before = model.layers[0].norm_first
    last = ("norm",) if before and model.norm is not None else ()
    layout = replace(_layout("torch"), last=last, post_norm=not before)
    return wire(Wiring(closed=False, reads_stream_raw=before and model.norm is None), model, layout, [])


#: The parts of heads, each with its names.
_HEADS = {part: names_of(text) for part, text in _TABLE["heads"].items()}


def _head(w: Wiring, model: Any, at: str) -> list[Affine]:
    """Wire a model's head and return what reads the last norm: nothing for a backbone alone, whose output is raw."""
    if not at:
        w.closed = False
        return []
    base = model.get_submodule(at)
    places = (_HEADS["readers"], _HEADS["others"], within(at, *_HEADS["poolers"]))
    readers = [affine(model, *names) for names in places if has(model, *names)]
    if has(model, *_HEADS["norm"]):
        decoder = affine(model, *_HEADS["decoder"])
        w.sites.append(Site("head", norm(model, *_HEADS["norm"]), (decoder,)))
        if first_of(model, decoder.matrix.name)[1] is base.get_input_embeddings().weight:
            w.alike += readers[0].written
        else:
            w.closed = False
    if has(model, "pre_classifier"):
        down = affine(model, "classifier")
        w.neurons.append(neurons("pre_classifier", "relu", readers[0], down))
        w.hidden.append(("pre_classifier neurons", (*readers[0].written, down.matrix)))
    pooled = (
        ("pooler.dense", within(at, "pooler.dense"), ("classifier", "cls.seq_relationship")),
        ("classifier.dense", ("classifier.dense",), ("classifier.out_proj",)),
    )
    for name, dense, reader in pooled:
        if has(model, *dense) and has(model, *reader):
            w.hidden.append((f"{name} neurons", (*affine(model, *dense).written, affine(model, *reader).matrix)))
            if type(base).__name__ != "ElectraModel":  # whose head has GELU
                w.odd.add(f"{name} neurons")
    for names in (_HEADS["logits"], _HEADS["pairs"]):
        w.classifiers += [(names[-1], affine(model, *names))] if has(model, *names) else []
    return readers or [affine(model, "classifier.dense", "classifier")]


def _language(layout: Layout, model: Any, at: str) -> Wiring:
    base = model.get_submodule(at)
    if getattr(base.config, "add_cross_attention", False) or has(base, "decoder.project_in"):  # the latter is OPT's
        return _none("cross-attention in a decoder, or projections around it, are not described")
    w = Wiring(closed=not has(base, *layout.projection))
    readers = _head(w, model, at)
    if has(base, "embeddings.token_type_embeddings"):
        layout = layout.read(embeddings=_with_types(w, model, at))
    return wire(w, model, layout, readers, at=at)


for _section in _TABLE.sections():
    for _name in _TABLE[_section].get("backbones", "").split():
        register_backbone(_HF.format(*_name.split(".")))(_known(partial(_language, _layout(_section))))


def _with_types(w: Wiring, model: Any, at: str) -> str:
    """Exchange vectors between positions and types alone where a decoder uses the words too."""
    words, positions, types = (f"embeddings.{x}_embeddings" for x in ("word", "position", "token_type"))
    embeddings = model.get_submodule(*within(at, "embeddings"))
    pad, weight = getattr(embeddings, "padding_idx", None), embeddings.word_embeddings.weight
    if any(first_of(model, a.matrix.name)[1] is weight for _, a in w.classifiers):
        return f"{words}, {types} + {positions}" + ("" if pad is None else f"[{pad}:]")
    if pad is None:
        return f"{words} + {positions}, {words} + {types}"
    # Padding alone has its own index as position, other tokens later ones.
    its, later = f"[{pad}:{pad + 1}]", f"{pad + 1}:"
    return f"{words}{its} + {positions}{its}, {words}[:{pad},{later}] + {positions}[{later}], {words} + {types}"


@register_wiring(_HF.format("t5", "T5ForConditionalGeneration"))
@_known
def _t5(model: Any) -> Wiring:
    """Two streams that share their words; the decoder's keys and values read the encoder's last norm."""
    head, blocks = affine(model, "lm_head"), range(len(model.decoder.block))
    cross = [affine(model, f"decoder.block.{i}.layer.1.EncDecAttention.{x}") for i in blocks for x in "kv"]
    w = Wiring(classifiers=[("lm_head", head)], tables=[("shared", table(model, NamedRows(("shared",)))[0])])
    wire(w, model, _layout("t5"), cross, "encoder.", at="encoder")
    return wire(w, model, _layout("t5 decoder"), [head], "decoder.", at="decoder")

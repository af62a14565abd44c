"""The wiring of the vision transformers of transformers, timm and open_clip, and of torch's own encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..modules import plain_class
from .layout import Layout, Sublayer, affine, has, norm, rectified, table, wire
from .wiring import Affine, Site, Table, Wiring, register_wiring, wiring_of

_HF = "transformers.models.{0}.modeling_{0}.{1}"
_QKV = tuple(f"attention.{x}_proj" for x in "qkv")
_OLD = tuple(f"attention.attention.{x}" for x in ("query", "key", "value"))


def _either(new: tuple[str, ...], old: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{a}|{b}" for a, b in zip(new, old, strict=True))


_PATCH = "embeddings.patch_embeddings.projection"
_VIT = Layout(
    layers="layers|encoder.layer",
    sublayers=(
        Sublayer("layernorm_before", _either(_QKV, _OLD), "attention.o_proj|attention.output.dense"),
        Sublayer("layernorm_after", ("mlp.fc1|intermediate.dense",), "mlp.fc2|output.dense"),
    ),
    last="layernorm",
    tables=("embeddings.cls_token", "embeddings.position_embeddings"),
    patches=_PATCH,
    common=(
        ("embeddings.cls_token", "embeddings.position_embeddings[:1]"),
        (f"{_PATCH}.bias", "embeddings.position_embeddings[1:]"),
    ),
)
_DEIT = replace(
    _VIT,
    tables=(*_VIT.tables, "embeddings.distillation_token"),
    common=(
        _VIT.common[0],
        ("embeddings.distillation_token", "embeddings.position_embeddings[1:2]"),
        (f"{_PATCH}.bias", "embeddings.position_embeddings[2:]"),
    ),
)
_DINO = replace(
    _VIT,
    layers="encoder.layer|layers",
    sublayers=(
        Sublayer("norm1", _either(_QKV, _OLD), "attention.o_proj|attention.output.dense", "layer_scale1.lambda1"),
        Sublayer("norm2", ("mlp.fc1",), "mlp.fc2", "layer_scale2.lambda1"),
    ),
)
_BEIT_READERS = _either(_QKV, tuple(f"attention.{n}" for n in _OLD))
_BEIT = replace(
    _VIT,
    sublayers=(
        replace(_VIT.sublayers[0], readers=_BEIT_READERS, scale="lambda_1", blind=_BEIT_READERS[1:2]),
        replace(_VIT.sublayers[1], scale="lambda_2"),
    ),
    last="pooler.layernorm",
    tables=("embeddings.cls_token",),
    common=(),
)


@register_wiring(_HF.format("vit", "ViTForImageClassification"), _HF.format("deit", "DeiTForImageClassification"))
def _classifier(model: Any) -> Wiring:
    base, layout = (model.vit, _VIT) if hasattr(model, "vit") else (model.deit, _DEIT)
    head = affine(model, "classifier")
    return wire(Wiring(classifiers=[("classifier", head)]), base, rectified(layout, base.config.hidden_act), [head])


@register_wiring(_HF.format("dinov2", "Dinov2ForImageClassification"))
def _dinov2(model: Any) -> Wiring:
    """Its classifier reads the class token and the mean of the others, side by side; its hidden layer may be gated."""
    base, head, d = model.dinov2, affine(model, "classifier"), model.config.hidden_size
    parts = [replace(head, inputs=(0, d)), replace(head, inputs=(d, 2 * d))]
    layout = rectified(_DINO, base.config.hidden_act)
    if model.config.use_swiglu_ffn:  # [gate, up] in one layer
        fused = isinstance(getattr(base.encoder.layer[0].mlp, "weights_in", None), nn.Linear)
        readers = ("mlp.weights_in",) if fused else ("mlp.gate_proj", "mlp.up_proj")
        mlp = replace(_DINO.sublayers[1], readers=readers, writer="mlp.weights_out|mlp.down_proj", act="glu")
        layout = replace(_DINO, sublayers=(_DINO.sublayers[0], mlp))
    return wire(Wiring(classifiers=[("classifier", head)]), base, layout, parts)


@register_wiring(_HF.format("beit", "BeitForImageClassification"))
def _beit(model: Any) -> Wiring:
    base, head = model.beit, affine(model, "classifier")
    layout = rectified(_BEIT, base.config.hidden_act)
    if not model.config.use_mean_pooling:
        layout = replace(layout, last="layernorm")
    if model.config.use_absolute_position_embeddings:
        layout = replace(layout, tables=_VIT.tables, common=_VIT.common)
    w = wire(Wiring(classifiers=[("classifier", head)]), base, layout, [head])
    for name, module in base.named_modules():
        if isinstance(getattr(module, "relative_position_bias_table", None), nn.Parameter):
            rows = [table(module, f"relative_position_bias_table[{r}]") for r in ("-3:-2", "-1:", ":-3", "-2:-1")]
            w.score_tables += [(f"{name} class token", tuple(rows[:2])), (f"{name} patches", tuple(rows[2:]))]
    return w


_CLIP_TEXT = Layout(
    layers="encoder.layers",
    sublayers=(
        Sublayer("layer_norm1", tuple(f"self_attn.{x}_proj" for x in "qkv"), "self_attn.out_proj"),
        Sublayer("layer_norm2", ("mlp.fc1",), "mlp.fc2"),
    ),
    last="final_layer_norm",
    tables=("embeddings.token_embedding", "embeddings.position_embedding"),
    common=(("embeddings.position_embedding", "embeddings.token_embedding"),),
)
_SIGLIP = replace(
    _CLIP_TEXT,
    last="post_layernorm",
    tables=("embeddings.position_embedding",),
    patches="embeddings.patch_embedding",
    common=(("embeddings.patch_embedding.bias", "embeddings.position_embedding"),),
)
_CLIP = replace(
    _SIGLIP,
    tables=("embeddings.class_embedding", "embeddings.position_embedding"),
    common=(("embeddings.class_embedding", "embeddings.position_embedding[:1]"),),
)


@register_wiring(
    *(_HF.format("clip", f"CLIP{c}Model") for c in ("", "Text", "Vision")),
    *(_HF.format("clip", f"CLIP{c}ModelWithProjection") for c in ("Text", "Vision")),
    *(_HF.format("siglip", f"Siglip{c}Model") for c in ("", "Text", "Vision")),
    *(_HF.format(f, f"{name}ForImageClassification") for f, name in (("clip", "CLIP"), ("siglip", "Siglip"))),
)
def _towers(model: Any) -> Wiring:
    """Wire towers of images and of text; the outputs of one alone are used raw."""
    parts = [name for name in ("vision_model", "text_model") if has(model, name)]
    w = Wiring(closed=len(parts) == 1)
    if has(model, "classifier"):
        w.classifiers.append(("classifier", affine(model, "classifier")))
    for name in parts or [""]:
        base = model.get_submodule(name)
        _tower(w, model, getattr(base, name, base) if name else base, name)
    return w


def _tower(w: Wiring, model: Any, base: Any, name: str) -> None:
    image, embedded = has(base, "post_layernorm"), has(base, "pre_layrnorm")
    layout = rectified(_CLIP if embedded else _SIGLIP if image else _CLIP_TEXT, base.config.hidden_act)
    projections = ["visual_projection" if image else "text_projection", *([] if embedded else ["classifier"])]
    readers = [affine(model, n) for n in projections if has(model, n)]
    if has(base, "head.probe"):  # one query attends to the last norm's outputs
        d = base.config.hidden_size
        readers.append(Affine(base.head.attention, "in_proj_weight", "in_proj_bias", outputs=(d, 3 * d)))
        w.sites.append(Site(f"{name} head", norm(base, "head.layernorm", layout), (affine(base, "head.mlp.fc1"),)))
        w.closed = False
    elif has(base, "head"):
        readers.append(affine(base, "head"))
    if plain_class(model).__name__.endswith(("VisionModel", "TextModel")):
        readers, w.closed = [], False
    if embedded and not readers:  # the patches' outputs, or the classifier, have no norm
        layout, w.reads_stream_raw = replace(layout, last=""), True
    wire(w, base, layout, readers, f"{name}.")
    if embedded:
        _embedded_norm(w, base, "pre_layrnorm", layout)


def _embedded_norm(w: Wiring, base: nn.Module, name: str, layout: Layout) -> None:
    """Add a norm whose output is the stream: its shift is a vector there, and nothing rotates."""
    first = norm(base, name, layout)
    w.sites.append(Site(name, first, (), raw=True))
    w.tables.append((f"{name}.bias", Table(first.module, "bias")))
    w.closed = False


_TIMM = Layout(
    layers="blocks",
    sublayers=(
        Sublayer("norm1", ("attn.qkv",), "attn.proj", "ls1.gamma"),
        Sublayer("norm2", ("mlp.fc1",), "mlp.fc2", "ls2.gamma"),
    ),
    last="norm",
    patches="patch_embed.proj",
)


@register_wiring("timm.models.vision_transformer.VisionTransformer")
def _timm(model: Any) -> Wiring:
    """Plain vision transformers; for other kinds of block, pooling or norm only heads are treated."""
    plain = all(
        type(b).__name__ == "Block" and type(b.mlp).__name__ == "Mlp" and type(b.attn.norm).__name__ == "Identity"
        and type(b.attn.q_norm).__name__ == "Identity" and type(b.norm1).__name__ == "LayerNorm"
        and type(getattr(b.mlp, "norm", nn.Identity())).__name__ == "Identity"
        for b in model.blocks
    )  # fmt: skip
    plain &= isinstance(getattr(model.patch_embed, "norm", nn.Identity()), nn.Identity)
    if not plain or model.global_pool not in ("token", "avg") or getattr(model, "reg_token", None) is not None:
        return Wiring(closed=False)
    layout = rectified(_TIMM, "relu" if all(isinstance(b.mlp.act, nn.ReLU) for b in model.blocks) else None)
    last = "norm" if isinstance(model.fc_norm, nn.Identity) else "fc_norm"
    known = isinstance(model.head, nn.Linear)
    head = [affine(model, "head")] if known else []
    w = wire(Wiring(classifiers=[("head", h) for h in head]), model, replace(layout, last=last), head)
    w.closed &= known and isinstance(model.norm_pre, nn.Identity)
    names = [n for n in ("cls_token", "pos_embed") if getattr(model, n, None) is not None]
    if isinstance(model.norm_pre, nn.Identity):
        w.tables += [(n, table(model, n)) for n in names]
        if len(names) == 2 and not model.no_embed_class:
            w.common.append(("cls_token", table(model, "cls_token"), (table(model, "pos_embed[:1]"),)))
        if "pos_embed" in names and model.patch_embed.proj.bias is not None:
            rows = "pos_embed" if model.no_embed_class or "cls_token" not in names else "pos_embed[1:]"
            w.common.append(("patch_embed.proj.bias", table(model, "patch_embed.proj.bias"), (table(model, rows),)))
    else:
        _embedded_norm(w, model, "norm_pre", layout)
        w.writers = [x for x in w.writers if x[0] != layout.patches]
    return w


_OPEN_CLIP = Layout(
    layers="transformer.resblocks",
    sublayers=(
        Sublayer("ln_1", ("attn",), "attn.out_proj", "ls_1.gamma"),
        Sublayer("ln_2", ("mlp.c_fc",), "mlp.c_proj", "ls_2.gamma"),
    ),
    last="ln_post",
)


@register_wiring("open_clip.transformer.VisionTransformer")
def _open_clip(model: Any) -> Wiring:
    """Wire the image tower only; its output is read by the projection."""
    if model.attn_pool is not None or model.final_ln_after_pool or type(model.ln_pre).__name__ == "Identity":
        return Wiring(closed=False)
    head = [affine(model, "proj")] if model.proj is not None else []
    w = wire(Wiring(), model, _OPEN_CLIP, head)
    _embedded_norm(w, model, "ln_pre", _OPEN_CLIP)
    w.writers.append(("conv1", affine(model, "conv1")))
    w.tables += [(n, table(model, n)) for n in ("class_embedding", "positional_embedding")]
    w.common.append(("class_embedding", table(model, "class_embedding"), (table(model, "positional_embedding[:1]"),)))
    return w


@register_wiring("open_clip.model.CLIP")
def _open_clip_both(model: Any) -> Wiring:
    """Wire both towers."""
    w = wiring_of(model.visual) or Wiring()
    if not w.sites:
        return Wiring(closed=False)
    tables = ("token_embedding", "positional_embedding")
    layout = replace(_OPEN_CLIP, last="ln_final", tables=tables, common=(tables[::-1],))
    return wire(w, model, layout, [affine(model, "text_projection")], "text ")


@register_wiring("torch.nn.modules.transformer.TransformerEncoder")
def _torch(model: Any) -> Wiring:
    """Wire an encoder on its own: its input and, without a last norm, its output are the stream itself."""
    first = model.layers[0]
    if any(type(layer) is not nn.TransformerEncoderLayer for layer in model.layers):
        return Wiring(closed=False)
    act = "relu" if getattr(first, "activation_relu_or_gelu", 0) == 1 else ""
    layout = Layout(
        layers="layers",
        sublayers=(
            Sublayer("norm1", ("self_attn",), "self_attn.out_proj"),
            Sublayer("norm2", ("linear1",), "linear2", act=act),
        ),
        last="",
        post_norm=not first.norm_first,
    )
    w = wire(Wiring(closed=False), model, layout, [])
    if not first.norm_first:
        *inner, end = w.sites
        w.sites = [*inner, replace(end, raw=True)]
    w.reads_stream_raw = first.norm_first and model.norm is None
    if model.norm is not None:
        w.sites.append(Site("norm", norm(model, "norm", layout), (), raw=True))
    return w

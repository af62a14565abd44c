"""The table of architectures: transformers' vision and language models, timm's, open_clip's, and torch's encoder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..modules import plain_class
from .layout import Layout, Sublayer, affine, has, norm, table, wire
from .wiring import Affine, Neurons, Site, Wiring, register_backbone, register_wiring, wiring_of

_HF = "transformers.models.{0}.modeling_{0}.{1}"


def _each(pattern: str, words: str = "q k v") -> str:
    return " ".join(pattern.format(word) for word in words.split())


# Images: pre-norm layers.
_VIT = Layout(
    "layers|encoder.layer",
    Sublayer(
        "layernorm_before",
        f"{_each('attention.{}_proj')}|{_each('attention.attention.{}', 'query key value')}",
        "attention.o_proj|attention.output.dense",
    ),
    Sublayer("layernorm_after", "mlp.fc1|intermediate.dense", "mlp.fc2|output.dense", "config.hidden_act"),
    "layernorm",
    "embeddings.position_embeddings[:1] + embeddings.cls_token, "
    "embeddings.position_embeddings[1:] + embeddings.patch_embeddings.projection",
)
_DEIT = (
    "embeddings.position_embeddings[:1] + embeddings.cls_token, "
    "embeddings.position_embeddings[1:2] + embeddings.distillation_token, "
    "embeddings.position_embeddings[2:] + embeddings.patch_embeddings.projection"
)
_BEIT_KEYS = "attention.k_proj|attention.attention.key"  # which have no bias
_CLASSIFIERS = {
    "vit.ViTForImageClassification": _VIT,
    "deit.DeiTForImageClassification": replace(_VIT, embeddings=_DEIT),
    "dinov2.Dinov2ForImageClassification": replace(
        _VIT,
        layers="encoder.layer|layers",
        attention=replace(_VIT.attention, norm="norm1", scale="layer_scale1.lambda1"),
        mlp=Sublayer(
            "norm2",
            "mlp.fc1|mlp.weights_in|mlp.gate_proj mlp.up_proj",
            "mlp.fc2|mlp.weights_out|mlp.down_proj",
            "config.hidden_act|glu|glu",
            scale="layer_scale2.lambda1",
        ),
    ),
    "beit.BeitForImageClassification": replace(
        _VIT,
        attention=replace(_VIT.attention, scale="lambda_1", blind=_BEIT_KEYS),
        mlp=replace(_VIT.mlp, scale="lambda_2"),
        last="pooler.layernorm|layernorm",
        embeddings=_VIT.embeddings.replace("position_embeddings", "position_embeddings?"),
        scores="relative_position_bias_table[-3:-2,-1:] relative_position_bias_table[:-3,-2:-1]",
    ),
}
# CLIP's and SigLIP's towers, and the kinds of networks that have them.
_TOWERS = "Model TextModel VisionModel TextModelWithProjection VisionModelWithProjection ForImageClassification"
_TEXT = Layout(
    "encoder.layers",
    Sublayer("layer_norm1", _each("self_attn.{}_proj"), "self_attn.out_proj"),
    Sublayer("layer_norm2", "mlp.fc1", "mlp.fc2", "config.hidden_act"),
    "final_layer_norm",
    "embeddings.token_embedding + embeddings.position_embedding",
)
_SIGLIP = replace(_TEXT, last="post_layernorm", embeddings="embeddings.position_embedding + embeddings.patch_embedding")
_CLIP = replace(
    _SIGLIP,
    first="pre_layrnorm",
    embeddings="embeddings.position_embedding[:1] + embeddings.class_embedding, "
    "embeddings.position_embedding[1:] + embeddings.patch_embedding",
)
_TIMM = Layout(
    "blocks",
    Sublayer("norm1", "attn.qkv", "attn.proj", scale="ls1.gamma"),
    Sublayer("norm2", "mlp.fc1", "mlp.fc2", "blocks.0.mlp.act", scale="ls2.gamma"),
    embeddings="pos_embed?[:1] + cls_token, pos_embed?[1:] + patch_embed.proj",
)
#: What a plain block of timm has, below each name.
_TIMM_PARTS = {"": "Block", "mlp": "Mlp", "norm1": "LayerNorm"}
_TIMM_PARTS |= dict.fromkeys(("mlp.norm", "attn.norm", "attn.q_norm"), "Identity")
_OPEN_CLIP = Layout(
    "transformer.resblocks",
    Sublayer("ln_1", "attn", "attn.out_proj", scale="ls_1.gamma"),
    Sublayer("ln_2", "mlp.c_fc", "mlp.c_proj", scale="ls_2.gamma"),
    "ln_post",
    "positional_embedding[:1] + class_embedding, positional_embedding[1:] + conv1",
    first="ln_pre",
)
_TORCH = Layout(
    "layers",
    Sublayer("norm1", "self_attn", "self_attn.out_proj"),
    Sublayer("norm2", "linear1", "linear2", "layers.0.activation_relu_or_gelu"),
)

# Language: backbones, alone or below every head that is defined beside their class.
_BERT = Layout(
    "encoder.layer",
    Sublayer("attention.output.LayerNorm", _each("attention.self.{}", "query key value"), "attention.output.dense"),
    Sublayer("output.LayerNorm", "intermediate.dense", "output.dense", "config.hidden_act"),
    "embeddings.LayerNorm",
    "embeddings.word_embeddings + embeddings.position_embeddings",
    projection="embeddings_project",
    post_norm=True,
)
_OPT = Layout(
    "layers",
    Sublayer("self_attn_layer_norm", _each("self_attn.{}_proj"), "self_attn.out_proj"),
    Sublayer("final_layer_norm", "fc1", "fc2", "config.activation_function"),
    "final_layer_norm",
    "embed_tokens + embed_positions[2:]",
)
_LLAMA = Layout(
    "layers",
    Sublayer("input_layernorm", _each("self_attn.{}_proj"), "self_attn.o_proj"),
    Sublayer("post_attention_layernorm", "mlp.gate_proj mlp.up_proj", "mlp.down_proj", "glu"),
    "norm",
    "embed_tokens",
    centring=False,
)
_LANGUAGE = {
    **{f"{name.lower()}.{name}Model": _BERT for name in ("Bert", "Roberta", "Camembert", "Electra")},
    "xlm_roberta.XLMRobertaModel": _BERT,
    "distilbert.DistilBertModel": replace(
        _BERT,
        layers="transformer.layer",
        attention=Sublayer("sa_layer_norm", _each("attention.{}_lin"), "attention.out_lin"),
        mlp=Sublayer("output_layer_norm", "ffn.lin1", "ffn.lin2", "config.activation"),
    ),
    "albert.AlbertModel": replace(
        _BERT,
        layers="encoder.albert_layer_groups.{}.albert_layers",
        attention=Sublayer("attention.LayerNorm", _each("attention.{}", "query key value"), "attention.dense"),
        mlp=Sublayer("full_layer_layer_norm", "ffn", "ffn_output", "config.hidden_act"),
        projection="encoder.embedding_hidden_mapping_in",
    ),
    "gpt2.GPT2Model": Layout(
        "h",
        Sublayer("ln_1", "attn.c_attn", "attn.c_proj"),
        Sublayer("ln_2", "mlp.c_fc", "mlp.c_proj", "config.activation_function"),
        "ln_f",
        "wte + wpe",
    ),
    "gpt_neox.GPTNeoXModel": Layout(
        "layers",
        Sublayer("input_layernorm", "attention.query_key_value", "attention.dense"),
        Sublayer("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "config.hidden_act"),
        "final_layer_norm",
        "embed_in",
    ),
    "llama.LlamaModel": _LLAMA,
    "mistral.MistralModel": _LLAMA,
    "qwen2.Qwen2Model": _LLAMA,
    "qwen3.Qwen3Model": replace(
        _LLAMA, attention=replace(_LLAMA.attention, qk_norms="self_attn.q_norm self_attn.k_norm")
    ),
    "gemma.GemmaModel": replace(_LLAMA, offset=1.0),
    "phi3.Phi3Model": replace(
        _LLAMA,
        attention=replace(_LLAMA.attention, readers="self_attn.qkv_proj"),
        mlp=replace(_LLAMA.mlp, readers="mlp.gate_up_proj"),
    ),
}
_T5_MLP = "layer.1.DenseReluDense"
_T5 = Layout(
    "block",
    Sublayer("layer.0.layer_norm", _each("layer.0.SelfAttention.{}"), "layer.0.SelfAttention.o"),
    Sublayer(
        "layer.1.layer_norm", f"{_T5_MLP}.wi|{_T5_MLP}.wi_0 {_T5_MLP}.wi_1", f"{_T5_MLP}.wo", "config.dense_act_fn|glu"
    ),
    "final_layer_norm",
    scores="relative_attention_bias",
    centring=False,
)
_T5_DECODER = replace(
    _T5,
    cross=Sublayer("layer.1.layer_norm", "layer.1.EncDecAttention.q", "layer.1.EncDecAttention.o"),
    mlp=Sublayer(*(names.replace("layer.1", "layer.2") for names in vars(_T5.mlp).values())),
)


def _classifier(name: str, layout: Layout, model: Any) -> Wiring:
    """Wire a network whose head reads the last norm, or two of its outputs side by side."""
    head, d = affine(model, "classifier"), model.config.hidden_size
    parts = [affine(model, "classifier", inputs=slice(i, i + d)) for i in range(0, head.matrix.size[1], d)]
    return wire(Wiring(classifiers=[("classifier", head)]), getattr(model, name.split(".")[0]), layout, parts)


for _name, _layout in _CLASSIFIERS.items():
    register_wiring(_HF.format(*_name.split(".")))(partial(_classifier, _name, _layout))


@register_wiring(*(_HF.format(name.lower(), name + kind) for name in ("CLIP", "Siglip") for kind in _TOWERS.split()))
def _towers(model: Any) -> Wiring:
    """Wire towers of images and of text; the outputs of one alone are used raw."""
    parts = [name for name in ("vision_model", "text_model") if has(model, name)] or [""]
    w = Wiring(closed=len(parts) == 1)
    if has(model, "classifier"):
        w.classifiers.append(("classifier", affine(model, "classifier")))
    for name in parts:
        base = model.get_submodule(name)
        _tower(w, model, getattr(base, name, base) if name else base, name)
    return w


def _tower(w: Wiring, model: Any, base: Any, name: str) -> None:
    layout = _CLIP if has(base, "pre_layrnorm") else _SIGLIP if has(base, "post_layernorm") else _TEXT
    head = "visual_projection" if layout is _CLIP else "classifier" if layout is _SIGLIP else "text_projection"
    readers = [affine(model, head)] if has(model, head) else []
    if has(base, "head.probe"):  # one query attends to the last norm's outputs
        d = base.config.hidden_size
        readers.append(affine(base, "head.attention", outputs=slice(d, 3 * d)))
        w.sites.append(Site(f"{name} head", norm(base, "head.layernorm"), (affine(base, "head.mlp.fc1"),)))
        w.closed = False
    elif has(base, "head"):
        readers.append(affine(base, "head"))
    if plain_class(model).__name__.endswith(("VisionModel", "TextModel")):
        readers, w.closed = [], False
    if layout is _CLIP and not readers:  # the patches' outputs, or the classifier, have no norm
        layout, w.reads_stream_raw = replace(layout, last=""), True
    wire(w, base, layout, readers, f"{name}.")


@register_wiring("timm.models.vision_transformer.VisionTransformer")
def _timm(model: Any) -> Wiring:
    """Plain vision transformers; for other kinds of block, pooling or norm only heads are treated."""
    expected = _TIMM_PARTS | {"mlp.act": type(model.blocks[0].mlp.act).__name__}
    plain = all(type(b.get_submodule(n)).__name__ == kind for b in model.blocks for n, kind in expected.items())
    plain &= isinstance(getattr(model.patch_embed, "norm", nn.Identity()), nn.Identity)
    if not plain or model.global_pool not in ("token", "avg") or getattr(model, "reg_token", None) is not None:
        return Wiring(closed=False)
    layout = replace(_TIMM, last="norm" if isinstance(model.fc_norm, nn.Identity) else "fc_norm")
    if not isinstance(model.norm_pre, nn.Identity):
        layout = replace(layout, first="norm_pre", embeddings="")
    elif model.no_embed_class or not has(model, "cls_token"):
        layout = replace(layout, embeddings="cls_token?, pos_embed? + patch_embed.proj")
    heads = [affine(model, "head")] if isinstance(model.head, nn.Linear) else []
    return wire(Wiring(classifiers=[("head", h) for h in heads], closed=bool(heads)), model, layout, heads)


@register_wiring("open_clip.transformer.VisionTransformer")
def _open_clip(model: Any) -> Wiring:
    """Wire the image tower only; its output is read by the projection."""
    if model.attn_pool is not None or model.final_ln_after_pool or type(model.ln_pre).__name__ == "Identity":
        return Wiring(closed=False)
    return wire(Wiring(), model, _OPEN_CLIP, [affine(model, "proj")] if model.proj is not None else [])


@register_wiring("open_clip.model.CLIP")
def _open_clip_both(model: Any) -> Wiring:
    """Wire both towers."""
    w = wiring_of(model.visual) or Wiring()
    if not w.sites:
        return Wiring(closed=False)
    layout = replace(_OPEN_CLIP, first="", last="ln_final", embeddings="token_embedding + positional_embedding")
    return wire(w, model, layout, [affine(model, "text_projection")], "text ")


@register_wiring("torch.nn.modules.transformer.TransformerEncoder")
def _torch(model: Any) -> Wiring:
    """Wire an encoder on its own: its input and, without a last norm, its output are the stream itself."""
    if any(type(layer) is not nn.TransformerEncoderLayer for layer in model.layers):
        return Wiring(closed=False)
    before = model.layers[0].norm_first
    layout = replace(_TORCH, last="norm" if before and model.norm is not None else "", post_norm=not before)
    return wire(Wiring(closed=False, reads_stream_raw=before and model.norm is None), model, layout, [])


#: What reads the last norm of a language model: of each string the first that exists.
_READERS = (
    "cls.predictions.transform.dense|lm_head.dense|generator_predictions.dense|predictions.dense|vocab_transform|"
    "lm_head|embed_out",
    "discriminator_predictions.dense|pre_classifier|qa_outputs|score|sequence_summary.summary|"
    "multiple_choice_head.summary",
    "pooler.dense|pooler",
)
#: The norm inside a language model's head, and the decoder that reads it.
_NORM = (
    "cls.predictions.transform.LayerNorm|lm_head.layer_norm|generator_predictions.LayerNorm|predictions.LayerNorm|"
    "vocab_layer_norm"
)
_DECODER = "cls.predictions.decoder|lm_head.decoder|generator_lm_head|predictions.decoder|vocab_projector"
#: What computes the logits of a softmax.
_LOGITS = (
    f"{_DECODER}|lm_head|embed_out|score|classifier.out_proj|classifier",
    "cls.seq_relationship|sop_classifier.classifier",
)


def _head(w: Wiring, model: Any, base: Any) -> list[Affine]:
    """Wire a model's head and return what reads the last norm: nothing for a backbone alone, whose output is raw."""
    if model is base:
        w.closed = False
        return []
    readers = [affine(root, n) for root, n in zip((model, model, base), _READERS, strict=True) if has(root, n)]
    if has(model, _NORM):
        w.sites.append(Site("head", norm(model, _NORM), (affine(model, _DECODER),)))
    if has(model, "pre_classifier"):
        w.neurons.append(Neurons("pre_classifier", "relu", readers[0], affine(model, "classifier")))
    w.classifiers += [(names.split("|")[-1], affine(model, names)) for names in _LOGITS if has(model, names)]
    return readers or [affine(model, "classifier.dense|classifier")]


def _language(layout: Layout, model: Any, base: Any) -> Wiring:
    if getattr(base.config, "add_cross_attention", False):
        return Wiring(closed=False)
    w = Wiring(closed=not layout.post_norm)
    readers = _head(w, model, base)
    if has(base, "embeddings.token_type_embeddings"):
        layout = replace(layout, embeddings=_with_types(w, base))
    if "{}" not in layout.layers:
        return wire(w, base, layout, readers)
    # Groups of layers that are used several times, so that several layers read the last norm of each.
    for i in range(len(base.encoder.albert_layer_groups)):
        wire(w, base, replace(layout, layers=layout.layers.format(i)), [])
        layout = replace(layout, last="", embeddings="")
    return w


for _name, _layout in _LANGUAGE.items():
    register_backbone(_HF.format(*_name.split(".")))(partial(_language, _layout))


def _with_types(w: Wiring, base: Any) -> str:
    """Exchange vectors between positions and types alone where a decoder uses the words too."""
    words, positions, types = (f"embeddings.{x}_embeddings" for x in ("word", "position", "token_type"))
    pad = getattr(base.embeddings, "padding_idx", None)
    if any(a.W is base.embeddings.word_embeddings.weight for _, a in w.classifiers):
        return f"{words}, {types} + {positions}" + ("" if pad is None else f"[{pad}:]")
    if pad is None:
        return f"{words} + {positions}, {words} + {types}"
    # Padding alone has its own index as position, other tokens later ones.
    its, later = f"[{pad}:{pad + 1}]", f"{pad + 1}:"
    return f"{words}{its} + {positions}{its}, {words}[:{pad},{later}] + {positions}[{later}], {words} + {types}"


@register_backbone(_HF.format("opt", "OPTModel"))
def _opt(model: Any, base: Any) -> Wiring:
    """Words may have a width of their own; post-norm, the first layer reads the embeddings without a norm."""
    w, decoder, layout = Wiring(), base.decoder, _OPT
    readers = _head(w, model, base)
    if has(decoder, "project_in"):
        layout = replace(layout, embeddings="project_in, embed_positions[2:]")
        readers = [affine(decoder, "project_out")]
        w.classifiers = [(n, a) for n, a in w.classifiers if a.W is not decoder.embed_tokens.weight]
    if not has(decoder, "final_layer_norm"):
        if base.config.do_layer_norm_before:  # the head reads the stream itself
            return Wiring(closed=False)
        layout, w.closed = replace(layout, last="", embeddings="", post_norm=True), False
    return wire(w, decoder, layout, readers)


@register_wiring(_HF.format("t5", "T5ForConditionalGeneration"))
def _t5(model: Any) -> Wiring:
    """Two streams that share their words; the decoder's keys and values read the encoder's last norm."""
    head, cross = affine(model, "lm_head"), [b.layer[1].EncDecAttention for b in model.decoder.block]
    w = Wiring(classifiers=[("lm_head", head)], tables=[("shared", table(model, "shared")[0])])
    wire(w, model.encoder, _T5, [affine(a, x) for a in cross for x in "kv"], "encoder.")
    return wire(w, model.decoder, _T5_DECODER, [head], "decoder.")

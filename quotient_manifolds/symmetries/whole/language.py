"""The wiring of transformers' language models: of their backbones, and of the heads that the library has for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from .layout import Layout, Sublayer, affine, has, norm, rectified, table, wire
from .wiring import Affine, Neurons, Norm, Site, Wiring, register_backbone, register_wiring

_HF = "transformers.models.{0}.modeling_{0}.{1}"


def _all(family: str, *classes: str) -> list[str]:
    return [_HF.format(family, c) for c in classes]


#: What reads the last norm: of each string the first that exists.
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
        w.sites.append(Site("head", norm(model, _NORM, _BERT), (affine(model, _DECODER),)))
    w.classifiers += [(names.split("|")[-1], affine(model, names)) for names in _LOGITS if has(model, names)]
    return readers or [affine(model, "classifier.dense|classifier")]


#: Layers of BERT, or of ALBERT, or of DistilBERT.
_BERT = Layout(
    layers="encoder.layer|albert_layers|transformer.layer",
    sublayers=(
        Sublayer(
            "attention.output.LayerNorm|attention.LayerNorm|sa_layer_norm",
            tuple(f"attention.self.{x}|attention.{x}|attention.{x[0]}_lin" for x in ("query", "key", "value")),
            "attention.output.dense|attention.dense|attention.out_lin",
        ),
        Sublayer(
            "output.LayerNorm|full_layer_layer_norm|output_layer_norm",
            ("intermediate.dense|ffn.lin1|ffn",),
            "output.dense|ffn.lin2|ffn_output",
        ),
    ),
    last="embeddings.LayerNorm",
    tables=tuple(f"embeddings.{x}_embeddings" for x in ("word", "position", "token_type")),
    common=tuple((f"embeddings.{x}_embeddings", "embeddings.word_embeddings") for x in ("position", "token_type")),
    post_norm=True,
)


def _untied(w: Wiring, base: Any, layout: Layout) -> Layout:
    """Exchange vectors between positions and types alone where a decoder uses the words too."""
    _, positions, types = layout.tables
    tied = any(a.W is base.embeddings.word_embeddings.weight for _, a in w.classifiers)
    return replace(layout, common=((positions, types),)) if tied else layout


def _projected(w: Wiring, base: Any, layout: Layout, projection: str) -> Layout:
    """Wire embeddings of another width, whose norm a projection alone reads; the first layer reads that raw."""
    w.sites.append(Site(layout.last, norm(base, layout.last, layout), (affine(base, projection),)))
    return replace(layout, last="")


@register_backbone(
    *_all("bert", "BertModel"), *_all("roberta", "RobertaModel"), *_all("camembert", "CamembertModel"),
    *_all("xlm_roberta", "XLMRobertaModel"), *_all("electra", "ElectraModel"),
)  # fmt: skip
def _bert(model: Any, base: Any) -> Wiring:
    w, layout = Wiring(closed=False), rectified(_BERT, base.config.hidden_act)
    if getattr(base.config, "add_cross_attention", False):
        return w
    if hasattr(base, "embeddings_project"):
        layout = _projected(w, base, layout, "embeddings_project")
    pad = getattr(base.embeddings, "padding_idx", None)
    if pad is not None:  # padding alone has its own index as position, other tokens later ones
        words, positions, types = layout.tables
        others = (f"{positions}[{pad + 1}:]", f"{words}[:{pad}]+{words}[{pad + 1}:]")
        of_padding = (f"{positions}[{pad}:{pad + 1}]", f"{words}[{pad}:{pad + 1}]")
        layout = replace(
            layout, tables=(words, f"{positions}[{pad}:]", types), common=(of_padding, others, layout.common[1])
        )
    readers = _head(w, model, base)
    return wire(w, base, _untied(w, base, layout), readers)


@register_backbone(*_all("albert", "AlbertModel"))
def _albert(model: Any, base: Any) -> Wiring:
    """Wire groups of layers that are used several times, so that several layers read the last norm of each."""
    w = Wiring(closed=False)
    _head(w, model, base)
    embedded = _projected(w, base, _untied(w, base, _BERT), "encoder.embedding_hidden_mapping_in")
    wire(w, base, replace(embedded, layers="encoder.albert_layer_groups", sublayers=()), [])
    layers = rectified(replace(_BERT, last="", tables=(), common=()), base.config.hidden_act)
    for i, group in enumerate(base.encoder.albert_layer_groups):
        wire(w, group, layers, [], f"groups.{i}.")
    return w


@register_backbone(*_all("distilbert", "DistilBertModel"))
def _distilbert(model: Any, base: Any) -> Wiring:
    """Its head for classification has a hidden layer with a ReLU."""
    w = Wiring(closed=False)
    readers = _head(w, model, base)
    if has(model, "pre_classifier"):
        w.neurons.append(Neurons("pre_classifier", "relu", readers[0], affine(model, "classifier")))
    layout = replace(_BERT, tables=_BERT.tables[:2], common=_BERT.common[:1])
    return wire(w, base, rectified(layout, base.config.activation), readers)


def _causal(model: Any, base: Any, layout: Layout) -> Wiring:
    w = Wiring()
    return wire(w, base, layout, _head(w, model, base))


_GPT2 = Layout(
    layers="h",
    sublayers=(
        Sublayer("ln_1|input_layernorm", ("attn.c_attn|attention.query_key_value",), "attn.c_proj|attention.dense"),
        Sublayer("ln_2|post_attention_layernorm", ("mlp.c_fc|mlp.dense_h_to_4h",), "mlp.c_proj|mlp.dense_4h_to_h"),
    ),
    last="ln_f",
    tables=("wte", "wpe"),
    common=(("wpe", "wte"),),
)
_NEOX = replace(_GPT2, layers="layers", last="final_layer_norm", tables=("embed_in",), common=())


@register_backbone(*_all("gpt2", "GPT2Model"))
def _gpt2(model: Any, base: Any) -> Wiring:
    if base.config.add_cross_attention:
        return Wiring(closed=False)
    return _causal(model, base, rectified(_GPT2, base.config.activation_function))


@register_backbone(*_all("gpt_neox", "GPTNeoXModel"))
def _gpt_neox(model: Any, base: Any) -> Wiring:
    return _causal(model, base, rectified(_NEOX, base.config.hidden_act))


_OPT = Layout(
    layers="layers",
    sublayers=(
        Sublayer("self_attn_layer_norm", tuple(f"self_attn.{x}_proj" for x in "qkv"), "self_attn.out_proj"),
        Sublayer("final_layer_norm", ("fc1",), "fc2"),
    ),
    last="final_layer_norm",
    tables=("embed_tokens", "embed_positions[2:]"),
    common=(("embed_positions[2:]", "embed_tokens"),),
)


@register_backbone(*_all("opt", "OPTModel"))
def _opt(model: Any, base: Any) -> Wiring:
    """Words may have a width of their own; post-norm, the first layer reads the embeddings without a norm."""
    w, decoder = Wiring(), base.decoder
    readers, layout = _head(w, model, base), rectified(_OPT, base.config.activation_function)
    if has(decoder, "project_in"):
        layout = replace(layout, tables=layout.tables[1:], common=())
        w.writers.append(("project_in", affine(decoder, "project_in")))
        readers = [affine(decoder, "project_out")]
        w.classifiers = [(n, a) for n, a in w.classifiers if a.W is not decoder.embed_tokens.weight]
    if not has(decoder, "final_layer_norm"):
        if base.config.do_layer_norm_before:  # the head reads the stream itself
            return Wiring(closed=False)
        layout = replace(layout, last="", tables=(), common=(), post_norm=True)
        w.writers, w.closed = [], False
    return wire(w, decoder, layout, readers)


def _gated(attention: tuple[str, ...], mlp: tuple[str, ...]) -> Layout:
    """Layers of Llama's kind."""
    return Layout(
        layers="layers",
        sublayers=(
            Sublayer("input_layernorm", attention, "self_attn.o_proj"),
            Sublayer("post_attention_layernorm", mlp, "mlp.down_proj", act="glu"),
        ),
        last="norm",
        tables=("embed_tokens",),
        centring=False,
    )


_LLAMA = _gated(tuple(f"self_attn.{x}_proj" for x in "qkv"), ("mlp.gate_proj", "mlp.up_proj"))


def _like_llama(layout: Layout, *names: str) -> None:
    classes = (c for name in names for c in _all(name.lower(), f"{name}Model"))
    register_backbone(*classes)(lambda model, base: _causal(model, base, layout))


_like_llama(_LLAMA, "Llama", "Mistral", "Qwen2")
_like_llama(replace(_LLAMA, offset=1.0), "Gemma")
_like_llama(_gated(("self_attn.qkv_proj",), ("mlp.gate_up_proj",)), "Phi3")


@register_backbone(*_all("qwen3", "Qwen3Model"))
def _qwen3(model: Any, base: Any) -> Wiring:
    """Norms of queries and keys, whose gains can be scaled inversely."""
    w = _causal(model, base, _LLAMA)
    for i, layer in enumerate(base.layers):
        attention = layer.self_attn
        w.qk_norms.append((f"layers.{i}", Norm(attention.q_norm, False), Norm(attention.k_norm, False)))
    return w


def _t5_layout(config: Any, decoder: bool) -> Layout:
    gated = config.is_gated_act
    readers = ("wi_0", "wi_1") if gated else ("wi",)
    act = "glu" if gated else ("relu" if config.dense_act_fn == "relu" else "")
    last = 2 if decoder else 1
    parts = [("SelfAttention", 0, tuple("qkv"))] + ([("EncDecAttention", 1, ("q",))] if decoder else [])
    attention = [
        Sublayer(f"layer.{i}.layer_norm", tuple(f"layer.{i}.{a}.{x}" for x in read), f"layer.{i}.{a}.o")
        for a, i, read in parts
    ]
    dense = f"layer.{last}.DenseReluDense."
    mlp = Sublayer(f"layer.{last}.layer_norm", tuple(dense + r for r in readers), dense + "wo", act=act)
    return Layout("block", (*attention, mlp), "final_layer_norm", centring=False)


@register_wiring(*_all("t5", "T5ForConditionalGeneration"))
def _t5(model: Any) -> Wiring:
    """Two streams that share their words; the decoder's keys and values read the encoder's last norm."""
    head = affine(model, "lm_head")
    w = Wiring(classifiers=[("lm_head", head)], tables=[("shared", table(model, "shared"))])
    cross = [affine(b.layer[1].EncDecAttention, x) for b in model.decoder.block for x in "kv"]
    wire(w, model.encoder, _t5_layout(model.config, False), cross, "encoder.")
    wire(w, model.decoder, _t5_layout(model.config, True), [head], "decoder.")
    for name, module in model.named_modules():
        found = getattr(module, "relative_attention_bias", None)
        if isinstance(found, nn.Embedding):
            w.score_tables.append((name, (table(module, "relative_attention_bias"),)))
    return w

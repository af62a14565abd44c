"""The wiring of transformers' language models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn

from .layout import Layout, Sublayer, affine, rectified, table, wire
from .wiring import Neurons, Norm, Wiring, register_wiring

_HF = "transformers.models.{0}.modeling_{0}.{1}"


def _all(family: str, *classes: str) -> list[str]:
    return [_HF.format(family, c) for c in classes]


_BERT = Layout(
    layers="encoder.layer",
    sublayers=(
        Sublayer(
            "attention.output.LayerNorm", tuple(f"attention.self.{x}" for x in ("query", "key", "value")),
            "attention.output.dense",
        ),
        Sublayer("output.LayerNorm", ("intermediate.dense",), "output.dense"),
    ),
    last="embeddings.LayerNorm",
    tables=tuple(f"embeddings.{x}_embeddings" for x in ("word", "position", "token_type")),
    common=tuple((f"embeddings.{x}_embeddings", "embeddings.word_embeddings") for x in ("position", "token_type")),
    post_norm=True,
)  # fmt: skip


@register_wiring(
    *_all("bert", "BertForSequenceClassification"),
    *_all("roberta", "RobertaForSequenceClassification"),
    *_all("electra", "ElectraForSequenceClassification"),
)
def _bert(model: Any) -> Wiring:
    base = model.base_model
    pooled = type(base).__name__ == "BertModel"
    head = affine(model, "classifier" if pooled else "classifier.out_proj")
    reader = affine(base, "pooler.dense") if pooled else affine(model, "classifier.dense")
    layout = rectified(_BERT, model.config.hidden_act)
    if hasattr(base, "embeddings_project") or model.config.is_decoder:
        return Wiring(closed=False)
    if type(base).__name__ == "RobertaModel":  # padding alone has its own index as position, other tokens later ones
        pad, (words, positions, types) = model.config.pad_token_id, layout.tables
        others = (f"{positions}[{pad + 1}:]", f"{words}[:{pad}]+{words}[{pad + 1}:]")
        of_padding = (f"{positions}[{pad}:{pad + 1}]", f"{words}[{pad}:{pad + 1}]")
        layout = replace(
            layout, tables=(words, f"{positions}[{pad}:]", types), common=(of_padding, others, layout.common[1])
        )
    return wire(Wiring(classifiers=[("classifier", head)], closed=False), base, layout, [reader])


_DISTILBERT = Layout(
    layers="transformer.layer",
    sublayers=(
        Sublayer("sa_layer_norm", tuple(f"attention.{x}_lin" for x in "qkv"), "attention.out_lin"),
        Sublayer("output_layer_norm", ("ffn.lin1",), "ffn.lin2"),
    ),
    last="embeddings.LayerNorm",
    tables=("embeddings.word_embeddings", "embeddings.position_embeddings"),
    common=(("embeddings.position_embeddings", "embeddings.word_embeddings"),),
    post_norm=True,
)


@register_wiring(*_all("distilbert", "DistilBertForSequenceClassification"))
def _distilbert(model: Any) -> Wiring:
    """Its head has a hidden layer with a ReLU."""
    reader, head = affine(model, "pre_classifier"), affine(model, "classifier")
    neurons = [Neurons("pre_classifier", "relu", reader, head)]
    w = Wiring(classifiers=[("classifier", head)], neurons=neurons, closed=False)
    return wire(w, model.distilbert, rectified(_DISTILBERT, model.config.activation), [reader])


def _causal(model: Any, base: Any, layout: Layout) -> Wiring:
    head = affine(model, "lm_head|score")
    return wire(Wiring(classifiers=[("head", head)]), base, layout, [head])


_GPT2 = Layout(
    layers="h",
    sublayers=(
        Sublayer("ln_1", ("attn.c_attn",), "attn.c_proj"),
        Sublayer("ln_2", ("mlp.c_fc",), "mlp.c_proj"),
    ),
    last="ln_f",
    tables=("wte", "wpe"),
    common=(("wpe", "wte"),),
)


@register_wiring(*_all("gpt2", "GPT2LMHeadModel", "GPT2ForSequenceClassification"))
def _gpt2(model: Any) -> Wiring:
    if model.config.add_cross_attention:
        return Wiring(closed=False)
    return _causal(model, model.transformer, rectified(_GPT2, model.config.activation_function))


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


@register_wiring(*_all("opt", "OPTForCausalLM", "OPTForSequenceClassification"))
def _opt(model: Any) -> Wiring:
    config = model.config
    if not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size:
        return Wiring(closed=False)
    return _causal(model, model.model.decoder, rectified(_OPT, config.activation_function))


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
_HEADS = ("ForCausalLM", "ForSequenceClassification")


def _like_llama(layout: Layout, *names: str) -> None:
    classes = (c for name in names for c in _all(name.lower(), *(name + h for h in _HEADS)))
    register_wiring(*classes)(lambda model: _causal(model, cast("Any", model).model, layout))


_like_llama(_LLAMA, "Llama", "Mistral", "Qwen2")
_like_llama(replace(_LLAMA, offset=1.0), "Gemma")
_like_llama(_gated(("self_attn.qkv_proj",), ("mlp.gate_up_proj",)), "Phi3")


@register_wiring(*_all("qwen3", *("Qwen3" + h for h in _HEADS)))
def _qwen3(model: Any) -> Wiring:
    """Norms of queries and keys, whose gains can be scaled inversely."""
    w = _causal(model, model.model, _LLAMA)
    for i, layer in enumerate(model.model.layers):
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

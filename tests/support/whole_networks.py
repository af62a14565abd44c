"""Tiny whole networks, in double precision and with random weights, for the symmetries of whole networks."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from quotient_manifolds.passes import Wide
from quotient_manifolds.symmetries import ALL, canonical_form, find
from quotient_manifolds.symmetries.whole import Element, Move
from quotient_manifolds.symmetries.whole.align import Form
from quotient_manifolds.symmetries.whole.fits import permutation
from quotient_manifolds.weights import weights_of

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
WORDS = {"vocab_size": 11, "max_position_embeddings": 6, "num_labels": 3}
CAUSAL = {
    "vocab_size": 11, "max_position_embeddings": 6, "head_dim": 4, "num_key_value_heads": 1, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"vocab_size": 11, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 12}
T5 = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}

#: Family: (class, configuration's class, options) of transformers.
TRANSFORMERS = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**SMALL, **IMAGES}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**SMALL, **IMAGES}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {**SMALL, **IMAGES, "mlp_ratio": 2}),
    "beit": ("BeitForImageClassification", "BeitConfig", {**SMALL, **IMAGES}),
    "clip": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {**SMALL, **IMAGES, "projection_dim": 5}),
    "bert": ("BertForSequenceClassification", "BertConfig", {**SMALL, **WORDS}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig",
                {**SMALL, **WORDS, "max_position_embeddings": 8, "type_vocab_size": 2}),
    "electra": ("ElectraForSequenceClassification", "ElectraConfig", {**SMALL, **WORDS, "embedding_size": 8}),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig",
                   {**WORDS, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "opt": ("OPTForCausalLM", "OPTConfig",
            {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 12,
             "word_embed_proj_dim": 8, "vocab_size": 11, "max_position_embeddings": 6}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, **CAUSAL}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, **CAUSAL, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, **CAUSAL}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, **CAUSAL}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, **CAUSAL}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**SMALL, **CAUSAL}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SMALL, **CAUSAL}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip
OPT = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 12, "vocab_size": 11,
       "max_position_embeddings": 8}  # fmt: skip
BERT = {**SMALL, **WORDS, "max_position_embeddings": 8, "type_vocab_size": 2, "num_labels": 2}
GATED = {**SMALL, **CAUSAL, "max_position_embeddings": 8, "num_labels": 2}
TEXT, IMAGE = (
    {**SMALL, "vocab_size": 11, "eos_token_id": 10},
    {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 1},
)

#: Backbone: (folder of its library, configuration's class, options, a head that every run of the tests looks at).
BACKBONES = {
    "bert": ("bert", "BertConfig", BERT, "BertForMaskedLM"),
    "bert-pretraining": ("bert", "BertConfig", BERT, "BertForPreTraining"),
    "roberta": ("roberta", "RobertaConfig", BERT, "RobertaForMaskedLM"),
    "camembert": ("camembert", "CamembertConfig", BERT, "CamembertForTokenClassification"),
    "xlm_roberta": ("xlm_roberta", "XLMRobertaConfig", BERT, "XLMRobertaForQuestionAnswering"),
    "electra": ("electra", "ElectraConfig", {**BERT, "embedding_size": 8}, "ElectraForPreTraining"),
    "electra-narrow": ("electra", "ElectraConfig", {**BERT, "embedding_size": 4}, "ElectraForMaskedLM"),
    "distilbert": ("distilbert", "DistilBertConfig",
                   {**WORDS, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "num_labels": 2},
                   "DistilBertForMaskedLM"),
    "gpt2": ("gpt2", "GPT2Config", {**GPT2, "n_positions": 8, "num_labels": 2, "pad_token_id": 0},
             "GPT2DoubleHeadsModel"),
    "opt": ("opt", "OPTConfig", {**OPT, "word_embed_proj_dim": 8, "num_labels": 2}, "OPTForQuestionAnswering"),
    "gpt_neox": ("gpt_neox", "GPTNeoXConfig",
                 {**SMALL, "vocab_size": 11, "rotary_pct": 0.5, "num_labels": 2, "pad_token_id": 0},
                 "GPTNeoXForCausalLM"),
    "llama": ("llama", "LlamaConfig", GATED, "LlamaForTokenClassification"),
    "qwen3": ("qwen3", "Qwen3Config", GATED, "Qwen3ForSequenceClassification"),
    "gemma": ("gemma", "GemmaConfig", GATED, "GemmaForTokenClassification"),
    "phi3": ("phi3", "Phi3Config", GATED, "Phi3ForTokenClassification"),
    "clip": ("clip", "CLIPConfig", {}, "CLIPModel"),
    "clip-image": ("clip", "CLIPConfig", {}, "CLIPVisionModel"),
    "siglip": ("siglip", "SiglipConfig", {}, "SiglipModel"),
    "siglip-image": ("siglip", "SiglipConfig", {}, "SiglipForImageClassification"),
}  # fmt: skip
TIMM = {"embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3, "img_size": 8, "patch_size": 4, "in_chans": 1,
        "mlp_ratio": 1.5}  # fmt: skip
FAMILIES = [*TRANSFORMERS, "timm", "timm-no-bias", "torch-pre", "torch-post"]


def _make(name):
    if name in TRANSFORMERS:
        import transformers

        model, config, options = TRANSFORMERS[name]
        return getattr(transformers, model)(getattr(transformers, config)(**options))
    if name.startswith("timm"):
        import timm

        odd = {"qkv_bias": False, "init_values": 0.1, "global_pool": "avg"} if name == "timm-no-bias" else {}
        return timm.create_model("vit_tiny_patch16_224", **TIMM, **odd)
    before = name == "torch-pre"
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=before)
    last = nn.LayerNorm(8) if before else None
    return nn.TransformerEncoder(layer, 2, norm=last, enable_nested_tensor=False)


def normalised(conv=2, linear=0):
    """A network of two layers that normalise their weights, for each index of a dimension; for None as a whole."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, last = nn.Conv1d(2, 3, 2), nn.Linear(9, 4)
        layers = (weight_norm(first, dim=conv), nn.Tanh(), nn.Flatten(), weight_norm(last, dim=linear))
        return nn.Sequential(*layers).double().eval()


def _stay_double(model):
    """RMSNorms of transformers cast to float32, which hides null directions at 1e-7; padding has no gradient."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
        if type(module).__name__.endswith("RMSNorm") or type(module).__name__ == "T5LayerNorm":
            module.__class__ = type(
                module.__class__.__name__, (module.__class__,), {"forward": _rms, "__deepcopy__": _copied_norm}
            )


def _rms(self, x):
    offset = 1.0 if "Gemma" in type(self).__name__ else 0.0
    return (offset + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)


def _copied_norm(self, memo):
    twin = copy.copy(self)
    twin._parameters = copy.deepcopy(self._parameters, memo)
    return twin


def build(name, seed=1):
    """A network of a family, in evaluation mode, with random weights everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _make(name).eval().double()
    _stay_double(model)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-3
    for setting in ("layer_norm_eps", "layer_norm_epsilon"):
        if hasattr(getattr(model, "config", None), setting):
            setattr(model.config, setting, 1e-3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            gain = p.dim() == 1 and not key.endswith("bias") and "class_embedding" not in key and name != "gemma"
            size = 0.1 if key.endswith("bias") else 1.0 if "embed" in key and "orm" not in key else 0.4
            p.copy_(float(gain) + size * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def heads(family):
    """The names of all networks of a backbone's file."""
    import importlib

    from transformers import PreTrainedModel

    file = importlib.import_module("transformers.models.{0}.modeling_{0}".format(BACKBONES[family][0]))
    kinds = (c for c in vars(file).values() if isinstance(c, type) and c.__module__ == file.__name__)
    names = [c.__name__ for c in kinds if issubclass(c, PreTrainedModel)]
    return [n for n in names if not n.endswith(("PreTrainedModel", "Decoder", "Transformer"))]


def headed(family, name):
    """A network of a backbone, and a batch for it, with labels for a language model."""
    import transformers

    folder, config, options, _ = BACKBONES[family]
    if folder in ("clip", "siglip"):
        image = {**IMAGE, "projection_dim": 5, "vision_use_head": "ForImage" not in name}
        sizes = {"Text": TEXT, "Vision": image}
        kind = next((k for k in sizes if k in name), "")
        config, both = config.replace("Config", f"{kind}Config"), {"text_config": TEXT, "vision_config": image}
        options = sizes[kind] if kind else {**both, "num_labels": 3, "projection_dim": 5}
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, dtype=p.dtype))
    ids = torch.randint(2, 10, (4, 6))
    ids[:, -1] = 10
    batch = {"input_ids": ids.view(2, 2, 6) if "MultipleChoice" in name or "DoubleHeads" in name else ids}
    pixels = {"pixel_values": torch.randn(4, 1, 8, 8, dtype=torch.float64)}
    if folder in ("clip", "siglip") and "Text" not in name:
        batch = pixels if "Image" in name or "Vision" in name else {**batch, **pixels}
    return model, {**batch, "labels": ids} if name.endswith(("LM", "LMHeadModel")) else batch


def inputs(name, numbers=1, seed=2):
    """Batches of a family whose outputs are at least so many numbers."""
    generator = torch.Generator().manual_seed(seed)

    def words():
        return torch.randint(0, 11, (6, 6), generator=generator)

    def pixels():
        return torch.randn(24, 1, 8, 8, generator=generator, dtype=torch.float64)

    each = {
        "clip": 120,
        "bert": 18,
        "roberta": 18,
        "electra": 18,
        "distilbert": 18,
        "torch-pre": 288,
        "torch-post": 288,
    }
    images = name in ("vit", "deit", "dinov2", "beit") or name.startswith("timm")
    for _ in range(-(-numbers // each.get(name, 72 if images else 396))):
        if name.startswith("torch"):
            yield torch.randn(6, 6, 8, generator=generator, dtype=torch.float64)
        elif name.startswith("timm"):
            yield pixels()
        elif images or name == "clip":
            yield {"pixel_values": pixels()}
        else:
            batch = {"input_ids": words()}
            if name in ("bert", "roberta", "electra"):
                batch["token_type_ids"] = torch.randint(0, 2, (6, 6), generator=generator)
            yield {**batch, "decoder_input_ids": words()} if name == "t5" else batch


def forward(model, batch):
    """The outputs of a network of any family."""
    with Wide() if type(model).__name__.startswith("T5") else nullcontext():  # casts to float32 in transformers 5.12
        found = model(**batch) if isinstance(batch, dict) else model(batch)
    if isinstance(found, torch.Tensor):
        return found
    return found.logits if "logits" in found else found.image_embeds


def symmetries_of(model, **options):
    """All symmetries of a network that have a quotient."""
    return find(model, scope=ALL, **options).of_full_rank()


def folded(model, **options):
    """The canonical form of a network."""
    return canonical_form(weights_of(model), symmetries_of(model, **options))


def outside(model, **options):
    """The symmetries outside pairs."""
    return replace(symmetries_of(model, **options), pairs=())


def by_kind(values):
    """The largest value of every kind of symmetry; NaN counts as the largest."""
    found = {}
    for s, value in values.items():
        known = found.get(s.kind, 0.0)
        found[s.kind] = known if value <= known else value
    return found


def count(model, **options):
    """The dimensions of all symmetries of a network, by kind."""
    return symmetries_of(model, **options).dimensions


def random_move(cell, generator):
    """An order of the units of a cell, and of the queries in each."""
    sizes = ((cell.units,), (cell.units, cell.queries))
    return Move(*(torch.rand(size, generator=generator).argsort() for size in sizes))


@torch.no_grad()
def random_element(model, seed=0):
    """Permutations of heads, queries, neurons, and entries of the stream, under RMSNorm with signs."""
    form, generator, stream = Form(model), torch.Generator().manual_seed(seed), None
    if form.vectors:
        d = form.vectors[0].size[1]
        scores = torch.randn(d, d, generator=generator, dtype=torch.float64)
        stream = permutation(scores, torch.zeros_like(scores), signs=not form.centring)
    return Element(stream, {c.name: random_move(c, generator) for c in form.cells if c.units})


def loss(model, batch):
    """A cross-entropy whose labels are fixed."""
    scores = forward(model, batch).flatten(0, -2)
    return F.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[-1])

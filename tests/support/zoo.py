"""Tiny random models of whatever the libraries can build from a configuration alone, with a batch for each."""

import inspect

import torch

from tests.support import architectures, networks

#: What makes a configuration of transformers small, wherever it has such an entry and a larger value.
_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "moe_intermediate_size", "encoder_ffn_dim",
                     "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts",
                     "num_experts_per_tok"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": 40, "entity_vocab_size": 40, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Entries that a type needs besides.
_OWN = {
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "segformer": {"image_size": 64, "sr_ratios": [2, 2, 1, 1]},
    "gptj": {"rotary_dim": 4},
    "qwen3_next": {"layer_types": ["full_attention", "full_attention"]},
    "deepseek_v3": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 12,
                    "q_lora_rank": 10, "head_dim": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
                    "first_k_dense_replace": 2},
    "deepseek_v2": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 12,
                    "q_lora_rank": None, "head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2},
    "jamba": {"mamba_d_state": 3, "mamba_dt_rank": 2, "use_mamba_kernels": False, "num_experts": 1},
    "cvt": {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 3, "attn_layer_indices": [1],
              "mamba_n_groups": 1},
}  # fmt: skip
#: Layers small enough for the Jacobian of all their weights.
LAYERS = {
    "deepseek_v2": {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 2,
                    "qk_rope_head_dim": 2, "v_head_dim": 2, "kv_lora_rank": 4, "head_dim": 2},
    "deepseek_v3": {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 2,
                    "qk_rope_head_dim": 2, "v_head_dim": 2, "kv_lora_rank": 3, "q_lora_rank": 2, "head_dim": 2,
                    "qk_head_dim": 4},
    "jamba": {"hidden_size": 4, "mamba_expand": 2, "mamba_d_state": 2, "mamba_dt_rank": 2, "mamba_d_conv": 2},
}  # fmt: skip
_IDS = torch.arange(16).reshape(2, 8) * 7 % 37 + 3


def _shrunk(config, given):
    for key, value in {**_SMALL, **_TOKENS}.items():
        old = getattr(config, key, None) if key in vars(config) or key in config.attribute_map else None
        small = isinstance(old, int) and not isinstance(old, bool) and old > value
        if (key in _TOKENS and key in vars(config)) or small:
            setattr(config, key, value)
    for key, value in list(vars(config).items()):
        if hasattr(value, "attribute_map"):
            _shrunk(value, {})
        if key == "layer_types" and isinstance(value, list):
            setattr(config, key, value[:2])
    for key, value in given.items():
        setattr(config, key, value)
    return config


def _batch(model, config):
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        return {"input_ids": _IDS, **({"decoder_input_ids": _IDS[:, :5]} if "decoder_input_ids" in names else {}),
                **({"pixel_values": torch.randn(2, 3, 32, 32)} if type(config).__name__ == "ViltConfig" else {}),
                "use_cache": False}  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    if "pixel_values" in names:
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(config, "num_channels", 3) or 3
        return {"pixel_values": torch.randn(2, channels, size, size, generator=generator)}
    return {"input_values": torch.randn(2, 2000, generator=generator)}


def transformers_model(name, **given):
    """A tiny model of a type of transformers, in float64, and a batch for it."""
    import transformers

    if name in architectures.TRANSFORMERS:
        return architectures.transformers_model(name, "eager")
    config = _shrunk(transformers.CONFIG_MAPPING[name](), {**_OWN.get(name, {}), **given})
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager", experts_implementation="eager")
    batch = _batch(model, config)
    known = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    batch = {k: v for k, v in batch.items() if k != "use_cache" or takes_all or k in known}
    batch = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    return networks.shake(model.double(), 0.2), batch


#: Sizes that classes of timm take by other names than most, those of the image among them.
_TIMM = {
    "pit_ti_224": {"img_size": 64, "base_dims": (8, 8, 8), "heads": (1, 2, 2), "depth": (1, 1, 1)},
    "tnt_s_legacy_patch16_224": {"img_size": 32, "embed_dim": 32, "inner_dim": 8, "depth": 1, "num_heads_inner": 2,
                                 "num_heads_outer": 4},
    "crossvit_tiny_240": {"img_size": 240, "embed_dim": (16, 32), "num_heads": (2, 2), "depth": ((1, 1, 0),)},
}  # fmt: skip


def timm_model(name):
    """A tiny model of timm, as far as its class takes sizes."""
    import timm

    model = None
    windows = {"img_size": 32, "embed_dim": 16, "num_heads": (2, 2), "depths": (1, 1), "window_size": 4}
    usual = {"img_size": 32, "embed_dim": 32, "num_heads": 4, "depth": 2}
    for options in (_TIMM[name],) if name in _TIMM else (usual, windows, {"img_size": 32}, {}):
        try:
            model = timm.create_model(name, pretrained=False, num_classes=3, **options)
            break
        except (TypeError, ValueError, AssertionError, RuntimeError):
            continue
    assert model is not None
    size = options.get("img_size", model.default_cfg["input_size"][-1])
    return networks.shake(model.double(), 0.05), torch.randn(1, 3, size, size)


#: Forms of open_clip's towers, by the options that make them.
OPEN_CLIP = {
    "default": {}, "custom": {"block_type": "custom"}, "qk_norm": {"qk_norm": True},
    "scale_attn_inner": {"scale_attn_inner": True}, "scale_heads": {"scale_heads": True},
    "scale_attn": {"scale_attn": True}, "scaled_cosine_attn": {"scaled_cosine_attn": True},
    "attentional_pool": {"attentional_pool": True, "attn_pooler_queries": 3, "attn_pooler_heads": 4},
    "resnet": {"layers": (1, 1, 1, 1), "width": 8, "head_width": 8, "image_size": 64},
    "layer_scale": {"ls_init_value": 0.1},
}  # fmt: skip


def open_clip_model(name):
    """A tiny CLIP of open_clip."""
    return coca() if name == "coca" else architectures.open_clip_model(**OPEN_CLIP[name])


def coca():
    """A captioner: text attends to what a pooler makes of the image."""
    from open_clip import CoCa

    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16, "output_tokens": True,
              "attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 4}  # fmt: skip
    text = {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1, "embed_cls": True}
    model = CoCa(16, {**text, "embed_cls": False, "context_length": 5}, {**text, "output_tokens": True}, vision)
    torch.nn.init.normal_(model.text_decoder.text_projection, std=0.2)  # open_clip leaves it as memory was
    batch = {"image": architectures.pixels()["pixel_values"].double(), "text": architectures.IDS["input_ids"]}
    return networks.shake(model.double(), 0.2), batch


class Attend(torch.nn.Module):
    """A layer of torch, with what its call takes besides its input."""

    def __init__(self, layer, *memory, **named):
        super().__init__()
        self.layer, self.memory, self.named = layer, memory, named

    def forward(self, x):
        memory = self.memory or (x,)
        if isinstance(self.layer, torch.nn.MultiheadAttention):
            return self.layer(x, memory[0], memory[-1], **self.named)
        return self.layer(x, *self.memory, **self.named)


def _attention(heads=4, *memory, call=None, **options):
    options.setdefault("batch_first", True)
    return Attend(torch.nn.MultiheadAttention(16, heads, **options), *memory, **(call or {}))


def _layer(name, *memory, **options):
    return Attend(getattr(torch.nn, name)(16, 4, dim_feedforward=12, batch_first=True, **options), *memory)


def _given(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


_LATE = torch.ones(6, 6, dtype=torch.bool).triu(1)
#: Forms of ``nn.MultiheadAttention``, of its call, and the layers of torch that contain it.
TORCH = {
    "plain": _attention,
    "no bias": lambda: _attention(bias=False),
    "sequence first": lambda: _attention(batch_first=False),
    "sizes of keys and values": lambda: _attention(4, _given(2, 5, 6), _given(2, 5, 10), kdim=6, vdim=10),
    "sizes, no bias": lambda: _attention(4, _given(2, 5, 6), _given(2, 5, 10), kdim=6, vdim=10, bias=False),
    "bias_k and bias_v": lambda: _attention(add_bias_kv=True),
    "sizes, bias_k and bias_v": lambda: _attention(4, _given(2, 5, 6), kdim=6, vdim=6, add_bias_kv=True),
    "zero attention": lambda: _attention(add_zero_attn=True),
    "no weights": lambda: _attention(call={"need_weights": False}),
    "weights of every head": lambda: _attention(call={"average_attn_weights": False}),
    "padded keys": lambda: _attention(call={"key_padding_mask": torch.arange(6).repeat(2, 1) > 3}),
    "mask": lambda: _attention(call={"attn_mask": _LATE}),
    "mask of numbers": lambda: _attention(call={"attn_mask": _given(8, 6, 6)}),
    "causal": lambda: _attention(call={"attn_mask": _LATE, "is_causal": True, "need_weights": False}),
    "cross-attention": lambda: _attention(4, _given(2, 5, 16)),
    "one head": lambda: _attention(1),
    "heads of one dimension": lambda: _attention(16),
    "encoder layer": lambda: _layer("TransformerEncoderLayer"),
    "encoder layer, norm first": lambda: _layer("TransformerEncoderLayer", norm_first=True),
    "decoder layer": lambda: _layer("TransformerDecoderLayer", _given(2, 5, 16)),
    "transformer": lambda: _layer("Transformer", _given(2, 5, 16), num_encoder_layers=1, num_decoder_layers=1),
}  # fmt: skip


def torch_model(name):
    """A form of ``nn.MultiheadAttention`` of width 16, and a batch for it."""
    return networks.shake(TORCH[name]().double(), 0.2), _given(2, 6, 16)


MODELS = {"transformers": transformers_model, "timm": timm_model, "open_clip": open_clip_model,
          "torch": torch_model}  # fmt: skip

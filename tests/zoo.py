"""Tiny random models of whatever the libraries can build from a configuration alone, with a batch for each."""

import inspect

import torch

from . import architectures, networks

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
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 3, "attn_layer_indices": [1],
              "mamba_n_groups": 1},
}  # fmt: skip
#: Layers small enough for the Jacobian of all their weights.
LAYERS = {
    "deepseek_v2": {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 2,
                    "qk_rope_head_dim": 2, "v_head_dim": 2, "kv_lora_rank": 4, "head_dim": 2},
    "deepseek_v3": {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 2,
                    "qk_rope_head_dim": 2, "v_head_dim": 2, "kv_lora_rank": 3, "q_lora_rank": 2, "head_dim": 2},
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


def timm_model(name):
    """A tiny model of timm, as far as its class takes sizes."""
    import timm

    model = None
    windows = {"img_size": 32, "embed_dim": 16, "num_heads": (2, 2), "depths": (1, 1), "window_size": 4}
    for options in ({"img_size": 32, "embed_dim": 32, "num_heads": 4, "depth": 2}, windows, {"img_size": 32}, {}):
        try:
            model = timm.create_model(name, pretrained=False, num_classes=3, **options)
            break
        except (TypeError, ValueError, AssertionError, RuntimeError):
            continue
    assert model is not None
    size = model.default_cfg["input_size"][-1] if not options else 32
    return networks.shake(model.double(), 0.05), torch.randn(1, 3, size, size)


#: Forms of open_clip's towers, by the options that make them.
OPEN_CLIP = {
    "default": {}, "custom": {"block_type": "custom"}, "qk_norm": {"qk_norm": True},
    "scale_attn_inner": {"scale_attn_inner": True}, "scale_heads": {"scale_heads": True},
}  # fmt: skip


def open_clip_model(name):
    """A tiny CLIP of open_clip."""
    return architectures.open_clip_model(**OPEN_CLIP[name])


MODELS = {"transformers": transformers_model, "timm": timm_model, "open_clip": open_clip_model}

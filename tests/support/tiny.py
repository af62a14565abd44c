"""A tiny random model, and a batch for it, of every type of transformers that can be made small by rules."""

import csv
import importlib
import inspect
import re
from pathlib import Path

import torch

from quotient_manifolds.passes import default_forward, floats, widened
from tests.support import networks, zoo

#: Largest number of weights: what rules do not make smaller is left out.
LARGEST = 6_000_000
#: Entries of a configuration by their names: the first pattern that matches; a larger number becomes this one.
_RULES = [(re.compile(pattern), value) for pattern, value in (
    (r"(^|_)(head_dim|head_size|kv_channels|d_kv|d_head|attention_head_dim|key_length|dim_head|v_head_dim)$", 8),
    (r"_per_tok|^top_?k|topk|n_group$|^num_experts_per|moe_k$", 2),
    (r"(key_value_heads|kv_heads|num_kv|n_kv|query_groups|num_ln_in_k|k_heads)", 2),
    (r"heads?$|num_head|attention_heads", 4),
    (r"(experts|num_codebooks|n_codes_given|num_nextn)", 4),
    (r"(layers?|blocks?|depth|num_stacks|n_layer|hidden_layers)$", 2),
    (r"n_embd|n_embed$", 32),
    (r"vocab|codebook_size|num_embeddings|n_codes", 64),
    (r"position|max_len|max_seq|seq_len|context_length|n_ctx|max_source|max_target", 64),
    (r"image_size|img_size|input_size$|crop_size", 32),
    (r"patch_size$", 8),
    (r"num_(queries|query|latents|labels|proposals)|query_length|n_latents", 6),
    (r"intermediate|ffn|d_ff|dim_ff|feedforward|mlp_dim|inner|ff_dim|d_mlp", 32),
    (r"(hidden|embed|embedding|model|width|projection|channels|features?|proj)(_(dim|size|features|channels))?s?$", 32),
    (r"(^|_)(dim|rank|size|channels|width|state)s?$", 32),
    (r"lora_rank", 16),
    (r"_units$", 32),
)]  # fmt: skip
#: Entries that stay as they are, because others must fit them.
_KEPT = re.compile(
    "kernel|stride|window|num_channels|in_channels|mel|fft|hop|sampl|scale_factor|_token|ratio|ids?$|temporal|rope_theta|"
    "index$|dilation|groups?$|downsample|rate$|spatial_merge|beams|max_length|min_length|num_frames|tubelet|expand|chunk|"
    "block_size|num_buckets|type_vocab|norm_num"
)
#: Entries of latent attention, whose heads all have keys of their own.
_LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4, "num_key_value_heads": 4,
           "index_head_dim": 8, "index_topk": 4}  # fmt: skip
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_ssm": 64}


def _small(key, value):
    """Give the value of one entry of a small configuration."""
    if isinstance(value, bool) or _KEPT.search(key):
        return value
    number = next((n for pattern, n in _RULES if pattern.search(key)), None)
    if number is None:
        return value
    if isinstance(value, int):
        return min(value, number)
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return type(value)(min(v, number) for v in value)
    return value


def _shrunk(config, own):
    """Make a configuration and its parts small, where they stand."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "attribute_map"):
            _shrunk(value, own.get(key, {}))
        elif not key.startswith("_"):
            setattr(config, key, _small(key, value))
    if "kv_lora_rank" in vars(config):  # latent attention
        for key, value in _LATENT.items():
            if isinstance(vars(config).get(key), int):
                setattr(config, key, value)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and ("mrope_section" in rope or config.model_type.startswith("glm")):
        total = int(8 * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [total - 2 * (total // 3), total // 3, total // 3]
    for key in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_types"):
        value = vars(config).get(key)
        if isinstance(value, list):
            setattr(config, key, value[:2])
    for key, value in zoo._TOKENS.items():
        if key in vars(config):
            setattr(config, key, value)
    for key, value in own.items():
        if not hasattr(getattr(config, key, None), "attribute_map"):
            setattr(config, key, value)
    return config


def types():
    """List the types of transformers."""
    import transformers

    return sorted(transformers.CONFIG_MAPPING.keys())


def _class(kind, config):
    """Choose the model of a configuration: that of AutoModel, or one of its file."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if kind in MODEL_MAPPING_NAMES:
        found = MODEL_MAPPING_NAMES[kind]
        return getattr(transformers, found if isinstance(found, str) else found[0])
    name = type(config).__module__.replace("configuration_", "modeling_")
    file = importlib.import_module(name)
    classes = [c for c in vars(file).values() if inspect.isclass(c) and issubclass(c, transformers.PreTrainedModel)]
    found = [c for c in classes if c.config_class is type(config) and not c.__name__.endswith("PreTrainedModel")]
    if not found:
        raise LookupError("no model of this configuration")
    return min(found, key=lambda c: (not c.__name__.endswith("Model"), len(c.__name__)))


#: Entries that rules do not make right; those of parts by the part's name.
OWN = {
    **{name: own for name, own in zoo._OWN.items() if name != "segformer"},
    "bit": {"num_groups": 4}, "bridgetower_vision_model": {"num_attention_heads": 4},
    "donut-swin": zoo._OWN["swin"], "maskformer-swin": zoo._OWN["swin"],
    "dots1": {"n_routed_experts": 4}, "esm": {"vocab_size": 33},
    "codegen": {"rotary_dim": 4},
    "diffusion_gemma_text": {"num_experts": 4, "moe_intermediate_size": 16, "top_k_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8}, "hunyuan_vl_text": {"head_dim": 8},
    "ministral": {"head_dim": 8}, "kyutai_speech_to_text": {"audio_pad_token_id": 0},
    "granitemoehybrid": _STATES, "falcon_h1": _STATES,
    "parakeet_encoder": {"num_key_value_heads": 4, "subsampling_conv_channels": 32},
    "audio-spectrogram-transformer": {"max_length": 64},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
}  # fmt: skip


def configuration(kind):
    """Make a small configuration."""
    import transformers

    return _shrunk(transformers.CONFIG_MAPPING[kind](), OWN.get(kind, {}))


def _numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _entry(config, name):
    """Find an entry in a configuration or in its parts, those for images and sound first."""
    found = getattr(config, name, None)
    if found is not None and not hasattr(found, "attribute_map"):
        return found
    parts = [v for v in vars(config).values() if hasattr(v, "attribute_map")]
    return next((f for p in parts if (f := _entry(p, name)) is not None), None)


def batches(model, config):
    """List possible batches, the simplest first; the first that the model takes is used."""
    names = inspect.signature(model.forward).parameters
    size, channels = _entry(config, "image_size") or 32, _entry(config, "num_channels") or 3
    size = size if isinstance(size, int) else size[0]
    names_of_mel = ("num_mel_bins", "input_feat_per_channel", "feature_size")
    mel = next((n for n in (_entry(config, name) for name in names_of_mel) if n), 80)
    length = 2 * (_entry(config, "max_source_positions") or 32)
    frames_of_sound = _entry(config, "max_length") or 1024
    ids = zoo._IDS % 30 + 3
    width = _entry(config, "hidden_size") or 32
    patch, frames = _entry(config, "patch_size") or 8, _entry(config, "temporal_patch_size") or 1
    patch = channels * (patch if isinstance(patch, int) else patch[0]) ** 2
    text = {"input_ids": ids}
    boxes = {"bbox": torch.tensor([1, 2, 5, 7]).expand(2, 8, 4).clone()}
    images = {"pixel_values": _numbers(2, channels, size, size)}
    late = {"decoder_input_ids": ids[:, :5]}
    candidates = [
        text, {**text, **late}, {**text, **boxes}, {**text, **boxes, **late}, {**text, **images}, images,
        {"pixel_values": _numbers(2, channels, 64, 64)}, {"pixel_values": _numbers(2, channels, 224, 224)},
        {"pixel_values": _numbers(2, 2, channels, size, size)}, {**images, **late},
        *({"input_features": _numbers(2, *shape), **more} for more in ({}, late)
          for shape in ((mel, length), (length, mel), (mel, 3000), (1, 1024, mel))),
        {"input_values": _numbers(2, 2000)}, {"input_values": _numbers(2, 2000), **late},
        {"input_values": _numbers(2, 1, 2000)}, {"input_values": _numbers(2, frames_of_sound, mel)},
        {"inputs_embeds": _numbers(2, 8, width)}, {"hidden_states": _numbers(2, 8, width)},
        {"input_ids": ids[..., None].expand(2, 8, _entry(config, "num_codebooks") or 4)},
        {"pixel_values": _numbers(2, channels, 384, 384)},
        *({name: _numbers(16, n), "grid_thw": torch.tensor([[1, 4, 4]])}
          for name in ("pixel_values", "hidden_states") for n in (patch, patch * frames, width)),
    ]  # fmt: skip
    for batch in candidates:
        if all(key in names for key in batch):
            yield {**batch, **({"use_cache": False} if "use_cache" in names else {})}
            yield batch


def _checked(model):
    """Return a model that is small enough."""
    size = sum(p.numel() for p in model.parameters())
    if size > LARGEST:
        raise OverflowError(f"{size} weights")
    return model


def transformers_model(kind):
    """Build a tiny model of a type, in float64, with a batch that it takes."""
    cls, config = _class(kind, configuration(kind)), configuration(kind)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        _checked(cls(config))
    torch.manual_seed(0)
    config = configuration(kind)
    config._attn_implementation = config._experts_implementation = "eager"
    model = networks.shake(cls(config), 0.05)
    errors = []
    for batch in batches(model, config):
        try:
            with torch.no_grad():
                outputs = floats(default_forward(model, batch))
            if outputs and all(bool((t == t).all()) for t in outputs):
                return model.double(), widened(batch)
            errors.append("no finite output")
        except Exception as error:  # whatever third-party code raises
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0][:120])
    raise LookupError(
        f"no batch: {list(dict.fromkeys(errors))[:6]}; takes {[*inspect.signature(model.forward).parameters]}"
    )


def timm_names():
    """List the models of timm in the table of architectures."""
    with (Path(__file__).parents[2] / "docs/tables/architectures.csv").open(encoding="utf-8") as file:
        return [model for library, model, *_ in csv.reader(file) if library == "timm"]


def timm_model(name):
    """Build a tiny model of timm, in float64, and images for it."""
    model, images = zoo.timm_model(name)
    return _checked(model), widened(images)


MODELS = {"transformers": transformers_model, "timm": timm_model, "open_clip": zoo.open_clip_model}
NAMES = {"transformers": types, "timm": timm_names, "open_clip": lambda: [*zoo.OPEN_CLIP, "coca"]}


def warm():
    """Import what every model needs, before processes are forked."""
    zoo.open_clip_model("default")
    timm_model("vit_tiny_patch16_224")
    for kind in ("bert", "vit", "llama"):
        transformers_model(kind)

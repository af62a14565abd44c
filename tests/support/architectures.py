"""A tiny random model of every architecture whose symmetries ``find`` knows, with a batch for it."""

import copy
import dataclasses

import torch

from quotient_manifolds.symmetries import find, move_
from tests.support import networks

IDS = {"input_ids": torch.arange(12).reshape(2, 6) % 20}
MEMORY = {"encoder_hidden_states": torch.ones(2, 3, 16).cumsum(1)}
SOUND = {"input_features": torch.linspace(-1, 1, 640).reshape(1, 8, 80).sin()}


def pixels(size=16, channels=3):
    return {"pixel_values": torch.linspace(-1, 1, 2 * channels * size * size).reshape(2, channels, size, size).sin()}


def hf(model, config, batch, **options):
    """A transformers model by the names of its class and its configuration's."""

    def make(attention):
        import transformers

        settings = getattr(transformers, config)(**options)
        settings._attn_implementation = attention
        return getattr(transformers, model)(settings)

    return make, batch


ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**ENCODER, "vocab_size": 20, "max_position_embeddings": 32}
VISION = {**ENCODER, "image_size": 16, "patch_size": 8}
LLAMA = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}  # fmt: skip
BOTH = {**IDS, "decoder_input_ids": IDS["input_ids"][:, :4]}
NO_SDPA = {"deberta_v2", "deberta_v2-shared", "mpnet", "bloom", "gptj", "gemma2"}

TRANSFORMERS = {
    "bert": hf("BertModel", "BertConfig", IDS, **TEXT),
    "bert-decoder": hf("BertLMHeadModel", "BertConfig", {**IDS, **MEMORY},
                       **TEXT, is_decoder=True, add_cross_attention=True),
    "roberta": hf("RobertaModel", "RobertaConfig", IDS, **TEXT),
    "electra": hf("ElectraModel", "ElectraConfig", IDS, **TEXT, embedding_size=8),
    "distilbert": hf("DistilBertModel", "DistilBertConfig", IDS, dim=16, n_layers=2, n_heads=2, hidden_dim=24,
                     vocab_size=20),
    "albert": hf("AlbertModel", "AlbertConfig", IDS, **TEXT, embedding_size=8),
    "mpnet": hf("MPNetModel", "MPNetConfig", IDS, **TEXT),
    "deberta_v2": hf("DebertaV2Model", "DebertaV2Config", IDS, **TEXT, relative_attention=True,
                     pos_att_type=["c2p", "p2c"], max_relative_positions=8),
    "deberta_v2-shared": hf("DebertaV2Model", "DebertaV2Config", IDS, **TEXT, relative_attention=True,
                            pos_att_type=["c2p", "p2c"], max_relative_positions=8, share_att_key=True),
    "t5": hf("T5Model", "T5Config", BOTH, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=3, vocab_size=20),
    "bart": hf("BartModel", "BartConfig", BOTH, **SEQ2SEQ, vocab_size=20, max_position_embeddings=32),
    "opt": hf("OPTModel", "OPTConfig", IDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24,
              vocab_size=20, max_position_embeddings=32, word_embed_proj_dim=16),
    "clip": hf("CLIPModel", "CLIPConfig", {**IDS, **pixels()}, text_config={**TEXT, "eos_token_id": 11},
               vision_config=VISION, projection_dim=8),
    "whisper": hf("WhisperModel", "WhisperConfig", {**SOUND, "decoder_input_ids": IDS["input_ids"][:1]},
                  **SEQ2SEQ, vocab_size=20, num_mel_bins=8, max_source_positions=40, max_target_positions=16,
                  pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    "gpt2": hf("GPT2Model", "GPT2Config", IDS, n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=32),
    "gpt2-cross": hf("GPT2Model", "GPT2Config", {**IDS, **MEMORY},
                     n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=32, add_cross_attention=True),
    "bloom": hf("BloomModel", "BloomConfig", IDS, hidden_size=16, n_layer=2, n_head=2, vocab_size=20),
    "gpt_neox": hf("GPTNeoXModel", "GPTNeoXConfig", IDS, **TEXT, rotary_pct=0.5),
    "gptj": hf("GPTJModel", "GPTJConfig", IDS, n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=32,
               rotary_dim=4),
    "llama": hf("LlamaModel", "LlamaConfig", IDS, **LLAMA, attention_bias=True),
    "mistral": hf("MistralModel", "MistralConfig", IDS, **LLAMA),
    "qwen2": hf("Qwen2Model", "Qwen2Config", IDS, **LLAMA),
    "qwen3": hf("Qwen3Model", "Qwen3Config", IDS, **LLAMA, head_dim=4),
    "gemma2": hf("Gemma2Model", "Gemma2Config", IDS, **LLAMA, head_dim=4),
    "gemma3": hf("Gemma3TextModel", "Gemma3TextConfig", IDS, **LLAMA, head_dim=4),
    "phi3": hf("Phi3Model", "Phi3Config", IDS, **LLAMA),
    "phi3-partial": hf("Phi3Model", "Phi3Config", IDS, **{**LLAMA, "hidden_size": 32}, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "vit": hf("ViTModel", "ViTConfig", pixels(), **VISION),
    "deit": hf("DeiTModel", "DeiTConfig", pixels(), **VISION),
    "swin": hf("SwinModel", "SwinConfig", pixels(32), image_size=32, patch_size=4, embed_dim=8, depths=[1, 1],
               num_heads=[2, 2], window_size=4),
    "dinov2": hf("Dinov2Model", "Dinov2Config", pixels(), **VISION),
    "beit": hf("BeitModel", "BeitConfig", pixels(), **VISION),
}  # fmt: skip

#: Models that compute in float32 inside, whatever their dtype: RMSNorm, eager softmax, rotary embeddings.
SINGLE = 1e-6


def transformers_model(name, attention):
    make, batch = TRANSFORMERS[name]
    model = networks.shake(make(attention).double(), 0.2)
    return model, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def open_clip_model(**options):
    import open_clip

    tower = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16, "mlp_ratio": 1.5, **options}
    text = {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(8, tower, text)
    images = pixels(tower["image_size"])["pixel_values"].double()
    return networks.shake(model.double(), 0.2), {"image": images, "text": IDS["input_ids"]}


def timm_model(name, **options):
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=3, **options)
    return networks.shake(model.double(), 0.2)


def adapted(base, targets, **options):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        base, LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **options)
    )
    for p in model.parameters():
        p.data = p.data.double()
    return model.eval()


def bert_and_batch():
    return transformers_model("bert", "eager")


def gpt2_and_batch():
    return transformers_model("gpt2", "eager")


def change(model, run, condition=10.0):
    """Relative change of the outputs when every pair moves along its orbit."""
    twin = copy.deepcopy(model)
    assert sum(move_(twin, condition=condition, seed=1).values()) == len(find(model).of_full_rank().pairs)
    with torch.no_grad():
        before, after = run(model), run(twin)
    moved = max((p - q).abs().max() for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert moved > 0.1
    return float((after - before).abs().max() / before.abs().max())


def without_first_row(p):
    """One row of G forgotten: a bias, or an input."""
    first = p.G[-1]
    if first.size[0] > 1:
        smaller = dataclasses.replace(
            first, offset=first.offset + first.stride[0], size=(first.size[0] - 1, *first.size[1:])
        )
        return dataclasses.replace(p, G=(*p.G[:-1], smaller))
    return dataclasses.replace(p, G=p.G[:-1])

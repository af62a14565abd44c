import timm
import torch
from torch import nn

from quotient_manifolds.symmetries.whole import canonicalize_, count, verify_whole, wiring_of
from tests import architectures
from tests.whole_networks import TIMM, build


def test_layer_scale_and_blind_keys():
    found = count(build("beit"))
    assert found["layer scale"] == 2 * 2 * 8
    assert "key bias" not in found  # keys have none


def test_an_open_clip_tower():
    import open_clip

    tower = {"layers": 1, "width": 8, "head_width": 4, "patch_size": 4, "image_size": 8}
    text = {"context_length": 6, "vocab_size": 11, "width": 8, "heads": 2, "layers": 1}
    model = open_clip.CLIP(embed_dim=5, vision_cfg=tower, text_cfg=text).visual.eval().double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = model(x)
    form = canonicalize_(model)
    torch.testing.assert_close(model(x), before, rtol=1e-11, atol=1e-11)
    assert {"gain", "shift", "writer", "embeddings"} <= set(form.dimensions)


def test_both_towers_of_open_clip():
    model, batch = architectures.open_clip_model()
    report = verify_whole(model, batch, forward=lambda m, b: m.encode_image(b["image"]))
    texts = verify_whole(model, batch, forward=lambda m, b: m.encode_text(b["text"]))
    for found in (report, texts):
        assert found.ok, found
        assert {"gain", "shift", "reader", "writer", "embeddings", "value bias"} <= set(found.changes)
    assert count(model)["gain"] == count(model.visual)["gain"] + 3 * 16
    odd, _ = architectures.open_clip_model(final_ln_after_pool=True)
    assert not wiring_of(odd).sites


def test_swiglu_of_dinov2():
    from transformers import Dinov2Config, Dinov2ForImageClassification

    options = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "use_swiglu_ffn": True}
    model = Dinov2ForImageClassification(Dinov2Config(**options, image_size=8, patch_size=4, num_channels=1)).double()
    assert "glu" in count(model)


def test_unusual_blocks_are_left_to_their_heads():
    for odd in ({"final_norm": False}, {"embed_norm_layer": nn.LayerNorm}):
        assert not wiring_of(timm.create_model("vit_tiny_patch16_224", **TIMM, **odd)).sites
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    layer.self_attn.add_zero_attn = True  # weights that do not sum to 1
    assert "value bias" not in count(nn.TransformerEncoder(layer, 1))
    options = {"batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(8, 2, 12, **options).double().eval()
    layer.self_attn = nn.MultiheadAttention(8, 2, bias=False, batch_first=True, add_zero_attn=True).double()
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with torch.no_grad():
        encoder.layers[0].norm1.bias += 1
    assert "key bias" not in count(encoder)  # a number added to all keys but the one that is zero
    assert verify_whole(encoder, torch.randn(2, 3, 8)).ok
    assert not wiring_of(timm.create_model("vit_tiny_patch16_224", **TIMM, qk_norm=True)).sites
    assert wiring_of(timm.create_model("vit_tiny_patch16_224", **TIMM)).sites


def test_encoders_on_their_own():
    assert "writer" in count(build("torch-post"))
    assert "rotation" not in count(build("torch-pre"))

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from quotient_manifolds.symmetries.whole import (
    State,
    Wiring,
    canonical_form,
    canonicalize_,
    verify_whole,
    wiring_of,
)
from quotient_manifolds.symmetries.whole.layout import Layout, Sublayer, affine, has, table, wire
from tests import architectures
from tests.extent import EXHAUSTIVE
from tests.whole_networks import BACKBONES, TIMM, TRANSFORMERS, build, count, headed, heads

NETWORKS = [(f, n) for f, (*_, usual) in BACKBONES.items() for n in (heads(f) if EXHAUSTIVE else [usual])]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)
        self.norm2, self.gate, self.up2 = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(4, 6)
        self.down2 = nn.Linear(6, 4)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions, self.projection = nn.Embedding(5, 4), nn.Embedding(7, 4), nn.Linear(2, 4)
        self.blocks, self.last = nn.ModuleList([Layer(), Layer()]), nn.LayerNorm(4)


LAYOUT = Layout(
    "blocks",
    Sublayer("norm", "up", "none|down", "blocks.0.act"),
    Sublayer("norm2", "gates none|gate up2", "down2", "|glu"),
    "last",
    "words + positions[:5]",
)


def test_a_stack_before_and_after_norms():
    model, head = Stack(), affine(nn.ModuleDict({"head": nn.Linear(4, 3)}), "head")
    before = wire(Wiring(), model, LAYOUT, [head])
    names = [f"blocks.{i}.{norm}" for i in range(2) for norm in ("norm", "norm2")]
    readers = [layer for block in model.blocks for layer in (block.up, block.gate)]
    assert [(s.name, s.readers[0].matrix.module) for s in before.sites] == [
        *zip(names, readers, strict=True), ("last", head.matrix.module),
    ]  # fmt: skip
    writers = [layer for block in model.blocks for layer in (block.down, block.down2)]
    assert [w.matrix.module for _, w in before.writers] == writers
    assert [(n.kind, n.G[0].module) for n in before.neurons[:2]] == [
        ("relu", model.blocks[0].up), ("glu", model.blocks[0].up2),
    ]  # fmt: skip
    after = wire(Wiring(), model, replace(LAYOUT, post_norm=True), [head])
    norms = [model.last, *(n for b in model.blocks for n in (b.norm, b.norm2))]
    assert [s.norm.gain.module for s in after.sites] == norms
    assert [s.readers[0].matrix.module for s in after.sites] == [*readers, head.matrix.module]
    assert [s.carried and s.carried.matrix.module for s in after.sites] == [*writers, None]


def test_what_is_in_the_stream_before_the_layers():
    model = Stack()
    w = wire(Wiring(), model, LAYOUT, [])
    assert [(name, rows.module, rows.size) for name, rows in w.tables] == [
        ("words", model.words, (5, 4)), ("positions", model.positions, (5, 4)),
    ]  # fmt: skip
    ((name, source, (target,)),) = w.common
    assert (name, source.module, target.module) == ("positions[:5]", model.positions, model.words)
    optional = wire(
        Wiring(), model, replace(LAYOUT, embeddings="none?[1:] + words, projection + positions[1:2,3:4]"), []
    )
    assert [(name, rows.size) for name, rows in optional.tables] == [("words", (5, 4)), ("positions", (3, 4))]
    assert optional.writers[0][1].matrix.tensor is model.projection.weight
    assert [(b.tensor is model.projection.bias, rows.offset) for _, rows, (b,) in optional.common] == [
        (True, 4), (True, 12),
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="has none of none"):
        wire(Wiring(), model, replace(LAYOUT, embeddings="none"), [])


def test_names():
    model = Stack()
    assert [State().read(rows).shape for rows in table(model, "words[1:3,-1:]")] == [(2, 4), (1, 4)]
    assert affine(model.blocks[0], "down").matrix.tensor is model.blocks[0].down.weight
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    assert affine(attention, "attn").matrix.tensor is attention["attn"].in_proj_weight
    bare = nn.ParameterDict({"proj": nn.Parameter(torch.zeros(4, 3))})
    assert State().read(affine(bare, "proj").matrix).shape == (3, 4)
    assert has(model.blocks[0], "none|down")
    assert not has(model, "none|blocks.5")
    with pytest.raises(AttributeError, match="has none of"):
        affine(model, "a|b")


@pytest.mark.parametrize("family", [f for f in TRANSFORMERS if f not in ("vit", "deit", "dinov2", "beit", "clip")])
def test_every_parameter_has_a_place(family):
    """Nothing of a network is left out: each matrix reads, writes, or is a table or part of a head."""
    model = build(family)
    wiring = wiring_of(model)
    known = {p for s in wiring.sites for r in s.readers for b in (*s.norm.blocks, *r.blocks) for p in [b.tensor]}
    known |= {b.tensor for _, w in wiring.writers for b in w.blocks} | {rows.tensor for _, rows in wiring.tables}
    known |= {b.tensor for _, c in wiring.classifiers for b in c.blocks}
    known |= {rows.tensor for _, tables in wiring.score_tables for rows in tables}
    known |= {b.tensor for _, q, k in wiring.qk_norms for b in (*q.blocks, *k.blocks)}
    assert not [name for name, p in model.named_parameters() if p not in known]


@pytest.mark.parametrize(("family", "name"), NETWORKS)
def test_a_backbone_is_wired_under_every_head(family, name):
    """Each kind of symmetry, by gradient and by moves: of language models, and towers of images and text."""
    model, batch = headed(family, name)
    assert canonical_form(model).wired
    for classes in (False, *([True] if "labels" in batch else [])):
        report = verify_whole(model, batch, classes=classes)
        assert report.ok, report
        assert "vo" in report.changes
        assert max(report.changes.values()) < 1e-10


def test_what_reads_the_last_norm_is_folded():
    """A backbone alone hands its last norm's output to anybody; below a head gain and shift are found."""
    alone, below = (count(headed("bert", name)[0]) for name in ("BertModel", "BertForTokenClassification"))
    assert below["shift"] - alone["shift"] == below["gain"] == 8
    assert "gain" not in alone
    tied = count(headed("bert", "BertForMaskedLM")[0], classes=True)
    assert (tied["classes"], tied["embeddings"]) == (1, 7)  # the decoder's biases; positions against types


def test_strangers_around_a_backbone_are_left_to_their_heads():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = headed("bert", "BertModel")[0]

    assert wiring_of(Mine()) is None


def test_options_without_an_adapter_are_left_to_the_heads():
    from transformers import BertConfig, BertLMHeadModel, OPTConfig, OPTForCausalLM

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    crossed = BertConfig(**small, intermediate_size=12, is_decoder=True, add_cross_attention=True)
    assert not wiring_of(BertLMHeadModel(crossed)).sites
    config = OPTConfig(**small, ffn_dim=12, word_embed_proj_dim=8, _remove_final_layer_norm=True)
    assert not wiring_of(OPTForCausalLM(config)).sites


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

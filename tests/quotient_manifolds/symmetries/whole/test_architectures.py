from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from quotient_manifolds.symmetries import ALL, canonicalize_, find, verify
from quotient_manifolds.symmetries import architectures as described
from quotient_manifolds.symmetries.layout import affine, has, table, wire
from quotient_manifolds.symmetries.notation import Layout, NamedRows
from quotient_manifolds.symmetries.whole import (
    State,
    Wiring,
    wiring_of,
)
from quotient_manifolds.weights import weights_of
from tests.support import architectures
from tests.support.extent import EXHAUSTIVE, share
from tests.support.whole_networks import (
    BACKBONES,
    TIMM,
    TRANSFORMERS,
    build,
    by_kind,
    count,
    headed,
    heads,
    symmetries_of,
)

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


LAYOUT = Layout().read(
    layers="blocks",
    attention="norm; up; none|down; blocks.0.act",
    mlp="norm2; gates none|gate up2; down2; |glu",
    last="last",
    embeddings="words + positions[:5]",
)


def test_a_stack_before_and_after_norms():
    model, head = Stack(), affine(nn.ModuleDict({"head": nn.Linear(4, 3)}), "head")
    before = wire(Wiring(), model, LAYOUT, [head])
    norms, readers, writers = (
        [f"blocks.{i}.{name}" for i in range(2) for name in names]
        for names in (("norm", "norm2"), ("up", "gate"), ("down", "down2"))
    )
    readers, writers = ([f"{name}.weight" for name in names] for names in (readers, writers))
    assert [(s.name, s.readers[0].matrix.name) for s in before.sites] == [
        *zip(norms, readers, strict=True), ("last", "head.weight"),
    ]  # fmt: skip
    assert [w.matrix.name for _, w in before.writers] == writers
    assert [(n.kind, n.G[0].name) for n in before.neurons[:2]] == [
        ("relu", "blocks.0.up.weight"), ("glu", "blocks.0.up2.weight"),
    ]  # fmt: skip
    after = wire(Wiring(), model, replace(LAYOUT, post_norm=True), [head])
    assert [s.norm.gain.name for s in after.sites] == ["last.weight", *(f"{name}.weight" for name in norms)]
    assert [s.readers[0].matrix.name for s in after.sites] == [*readers, "head.weight"]
    assert [s.carried and s.carried.matrix.name for s in after.sites] == [*writers, None]


def test_a_stack_below_another_module():
    """Names are those of the whole network."""
    model = nn.ModuleDict({"body": Stack(), "head": nn.Linear(4, 3)})
    w = wire(Wiring(), model, LAYOUT, [affine(model, "head")], "deep ", at="body")
    assert [s.name for s in w.sites[:2]] == ["deep blocks.0.norm", "deep blocks.0.norm2"]
    slots = [b for s in w.sites for b in (*s.norm.slots, *(b for r in s.readers for b in r.slots))]
    slots += [b for _, a in w.writers for b in a.slots] + [b for _, b in w.tables] + list(w.neurons[0].slots)
    assert {b.name for b in slots} <= set(weights_of(model))
    assert all(b.shape == weights_of(model)[b.name].shape for b in slots)


def test_what_is_in_the_stream_before_the_layers():
    model = Stack()
    w = wire(Wiring(), model, LAYOUT, [])
    assert [(name, rows.name, rows.size) for name, rows in w.tables] == [
        ("words", "words.weight", (5, 4)), ("positions", "positions.weight", (5, 4)),
    ]  # fmt: skip
    ((name, source, (target,)),) = w.common
    assert (name, source.name, target.name) == ("positions[:5]", "positions.weight", "words.weight")
    optional = wire(Wiring(), model, LAYOUT.read(embeddings="none?[1:] + words, projection + positions[1:2,3:4]"), [])
    assert [(name, rows.size) for name, rows in optional.tables] == [("words", (5, 4)), ("positions", (3, 4))]
    assert optional.writers[0][1].matrix.name == "projection.weight"
    assert [(b.name, rows.offset) for _, rows, (b,) in optional.common] == [
        ("projection.bias", 4), ("projection.bias", 12),
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="has none of none"):
        wire(Wiring(), model, LAYOUT.read(embeddings="none"), [])


def test_names():
    model = Stack()
    assert [rows.read(State(weights_of(model))).shape for rows in table(model, NamedRows.read("words[1:3,-1:]"))] == [
        (2, 4),
        (1, 4),
    ]
    assert affine(model, "blocks.0.down").matrix.name == "blocks.0.down.weight"
    assert affine(model.blocks[0], "down").matrix.name == "down.weight"
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    assert affine(attention, "attn").matrix.name == "attn.in_proj_weight"
    bare = nn.ParameterDict({"proj": nn.Parameter(torch.zeros(4, 3))})
    assert affine(bare, "proj").matrix.read(State(weights_of(bare))).shape == (3, 4)
    assert has(model.blocks[0], "none", "down")
    assert not has(model, "none", "blocks.5")
    with pytest.raises(AttributeError, match="has none of"):
        affine(model, "a", "b")


def test_what_a_model_lacks_is_a_reason_and_what_we_lack_a_defect():
    assert described._known(lambda model: model.blocks)(nn.Linear(2, 2)).reason.endswith("has no attribute 'blocks'")
    with pytest.raises(AttributeError, match="'Wiring' object has no attribute 'sitse'"):
        described._known(lambda model: Wiring().sitse)(nn.Linear(2, 2))


@pytest.mark.parametrize("family", [f for f in TRANSFORMERS if f not in ("vit", "deit", "dinov2", "beit", "clip")])
def test_every_parameter_has_a_place(family):
    """Nothing of a network is left out: each matrix reads, writes, or is a table or part of a head."""
    model = build(family)
    wiring = wiring_of(model)
    slots = [b for s in wiring.sites for r in s.readers for b in (*s.norm.slots, *r.slots)]
    slots += [b for _, w in wiring.writers for b in w.slots] + [rows for _, rows in wiring.tables]
    slots += [b for _, c in wiring.classifiers for b in c.slots]
    slots += [rows for _, tables in wiring.score_tables for rows in tables]
    slots += [b for _, q, k in wiring.qk_norms for b in (*q.slots, *k.slots)]
    assert {b.name for b in slots} == set(weights_of(model))


@pytest.mark.parametrize(("family", "name"), share(NETWORKS, 2))
def test_a_backbone_is_wired_under_every_head(family, name):
    """Each kind of symmetry, by gradient and by moves: of language models, and towers of images and text."""
    model, batch = headed(family, name)
    assert symmetries_of(model).wired
    for classes in (False, *([True] if "labels" in batch else [])):
        report = verify(model, batch, find(model, batch, scope=ALL, classes=classes))
        assert report.ok, report
        assert "vo" in by_kind(report.changes)
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
    found = canonicalize_(model)
    torch.testing.assert_close(model(x), before, rtol=1e-11, atol=1e-11)
    assert {"gain", "shift", "writer", "embeddings"} <= set(found.dimensions)


def test_both_towers_of_open_clip():
    model, batch = architectures.open_clip_model()
    for forward in (lambda m, b: m.encode_image(b["image"]), lambda m, b: m.encode_text(b["text"])):
        found = verify(model, batch, symmetries_of(model), forward=forward)
        assert found.ok, found
        assert {"gain", "shift", "reader", "writer", "embeddings", "value bias"} <= set(by_kind(found.changes))
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
    assert verify(encoder, torch.randn(2, 3, 8), symmetries_of(encoder)).ok
    assert not wiring_of(timm.create_model("vit_tiny_patch16_224", **TIMM, qk_norm=True)).sites
    assert wiring_of(timm.create_model("vit_tiny_patch16_224", **TIMM)).sites


def test_encoders_on_their_own():
    assert "writer" in count(build("torch-post"))
    assert "rotation" not in count(build("torch-pre"))

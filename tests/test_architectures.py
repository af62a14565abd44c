"""Every architecture that is known: outputs stay when pairs move along their orbits, and only then."""

import copy
import dataclasses
import inspect

import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.symmetries import (
    GL,
    Projection,
    attention_pairs,
    check_coverage,
    find_symmetric_pairs,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.registry import _HANDLERS

from . import architectures, networks

CASES = [
    (name, attention)
    for name in architectures.TRANSFORMERS
    for attention in ("eager", "sdpa")
    if attention == "eager" or name not in architectures.NO_SDPA
]

#: Which symmetries there are: groups of the Q–K pairs and of the V–O pairs.
ROTARY = {"gpt_neox", "gptj", "llama", "mistral", "qwen2", "gemma2", "phi3", "phi3-partial"}
NORMALISED = {"qwen3", "gemma3"}
#: Libraries that cast to float32 inside: RMSNorm, eager softmax, rotary embeddings.
SINGLE = ROTARY | NORMALISED | {"t5", "opt", "clip", "bloom", "vit", "deit", "swin", "beit"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_transformers(name, attention):
    if (name, attention) in {("swin", "sdpa"), ("t5", "sdpa")}:
        import transformers

        if not {"swin": transformers.SwinModel, "t5": transformers.T5Model}[name]._supports_sdpa:
            pytest.skip("Swin knows sdpa from transformers 5.9, T5 from 5.15")
    model, batch = architectures.transformers_model(name, attention)
    pairs = find_symmetric_pairs(model)
    check_coverage(model, lambda: model(**batch))  # nothing is left out
    qk = {(p.group.diagonal, p.group.field) if p.group else None for p in pairs if p.kind == "qk"}
    partial = name in {"gpt_neox", "gptj", "phi3-partial"}
    expected = {None} if name in NORMALISED else {(True, "complex")} if name in ROTARY else {(False, "real")}
    assert qk == expected | ({(False, "real")} if partial else set())
    assert {(p.group.diagonal, p.group.field) for p in pairs if p.kind == "vo"} == {(False, "real")}
    report = verify(model, batch)
    assert len(report.changes) == sum(p.group is not None for p in pairs)
    assert max(report.changes.values()) < (1e-6 if name in SINGLE else 1e-9), str(report)


def without_first_row(p):
    """One row of G forgotten: a bias, or an input."""
    first = p.G[-1]
    if first.rows > 1:
        smaller = dataclasses.replace(
            first, offset=first.offset + first.stride[0], size=(first.rows - 1, *first.size[1:])
        )
        return dataclasses.replace(p, G=(*p.G[:-1], smaller))
    return dataclasses.replace(p, G=p.G[:-1])


def other_pairing(p):
    """RoPE's planes read as neighbouring dimensions in place of halves, or the other way round."""

    def swap(b):
        _rows, h, _ = b.size
        interleaved = b.stride[1] == 2 * b.stride[2]
        one = b.stride[2] if interleaved else b.stride[1]
        return dataclasses.replace(
            b, stride=(b.stride[0], one, h * one) if interleaved else (b.stride[0], 2 * one, one)
        )

    if p.group.field != "complex" or p.group.h < 2:
        return p
    return dataclasses.replace(p, G=tuple(map(swap, p.G)), H=tuple(map(swap, p.H)), null=())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", architectures.TRANSFORMERS)
def test_a_wrong_layout_is_seen_in_every_architecture(name, monkeypatch):
    """The check of ``test_transformers`` can fail: forget a row, or take another pairing, and the outputs move."""
    model, batch = architectures.transformers_model(name, "eager")
    for damage in (without_first_row, other_pairing):
        if damage is other_pairing and name not in ROTARY:
            continue
        with monkeypatch.context() as patch:
            for cls, handler in list(_HANDLERS.items()):

                def damaged(module, path, handler=handler, damage=damage):
                    return [p if p.group is None else damage(p) for p in handler(module, path)]

                patch.setitem(_HANDLERS, cls, damaged)
            changes = verify(model, batch).changes
        kinds = {"qk": [], "vo": []}
        for pair, change in changes.items():
            kinds["vo" if " vo " in pair else "qk"].append(change)
        if damage is other_pairing:
            assert max(v for k, v in changes.items() if "rotary" in k) > 1e-2
        else:
            assert max(kinds["vo"]) > 1e-2
            # Swin's first heads have four dimensions and small scores, which a bias hardly moves.
            assert name in NORMALISED or max(kinds["qk"]) > (1e-4 if name == "swin" else 1e-2)


@pytest.mark.parametrize("forgotten", ["positions", "heads"])
def test_deberta_and_bert_wrong_as_they_would_be(forgotten, monkeypatch):
    def no_positions(module, name):
        inner = module.self
        q, k, v = map(Projection, (inner.query_proj, inner.key_proj, inner.value_proj))
        return attention_pairs(name, heads=2, q=q, k=k, v=v, o=Projection(module.output.dense))

    def square(module, name):
        """W_o transposed: raises no shape error."""
        inner = module.self
        q, k, v = map(Projection, (inner.query, inner.key, inner.value))
        return attention_pairs(name, heads=2, q=q, k=k, v=v, o=Projection(module.output.dense, conv1d=True))

    name, handler = ("deberta_v2", no_positions) if forgotten == "positions" else ("bert", square)
    cls = {
        "bert": "bert.modeling_bert.BertAttention",
        "deberta_v2": "deberta_v2.modeling_deberta_v2.DebertaV2Attention",
    }
    model, batch = architectures.transformers_model(name, "eager")
    monkeypatch.setitem(_HANDLERS, "transformers.models." + cls[name], handler)
    report = verify(model, batch)
    assert not report.ok
    assert max(report.changes.values()) > 1e-2
    assert "NOT A SYMMETRY" in str(report)


# -- open_clip and timm -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "none"),
    [({}, set()), ({"block_type": "custom"}, set()), ({"qk_norm": True}, {"qk"}), ({"scale_attn_inner": True}, {"vo"}),
     ({"scale_heads": True}, set())],
    ids=str,
)  # fmt: skip
def test_open_clip(options, none):
    model, batch = architectures.open_clip_model(**options)
    visual = [p for p in find_symmetric_pairs(model) if p.name.startswith("visual")]
    assert len(visual) == 8
    assert {p.kind for p in visual if p.group is None} == none
    check_coverage(model, lambda: model(**batch))
    report = verify(model, batch)
    assert len(report.changes) == 8 - 4 * len(none) + 4
    assert max(report.changes.values()) < (1e-6 if report.single_precision else 1e-9)


TIMM = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "embed_dim": 24, "num_heads": 2, "depth": 2}),
    "deit": ("deit_tiny_distilled_patch16_224", {"img_size": 32, "embed_dim": 24, "num_heads": 2, "depth": 2}),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 32, "embed_dim": 8, "depths": (1, 2), "num_heads": (2, 2),
                                              "window_size": 4}),
    "beit": ("beit_base_patch16_224", {"img_size": 32, "embed_dim": 24, "num_heads": 2, "depth": 2}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", TIMM)
def test_timm(name, fused):
    model = architectures.timm_model(TIMM[name][0], **TIMM[name][1])
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    x = architectures.pixels(32)["pixel_values"].double()
    assert len(find_symmetric_pairs(model)) == (12 if name == "swin" else 8)
    check_coverage(model, lambda: model(x))
    report = verify(model, x)
    assert max(report.changes.values()) < 1e-9, str(report)


@pytest.mark.parametrize(
    ("options", "groups"),
    [({"qk_norm": True}, (None, GL(6))), ({"scale_norm": True}, (GL(6), None)),
     ({"gated": True}, (GL(6), GL(6, diagonal=True)))],
    ids=str,
)  # fmt: skip
def test_options_of_timm_attention(options, groups):
    from timm.layers.attention import Attention

    if "gated" in options and "gated" not in inspect.signature(Attention).parameters:
        pytest.skip("gates came with timm 1.0.28")
    layer = networks.shake(Attention(12, 2, qkv_bias=True, norm_layer=nn.LayerNorm, **options), 0.4)
    pairs = find_symmetric_pairs(layer)
    assert (pairs[0].group, pairs[1].group) == groups
    report = verify(layer, torch.randn(2, 5, 12))
    assert len(report.changes) == 2 * sum(g is not None for g in groups)
    assert max(report.changes.values()) < 1e-9


@pytest.mark.parametrize("decoder", [False, True])
def test_torch_layers(decoder):
    cls = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    layer = networks.shake(cls(8, 2, 12, batch_first=True))
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    assert [p.name.split()[0] for p in find_symmetric_pairs(layer)[::4]] == ["self_attn", "multihead_attn"][
        : 1 + decoder
    ]
    report = verify(layer, x, forward=lambda m, b: m(b, memory) if decoder else m(b))
    assert max(report.changes.values()) < 1e-9


# -- completeness -----------------------------------------------------------------------------------------------------


def null_dimension(module, run, tolerance):
    """Dimension of the null space of the Jacobian of the outputs with respect to all parameters."""
    names = [n for n, _ in module.named_parameters()]
    values = tuple(p.detach() for p in module.parameters())

    def outputs(*values):
        return run(
            lambda *a, **k: torch.func.functional_call(module, dict(zip(names, values, strict=True)), a, k)
        ).flatten()

    blocks = torch.func.jacrev(outputs, argnums=tuple(range(len(values))))(*values)
    J = torch.cat([b.reshape(b.shape[0], -1) for b in blocks], dim=1)
    J = J / J.norm(dim=0).clamp_min(1e-300).median()
    assert J.shape[0] >= J.shape[1]
    s = torch.linalg.svdvals(J)
    rank = int((s > tolerance * s[0]).sum())
    gap = s[rank - 1] / s[rank] if rank < len(s) else torch.inf
    assert gap > 30, "the spectrum has no clear gap"
    return J.shape[1] - rank


def predicted(module):
    """Group dimensions of all pairs, and the null directions that the key bias spans."""
    pairs = [p for p in find_symmetric_pairs(module) if p.group is not None]
    return sum(p.group.dimension for p in pairs) + sum(b.size[1] for p in pairs for b in p.null)


class BertLayerWithoutNorm(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        attention.output.LayerNorm = nn.Identity()

    def forward(self, x):
        return self.attention.output.dense(self.attention.self(x)[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nothing_is_missed_in_bert_and_vit():
    from transformers import BertConfig, ViTConfig
    from transformers.models.bert.modeling_bert import BertAttention
    from transformers.models.vit.modeling_vit import ViTAttention

    options = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    x = torch.randn(8, 6, 8)
    for config, make in ((BertConfig(**options), lambda c: BertLayerWithoutNorm(BertAttention(c))),
                         (ViTConfig(**options), ViTAttention)):  # fmt: skip
        # ViT's eager softmax casts to float32, which would blur the null space.
        config._attn_implementation = "eager" if isinstance(config, BertConfig) else "sdpa"
        layer = networks.shake(make(config), 0.4)

        def run(f):
            found = f(x)
            return found[0] if isinstance(found, tuple) else found

        # 32 on Q–K, 32 on V–O, 8 of b_k; and b_v moves into b_o since attention rows sum to one: 8 more.
        assert predicted(layer) == 72
        assert null_dimension(layer, run, 1e-10) == 80


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_nothing_is_missed_under_rope_and_grouped_queries(name):
    import transformers

    module = getattr(transformers.models, name.lower())
    modeling = getattr(module, f"modeling_{name.lower()}")
    options = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "head_dim": 4,
    }
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    layer = networks.shake(getattr(modeling, f"{name}Attention")(config, 0), 0.5)
    x = torch.randn(12, 6, 8)
    angle = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1])
    angle = torch.cat([angle, angle], -1)[None]
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    plain = nn.functional.softmax

    def run(f):
        return f(x, position_embeddings=(angle.cos(), angle.sin()), attention_mask=mask)[0]

    # The library's softmax and norms cast to float32, which blurs the null space: keep them in float64 here.
    def softmax(t, dim=-1, dtype=None):
        return plain(t, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "softmax", softmax)
        patch.setattr(torch.Tensor, "to", lambda self, *a, **k: self)
        found = null_dimension(layer, run, 1e-9)
    # Llama: 2 kv heads × (2 frequencies × 2 on Q–K + 16 on V–O). Qwen3: V–O, and the norms' weights against
    # each other: one number a dimension, less what RoPE mixes (both dimensions of a plane alike).
    assert predicted(layer) == {"Llama": 2 * (4 + 16), "Qwen3": 32}[name]
    assert found == predicted(layer) + {"Llama": 0, "Qwen3": 2}[name]


# -- LoRA -------------------------------------------------------------------------------------------------------------


def adapted(base, targets, **options):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        base, LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **options)
    )
    for p in model.parameters():
        p.data = p.data.double()
    return model.eval()


def bert_and_batch():
    return architectures.transformers_model("bert", "eager")


def gpt2_and_batch():
    return architectures.transformers_model("gpt2", "eager")


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.embedding, self.head = nn.Conv2d(3, 6, 3), nn.Embedding(20, 6), nn.Linear(6, 4)

    def forward(self, pixel_values, input_ids):
        return self.head(self.conv(pixel_values).mean((2, 3)) + self.embedding(input_ids).mean(1))


def convolutions_and_batch():
    return networks.shake(Convolutions()), {"pixel_values": torch.randn(2, 3, 8, 8), **architectures.IDS}


def mha_and_batch():
    return networks.shake(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)})), torch.randn(2, 5, 8)


LORA = {
    "plain": (bert_and_batch, ["query", "value", "dense"], {}),
    "rslora": (bert_and_batch, ["key"], {"use_rslora": True}),
    "dora": (bert_and_batch, ["query", "value"], {"use_dora": True}),
    "rank pattern": (bert_and_batch, ["query", "key"], {"rank_pattern": {"key": 2}}),
    "bias": (bert_and_batch, ["query"], {"lora_bias": True}),
    "fused Conv1D": (gpt2_and_batch, ["c_attn", "c_proj"], {"fan_in_fan_out": True}),
    "Conv2d, Embedding": (convolutions_and_batch, ["conv", "embedding", "head"], {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LORA)
def test_lora(name):
    make, targets, options = LORA[name]
    base, batch = make()
    model = adapted(base, targets, **options)
    pairs = find_symmetric_pairs(model)
    usable = [p for p in pairs if p.group is not None]
    assert {p.kind for p in usable} == {"lora"}  # the base is frozen: attention pairs are listed with that reason
    assert all("frozen" in p.reason or "Dora" in p.reason for p in pairs if p.group is None)
    assert {p.group.h for p in usable} == ({3, 2} if name == "rank pattern" else {3})
    report = verify(model, batch)
    assert len(report.changes) == len(usable) > 0
    assert max(report.changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
def test_lora_on_multihead_attention():
    base, x = mha_and_batch()
    model = adapted(base, ["attn"])

    def forward(m, b):
        return m.base_model.model["attn"](b, b, b)[0]

    pairs = [p for p in find_symmetric_pairs(model) if p.group is not None]
    assert [p.kind for p in pairs] == ["lora", "lora"]
    report = verify(model, x, forward=forward)
    assert max(report.changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [bert_and_batch, gpt2_and_batch])
def test_lora_with_a_trainable_base_joins_the_attention_pairs(make):
    base, batch = make()
    targets = ["query", "key", "value", "output.dense"] if make is bert_and_batch else ["c_attn", "c_proj"]
    options = {} if make is bert_and_batch else {"fan_in_fan_out": True}
    model = adapted(base, targets, **options)
    model.requires_grad_(True)
    pairs = find_symmetric_pairs(model)
    attention = [p for p in pairs if p.kind in ("qk", "vo")]
    assert all(p.group is not None for p in attention)
    assert attention[0].n == 17 + 3  # rows of lora_B
    stand_in = [p for p in pairs if p.kind == "lora" and p.group is None]
    assert stand_in
    assert all("stand in the attention pairs" in p.reason for p in stand_in)
    assert max(verify(model, batch).changes.values()) < 1e-9
    # Forgetting the rows of LoRA moves the outputs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quotient_manifolds.symmetries.attention.lora_factors", lambda module: [])
        assert max(verify(model, batch).changes.values()) > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_dora_breaks_the_attention_symmetry_and_keeps_its_own():
    base, batch = bert_and_batch()
    model = adapted(base, ["query", "value"], use_dora=True)
    model.requires_grad_(True)
    pairs = find_symmetric_pairs(model)
    assert {p.kind for p in pairs if p.group is not None} == {"lora"}
    assert all("Dora" in p.reason for p in pairs if p.group is None)
    assert max(verify(model, batch).changes.values()) < 1e-9


@pytest.mark.filterwarnings("ignore")
def test_merged_and_disabled_adapters_are_listed_with_the_reason():
    base, _ = bert_and_batch()
    model = adapted(base, ["query"])
    model.merge_adapter()
    assert {p.reason for p in find_symmetric_pairs(model) if p.kind == "lora"} == {
        "merged into the base weight; unmerge it"
    }
    model.unmerge_adapter()
    with model.disable_adapter():
        assert {p.reason for p in find_symmetric_pairs(model) if p.kind == "lora"} == {"the adapter is disabled"}
    assert all(p.group is not None for p in find_symmetric_pairs(model) if p.kind == "lora")


# -- measuring --------------------------------------------------------------------------------------------------------


def measured(name):
    if name == "lora":
        base, batch = bert_and_batch()
        return adapted(base, ["query", "value"]), batch, lambda m, b: m(**b).last_hidden_state.square().mean()
    model, batch = architectures.transformers_model(name, "eager")
    return model, batch, lambda m, b: m(**b).last_hidden_state.sin().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox", "qwen3", "lora"])
@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix"])
def test_sharpness_is_invariant_for_every_kind_of_group(name, measure):
    from quotient_manifolds.symmetries import apply_random_symmetry_

    model, batch, loss = measured(name)
    for parameter, p in model.named_parameters():  # LoRA's base is frozen, and the pooler takes no part
        if "pooler" in parameter:
            p.requires_grad_(False)
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 10.0) > 0
    options = {"measure": measure, "rho": 0.02, "steps": 4, "verify": True}
    one, two = (sharpness.evaluate(m, [batch], loss, **options).value for m in (model, twin))
    # Models that cast to float32 inside are staircases at 1e-7 of the loss.
    tolerance = 1e-8 if name in ("bert", "lora") else 1e-3
    assert abs(one - two) < tolerance * one
    assert one > 0


def test_key_bias_can_be_quotiented_out():
    model, batch = networks.bert(), networks.text()
    keep, drop = find_symmetric_pairs(model), find_symmetric_pairs(model, key_bias="drop")
    assert next(p.m for p in keep if p.kind == "qk") == 17
    assert next(p.m for p in drop if p.kind == "qk") == 16
    assert max(verify(model, batch).changes.values()) < 1e-9
    shifted = copy.deepcopy(model)
    with torch.no_grad():
        for layer in shifted.bert.encoder.layer:
            layer.attention.self.key.bias.add_(torch.randn(16))
    torch.testing.assert_close(model(**batch).loss, shifted(**batch).loss)
    for key_bias, moves in (("keep", True), ("drop", False)):
        one, two = (
            sharpness.evaluate(m, [batch], rho=0.1, steps=5, pairs=find_symmetric_pairs(m, key_bias=key_bias)).value
            for m in (model, shifted)
        )
        assert (abs(one - two) > 1e-3 * one) == moves
        if not moves:
            assert abs(one - two) < 1e-8 * one
    with pytest.raises(ValueError, match="key_bias must be"):
        find_symmetric_pairs(model, key_bias="forget")


def test_verify_leaves_the_model_alone_and_evaluate_offers_it(monkeypatch):
    model, batch = networks.vit(), networks.images()
    before = copy.deepcopy(model.state_dict())
    model.train()
    assert verify(model, batch).ok
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert sharpness.evaluate(model, [batch], rho=0.1, steps=1, verify=True).value > 0
    cls = "transformers.models.vit.modeling_vit.ViTAttention"
    right = _HANDLERS[cls]
    monkeypatch.setitem(_HANDLERS, cls, lambda m, n: [without_first_row(p) for p in right(m, n)])
    with pytest.raises(ValueError, match=r"no symmetry of ViTForImageClassification:[\s\S]*NOT A SYMMETRY"):
        sharpness.evaluate(model, [batch], rho=0.1, steps=1, verify=True)


def test_stacks_of_many_layers_are_single_tensors():
    model = networks.vit(layers=3)
    found = stacks(find_symmetric_pairs(model))
    assert [len(s) for s in found] == [6, 6]
    assert sum(len(s._rows.runs) for s in found) == 3 * 7  # one view a parameter and layer, not one a head

"""The table of classes, against outputs; attention that no handler covers is named."""

import dataclasses
import importlib
import inspect
import pickle
import warnings

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import prune

import sharpness
from quotient_manifolds.symmetries import (
    GL,
    Heads,
    Projection,
    SymmetricPair,
    Symmetries,
    UnknownAttentionError,
    attention_pairs,
    check_coverage,
    find,
    move_,
    pair,
    slot,
    verify,
)
from quotient_manifolds.symmetries.attention import HANDLERS, KNOWN
from tests.support import architectures, networks, zoo
from tests.support.architectures import change, without_first_row
from tests.support.extent import EXHAUSTIVE, share

#: Every architecture with one implementation of attention; with each that it has, if exhaustive.
CASES = [
    (name, attention)
    for i, name in enumerate(architectures.TRANSFORMERS)
    for attention in ("eager", "sdpa")
    if (EXHAUSTIVE or name in architectures.NO_SDPA or (attention == "sdpa") == i % 2)
    and (attention == "eager" or name not in architectures.NO_SDPA)
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
    found = find(model)
    check_coverage(model, lambda: model(**batch))  # nothing is left out
    groups = {kind: {(p.group.diagonal, p.group.field) for p in found.of_kind([kind]).pairs} for kind in ("qk", "vo")}
    partial = name in {"gpt_neox", "gptj", "phi3-partial"}
    expected = set() if name in NORMALISED else {(True, "complex")} if name in ROTARY else {(False, "real")}
    assert groups["qk"] == expected | ({(False, "real")} if partial else set())
    assert {p.kind for p in found.refused} == ({"qk"} if name in NORMALISED else set())
    assert groups["vo"] == {(False, "real")}
    report = verify(model, batch)
    assert len(report.changes) == len(found.pairs)
    assert max(report.changes.values()) < (1e-6 if name in SINGLE else 1e-9), str(report)


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
@pytest.mark.parametrize("name", share(architectures.TRANSFORMERS, 3))
def test_a_wrong_layout_is_seen_in_every_architecture(name, monkeypatch):
    """The check of ``test_transformers`` can fail: forget a row, or take another pairing, and the outputs move."""
    model, batch = architectures.transformers_model(name, "eager")
    for damage in (without_first_row, other_pairing):
        if damage is other_pairing and name not in ROTARY:
            continue
        with monkeypatch.context() as patch:
            for cls, handler in list(HANDLERS.items()):

                def damaged(module, handler=handler, damage=damage):
                    return [damage(p) if isinstance(p, SymmetricPair) else p for p in handler(module)]

                patch.setitem(HANDLERS, cls, damaged)
            changes = verify(model, batch).changes
        kinds = {"qk": [], "vo": []}
        for p, moved in changes.items():
            kinds[p.kind].append(moved)
        if damage is other_pairing:
            assert max(moved for p, moved in changes.items() if p.part == "rotary") > 1e-2
        else:
            assert max(kinds["vo"]) > 1e-2
            # Swin's first heads have four dimensions and small scores, which a bias hardly moves.
            assert name in NORMALISED or max(kinds["qk"]) > (1e-4 if name == "swin" else 1e-2)


@pytest.mark.parametrize("forgotten", ["positions", "heads"])
def test_deberta_and_bert_wrong_as_they_would_be(forgotten, monkeypatch):
    def no_positions(module):
        q, k, v = (Projection(module, f"self.{name}_proj") for name in ("query", "key", "value"))
        return attention_pairs(Heads(2), q=q, k=k, v=v, o=Projection(module, "output.dense"))

    def square(module):
        """W_o transposed: raises no shape error."""
        q, k, v = (Projection(module, f"self.{name}") for name in ("query", "key", "value"))
        return attention_pairs(Heads(2), q=q, k=k, v=v, o=Projection(module, "output.dense", conv1d=True))

    name, handler = ("deberta_v2", no_positions) if forgotten == "positions" else ("bert", square)
    cls = {
        "bert": "bert.modeling_bert.BertAttention",
        "deberta_v2": "deberta_v2.modeling_deberta_v2.DebertaV2Attention",
    }
    model, batch = architectures.transformers_model(name, "eager")
    monkeypatch.setitem(HANDLERS, "transformers.models." + cls[name], handler)
    report = verify(model, batch)
    assert not report.ok
    assert max(report.changes.values()) > 1e-2
    assert "NOT A SYMMETRY" in str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "none"),
    [({}, set()), ({"block_type": "custom"}, set()), ({"qk_norm": True}, {"qk"}), ({"scale_attn_inner": True}, {"vo"}),
     ({"scale_heads": True}, set())],
    ids=str,
)  # fmt: skip
def test_open_clip(options, none):
    model, batch = architectures.open_clip_model(**options)
    found = find(model)
    visual = [p for p in (*found.pairs, *found.refused) if p.name.startswith("visual")]
    assert len(visual) == 8
    assert {p.kind for p in found.refused} == none
    check_coverage(model, lambda: model(**batch))
    report = verify(model, batch)
    assert len(report.changes) == 8 - 4 * len(none) + 4
    assert max(report.changes.values()) < 1e-9


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
    assert len(find(model).pairs) == (12 if name == "swin" else 8)
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
    found = find(layer)
    by_kind = {p.kind: p.group for p in found.pairs} | {p.kind: None for p in found.refused}
    assert (by_kind["qk"], by_kind["vo"]) == groups
    report = verify(layer, torch.randn(2, 5, 12))
    assert len(report.changes) == 2 * sum(g is not None for g in groups)
    assert max(report.changes.values()) < 1e-9


@pytest.mark.parametrize("name", zoo.TORCH)
def test_forms_of_multihead_attention(name):
    """By the table, as discovery finds them (:mod:`.test_discovery`)."""
    model, batch = zoo.torch_model(name)
    found = find(model)
    assert {p.group.diagonal for p in found.pairs} == {False}
    assert found.refused == ()
    report = verify(model, batch)
    assert report.ok, str(report)
    assert len(report.changes) == len(found.pairs)


def test_heads_of_any_size_where_their_number_is_known():
    """Head sizes are tried up to a limit by discovery only; a number that does not fit is a reason."""
    assert [str(p.group) for p in find(nn.MultiheadAttention(1024, 1)).pairs] == ["GL(1024)"] * 2
    layer = nn.MultiheadAttention(12, 2)
    layer.num_heads = 5
    (found,) = find(layer).refused
    assert find(layer).pairs == ()
    assert "do not divide into 5 heads" in found.reason
    del layer.num_heads
    (found,) = find(layer).refused
    assert found.reason.startswith("MultiheadAttention does not say how many heads it has, as num_heads or")


def test_a_pruned_layer_is_refused_with_what_may_have_changed_it():
    layer = nn.MultiheadAttention(8, 2)
    prune.l1_unstructured(layer, "in_proj_weight", 0.5)
    (found,) = find(layer).refused
    assert "replaced, pruned or parametrised?" in found.reason


def test_torch_s_fast_path_keeps_what_is_found(monkeypatch):
    layer, x = networks.shake(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)), torch.randn(2, 5, 8)
    fast, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: calls.append(1) or fast(*a))
    with torch.no_grad():
        assert change(layer, lambda m: m(x)) < 1e-12
        assert len(calls) == 2
        before = layer(x)
        move_(layer, Symmetries(tuple(without_first_row(p) for p in find(layer).pairs)))
        assert not torch.allclose(layer(x), before)


def test_every_line_is_a_class_that_exists():
    assert len(KNOWN) == 38
    for line in KNOWN:
        module, cls = line["class"].rsplit(".", 1)
        assert line["class"] in HANDLERS
        assert hasattr(importlib.import_module(module), cls), line


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Gemma", "Gemma2", "Phi3", "GPTNeoX"])
def test_a_part_that_a_class_does_not_rotate_is_no_part(family):
    """Llama and others rotate whole heads, whatever partial_rotary_factor says; Phi-3 and GPT-NeoX rotate a part."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
             "vocab_size": 11, "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2}  # fmt: skip
    heads = {} if family == "GPTNeoX" else {"num_key_value_heads": 2, "head_dim": 8}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes, **heads))
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
    ids = torch.randint(1, 11, (3, 7))
    before = model(ids).logits
    groups = {str(p.group) for p in find(model).pairs if p.kind == "qk"}
    assert len(groups) == (2 if family in ("Phi3", "GPTNeoX") else 1)
    move_(model)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-8, atol=1e-8)


class Mystery(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class MysteryFused(Mystery):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


class MysterySubclass(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize("module", [Mystery(), MysteryFused(), MysterySubclass(4, 2)], ids=lambda m: type(m).__name__)
def test_unknown_attention_is_named(module):
    model = nn.Sequential(nn.Linear(4, 4), module.double())
    with pytest.raises(
        UnknownAttentionError, match=rf"module '1' of class .*{type(module).__name__}.*register"
    ) as caught:
        check_coverage(model, lambda: model(torch.randn(2, 3, 4)))
    assert caught.value.path == "1"
    assert caught.value.cls is type(module)
    again = pickle.loads(pickle.dumps(caught.value))  # as a pool of processes does
    assert (str(again), again.path, again.cls) == (str(caught.value), "1", type(module))


def test_exported_attention_is_unknown():
    x = torch.randn(2, 3, 4)
    for module in (nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)):
        inputs = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        exported = torch.export.export(module, inputs).module()
        if len(inputs) == 1:
            check_coverage(exported, lambda: exported(x))  # noqa: B023
        else:
            with pytest.raises(UnknownAttentionError, match="computes attention"):
                check_coverage(exported, lambda: exported(x, x, x))  # noqa: B023


def test_a_softmax_over_class_scores_is_no_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    check_coverage(model, lambda: model(torch.randn(2, 4)))


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.three, self.mix = nn.Linear(4, 12), mix

    def forward(self, x):
        return self.mix(*self.three(x).chunk(3, -1))


def exponentials(q, k, v):
    weights = (q @ k.mT).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


MIXERS = {
    "softmax of two dimensions": lambda q, k, v: (q[0] @ k[0].T).softmax(-1) @ v[0],
    "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.mT) @ v,
    "exponentials and their sum": exponentials,
    "einsum": lambda q, k, v: torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).relu(), v),
    "linear": lambda q, k, v: q @ (k.mT @ v),
    "transposed": lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v,
    "operators": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),  # as torch.export calls them
    "fused operators": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        *(t[:, None] for t in (q, k, v))
    )[0],
    "softmax by operators": lambda q, k, v: torch.ops.aten._softmax.default(q @ k.mT, -1, False) * v[..., :3],
    "products of operators": lambda q, k, v: torch.ops.aten.bmm(torch.ops.aten.bmm.default(q, k.mT).exp(), v),
    "flex_attention": lambda q, k, v: flex_attention(q[:, None], k[:, None], v[:, None]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MIXERS)
def test_attention_without_a_softmax_of_three_dimensions(name):
    model, x = nn.Sequential(nn.Linear(4, 4), Mixing(MIXERS[name])).float(), torch.randn(2, 3, 4).float()
    with torch.no_grad(), pytest.raises(UnknownAttentionError, match="module '1'"):
        check_coverage(model, lambda: model(x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda q, k, v: torch.vmap(lambda one: one / one.norm())(q) + v,  # of tensors without a memory
        lambda q, k, v: q[:, 0] @ k[:, 0].T,  # similarities of two towers
        lambda q, k, v: (q @ k.mT).flatten(1).softmax(-1),
        lambda q, k, v: q * k.sigmoid() + v,
    ],
)
def test_what_is_no_attention_is_let_be(mix):
    model, x = nn.Sequential(nn.Linear(4, 4), Mixing(mix)), torch.randn(2, 3, 4)
    check_coverage(model, lambda: model(x))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).numpy() for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(torch.from_numpy(np.tanh(q @ k.swapaxes(1, 2)) @ v))


def test_what_cannot_be_watched_is_said():
    model, x = nn.Sequential(Named()), torch.randn(2, 3, 4)
    with torch.no_grad(), pytest.raises(UnknownAttentionError, match="cannot be watched"):
        check_coverage(model, lambda: model(x))


def test_what_was_examined_is_covered():
    model, x = nn.Sequential(Named()), torch.randn(2, 3, 4)
    Named.forward = lambda self, x: self.o_proj(
        nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))
    )
    found = find(model, x)
    assert [str(p.group) for p in found.pairs] == ["GL(4)", "GL(4)"]
    check_coverage(model, lambda: model(x), found)


class Attending(Named):
    def forward(self, x, cache=None):
        q = self.q_proj(x if cache is None else cache.turned(x))
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, self.k_proj(x), self.v_proj(x)))


class BesideTorch(Attending):
    def __init__(self):
        super().__init__()
        self.known = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return super().forward(self.known(x, x, x, need_weights=False)[0])


def test_a_registered_layer_says_nothing_of_what_holds_it():
    model, x = BesideTorch(), torch.randn(2, 3, 4)
    found = find(model)
    assert len(found.pairs) == 4
    with pytest.raises(UnknownAttentionError, match="BesideTorch"):
        check_coverage(model, lambda: model(x), found)


class BySoftmax(Named):
    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(-1)

    def forward(self, x):
        return self.o_proj(self.attend(self.q_proj(x) @ self.k_proj(x).mT) @ self.v_proj(x))


def test_a_module_without_weights_is_named_by_what_holds_it():
    """To skip softmax, as the error advised, would switch the check off everywhere."""
    model, x = nn.Sequential(BySoftmax()), torch.randn(2, 3, 4)
    with pytest.raises(UnknownAttentionError, match=r"module '0' .*skip\('.*BySoftmax'\)"):
        check_coverage(model, lambda: model(x))


def test_what_no_pass_reaches_is_not_refused():
    model, x = Two(), torch.randn(2, 3, 4)
    found = find(model, x, forward=lambda m, x: m(x, cached=False, both=False))
    assert {p.reason for p in found.refused if p.module == "two"} == {"the batch does not reach it"}
    assert {p.module for p in found.pairs} == {"one"}
    check_coverage(model, lambda: model(x, cached=False, both=False), found)


class TurningCache:
    def turned(self, x):
        return -x


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Attending(), Attending()

    def forward(self, x, cached=True, both=True):
        x = self.one(x, TurningCache()) if cached else self.one(x)
        return self.two(x) if both else x


class NeedsCache(Attending):
    def forward(self, x, cache):
        return super().forward(cache.turned(x))


@pytest.mark.parametrize("reason", ["could not be examined alone", "the batch does not reach it"])
def test_what_was_not_examined_is_not_covered(reason):
    model, x = Two(), torch.randn(2, 3, 4)
    if "alone" in reason:
        model.one = NeedsCache()
    found = find(model, x, forward=lambda m, x: m(x, both="alone" in reason))
    assert found.pairs
    with pytest.raises(UnknownAttentionError, match=reason):
        check_coverage(model, lambda: model(x), found)


def test_pairs_of_ones_own_cover_the_module_that_holds_their_projections():
    """Whatever they are called; what a pair says of one layer is nothing of another."""

    class Model(nn.Sequential):
        pass

    model, x = Model(Attending(), Attending()), torch.randn(2, 3, 4)

    def mine(*layers):
        pairs = []
        for i in layers:
            G, H = (
                [slot(model, f"{i}.{c}_proj.weight", transpose=True), slot(model, f"{i}.{c}_proj.bias")] for c in "qk"
            )
            pairs.append(pair(G, H, GL(4), name=f"mine {i}"))
        return Symmetries().adding(*pairs)

    check_coverage(model, lambda: model(x), mine(0, 1))
    with pytest.raises(UnknownAttentionError, match="module '1'"):
        check_coverage(model, lambda: model(x), mine(0))
    batch = (x, torch.randint(4, (2,)))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])

    with pytest.warns(UserWarning, match="outside of the pairs that were given, module '1' of class .*Attending"):
        found = sharpness.evaluate(model, [batch], loss, rho=0.1, steps=2, symmetries=mine(0))
    assert float(found) > 0
    (remark,) = found.remarks
    assert remark.startswith("outside of the pairs that were given, module '1' of class ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharpness.evaluate(model, [batch], loss, rho=0.1, steps=2, symmetries=mine(0, 1))
    examined = sharpness.evaluate(model, [batch], loss, rho=0.1, steps=2)
    assert len(examined.direction(0).symmetries.pairs) == 4
    assert examined.remarks == (
        "layers of classes without a handler were examined on the first batch: Attending (4 pairs)",
    )


def test_a_number_of_heads_may_be_numpys():
    assert len(find(torch.nn.MultiheadAttention(8, np.int64(2))).pairs) == 4

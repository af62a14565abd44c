import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from quotient_manifolds.passes import default_forward, tree_map
from quotient_manifolds.symmetries import ALL, Cause, canonical_form, canonicalize_, find, move_, verify
from quotient_manifolds.symmetries.folding import write_values
from quotient_manifolds.symmetries.whole import State, register_wiring, wiring_of
from quotient_manifolds.weights import weights_of
from tests.support import networks
from tests.support.extent import share
from tests.support.whole_networks import (
    FAMILIES,
    build,
    by_kind,
    count,
    folded,
    forward,
    inputs,
    outside,
    symmetries_of,
)


def verified(model, batch, forward=default_forward, classes=False):
    """Everything that is found, verified."""
    found = find(model, batch, scope=ALL, classes=classes, forward=forward)
    return verify(model, batch, found, forward=forward)


#: Their streams have no basis of their own.
ROTATED = [
    "vit", "deit", "dinov2", "beit", "gpt2-untied", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "timm",
    "timm-no-bias",
]  # fmt: skip


def difference(a, b):
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_stays_and_equivalent_weights_meet(family):
    model = build(family)
    (batch,) = inputs(family)
    before = forward(model, batch)
    moved, found = copy.deepcopy(model), symmetries_of(model)
    assert ("rotation" in found.dimensions) == (family in ROTATED)
    assert move_(moved, found, kinds=set(found.dimensions) - {"rotation"})
    assert difference(forward(moved, batch), before) < 1e-12
    norms = [difference(p, q) for p, q in zip(moved.parameters(), model.parameters(), strict=True)]
    assert max(norms) > 1e-2  # the move was one
    for m in (model, moved):
        assert canonicalize_(m).dimension == found.dimension
        assert difference(forward(m, batch), before) < 1e-12
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-9)
    once = [p.clone() for p in model.parameters()]
    canonicalize_(model)
    for p, q in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", share(ROTATED, 2))
def test_equivalent_weights_meet_but_for_a_rotation(family):
    """Inner products of vectors in the stream agree."""
    model = build(family)
    moved, (batch,) = copy.deepcopy(model), inputs(family)
    before = forward(model, batch)
    move_(moved, outside(moved))
    assert difference(forward(moved, batch), before) < 1e-12
    for m in (model, moved):
        canonicalize_(m, outside(m))
    pair = [[w.matrix.read(State(weights_of(m))) for _, w in wiring_of(m).writers] for m in (model, moved)]
    assert max(difference(a, b) for a, b in zip(*pair, strict=True)) > 1e-2
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a.T @ a, b.T @ b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("family", share(FAMILIES, 2, 1))
def test_the_function_stays_whatever_is_frozen(family):
    """Each symmetry needs others that were folded before: a writer its layer scale, a rotation all shifts."""
    generator = torch.Generator().manual_seed(FAMILIES.index(family))
    (batch,) = inputs(family)
    for _ in range(3):
        model = build(family)
        before, weights = forward(model, batch), weights_of(model)
        moving = [name for name in weights if torch.rand((), generator=generator) < 0.75]
        kept = {name: p.detach().clone() for name, p in weights.items() if name not in moving}
        found = symmetries_of(model).restricted(moving)
        form = canonical_form(weights, found)
        write_values(weights, form.values)
        assert difference(forward(model, batch), before) < 1e-11
        move_(model, found)
        assert difference(forward(model, batch), before) < 1e-10
        assert all(torch.equal(weights[name], value) for name, value in kept.items())


def test_single_precision():
    model = build("bert").float()
    (batch,) = inputs("bert")
    before = forward(model, batch)
    canonicalize_(model)
    assert difference(forward(model, batch), before) < 1e-5


def test_a_gain_of_zero_is_folded():
    model = build("vit")
    norm = networks.vit_layers(model)[0].layernorm_before
    norm.weight.data[2] = 0
    (batch,) = inputs("vit")
    before = forward(model, batch)
    canonicalize_(model)
    assert difference(forward(model, batch), before) < 1e-12
    assert torch.equal(norm.weight, torch.ones(8, dtype=torch.float64))


def test_a_failure_half_way_harms_nothing(monkeypatch):
    model = build("vit")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    write = torch.Tensor.copy_
    calls = []

    def failing(self, *arguments):
        calls.append(self)
        if len(calls) == 5:
            raise RuntimeError("no room")
        return write(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(RuntimeError, match="no room"):
        canonicalize_(model)
    monkeypatch.undo()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_kind_that_a_network_lacks_is_named():
    found = outside(build("bert"))
    for kinds in (["gains"], "gain"):
        with pytest.raises(ValueError, match=r"kinds is a collection of .*gain.* here, got \[?'gain"):
            move_(build("bert"), found, kinds=kinds)
    assert set(move_(build("bert"), found, kinds=["gain"])) == {"gain"}


@torch.no_grad()
def test_symmetries_of_another_network_fold_nothing():
    """Of another shape they read numbers of other entries."""
    model, found = build("bert"), outside(build("bert"))
    before = copy.deepcopy(model.state_dict())
    wide = build("bert")
    wide.bert.encoder.layer[1].output.dense.weight = nn.Parameter(torch.ones(16, 24))
    for other, words in (
        (build("vit"), "there is no weight 'bert.* found in another model"),
        (wide, r"had shape \(8, 12\) when its symmetries were found and has \(16, 24\) now"),
    ):
        for run in (canonicalize_, lambda other, found: canonical_form(weights_of(other), found)):
            with pytest.raises(ValueError, match=words):
                run(other, found)
    for wrong in (None, found.actions, "bert"):
        with pytest.raises(TypeError, match=r"symmetries must be as find\(model\) returns them"):
            canonical_form(weights_of(model), wrong)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_frozen_weights_stay():
    model, name = build("bert"), "bert.encoder.layer.0.intermediate.dense.weight"
    form = canonical_form(weights_of(model), symmetries_of(model).restricted(set(weights_of(model)) - {name}))
    assert name not in form.values
    assert {r.detail for r in form.symmetries.refused if r.cause is Cause.FROZEN} == {name}
    assert f"not folded: 1 × reader (frozen: {name})" in form.symmetries.table()


def test_a_gain_of_zero_beside_a_frozen_bias_stays():
    model = build("vit")
    model.vit.layernorm.weight.data[0] = 0
    (batch,) = inputs("vit")
    before, weights = forward(model, batch), weights_of(model)
    form = canonical_form(weights, symmetries_of(model).restricted(set(weights) - {"classifier.bias"}))
    assert "classifier.bias" not in form.values
    write_values(weights, form.values)
    assert difference(forward(model, batch), before) < 1e-12
    causes = {f"{r.kind}: {r.module}": r.cause for r in form.symmetries.refused}
    assert causes["shift: layernorm"] is Cause.FROZEN
    assert causes["gain: layernorm"] is Cause.UNFOLDED


def test_a_class_that_nobody_wired():
    found = symmetries_of(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)))
    assert set(found.dimensions) == {"qk", "vo", "key bias"}
    assert not found.wired
    assert "register_wiring" in found.table()


def test_neurons_are_pairs():
    model = build("llama")
    (batch,) = inputs("llama")
    before = forward(model, batch)
    found = find(model, scope=("neurons",))
    assert [str(p.group) for p in found.pairs] == ["(ℝ*)^12"] * 2
    move_(model, found)
    assert difference(forward(model, batch), before) < 1e-12
    model = build("opt")
    (batch,) = inputs("opt")
    before = forward(model, batch)
    rectified = find(model, scope=("neurons",))
    assert [str(p.group) for p in rectified.pairs] == ["(ℝ+)^12"] * 2
    move_(model, rectified)
    assert difference(forward(model, batch), before) < 1e-12
    wrong = next(p for p in find(model).pairs if p.kind == "vo")
    weights_of(model)[wrong.G[0].name].data[0] *= -1  # one half alone
    assert difference(forward(model, batch), before) > 1e-3


def test_a_saved_canonical_checkpoint_loads_in_its_own_library(tmp_path):
    from transformers import ViTForImageClassification

    model = build("vit").float()
    (batch,) = inputs("vit")
    batch = {key: value.float() for key, value in batch.items()}
    before = forward(model, batch)
    canonicalize_(model)
    model.save_pretrained(tmp_path)
    again = ViTForImageClassification.from_pretrained(tmp_path).eval()
    assert difference(forward(again, batch), before) < 1e-5


def test_without_a_shift_there_is_no_bias_in_the_weights():
    """Frozen norms with a shift of 0, and queries, keys, values without biases: the weights became NaN."""
    model = build("vit")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.requires_grad_(False)
    for layer in networks.vit_layers(model):
        for projection in networks.projections(layer.attention)[:3]:
            projection.bias = None
    (batch,) = inputs("vit")
    before = forward(model, batch)
    canonicalize_(model)
    assert difference(forward(model, batch), before) < 1e-12


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_pruned_weights_are_left_alone(name):
    """A pruned weight is computed by each forward pass; what is written into it is lost."""
    model = build("vit")
    prune.l1_unstructured(networks.feed_forward(networks.vit_layers(model)[0])[0], name, 0.3)
    (batch,) = inputs("vit")
    with torch.enable_grad():
        before = forward(model, batch)
    assert Cause.COMPUTED in {r.cause for r in canonicalize_(model).refused}
    with torch.enable_grad():
        assert difference(forward(model, batch), before) < 1e-12
    assert verified(model, batch, forward=forward).ok


def test_a_layer_that_is_used_twice_counts_once():
    def built(shared):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        if shared:
            encoder.layers[1] = encoder.layers[0]
        return encoder

    assert [find(built(shared), scope=("neurons",)).dimension for shared in (True, False)] == [16, 32]
    model = build("opt")
    parametrizations.weight_norm(model.model.decoder.layers[0].fc1)
    found = find(model, scope=("neurons",))
    assert [p.module for p in found.pairs] == ["decoder.layers.1.final_layer_norm"]
    assert [(r.module, r.cause) for r in found.refused] == [("decoder.layers.0.final_layer_norm", Cause.COMPUTED)]


def test_a_gain_of_zero_beside_a_computed_bias_stays():
    """The bias was written, and computed anew by the next pass: the function changed."""
    model = build("vit")
    layer = networks.vit_layers(model)[0]
    with torch.no_grad():
        layer.layernorm_after.weight[2] = 0
    prune.random_unstructured(networks.feed_forward(layer)[0], "bias", amount=0.3)
    (batch,) = inputs("vit")
    before = forward(model, batch)
    found = canonicalize_(model)
    assert difference(forward(model, batch), before) < 1e-12
    assert Cause.COMPUTED in {r.cause for r in found.refused}


def test_pairs_of_a_canonical_form_keep_their_scale():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(nn.Linear(6, 4)), config)
    assert [p.scale for p in folded(model).symmetries.pairs] == [4.0]


def test_known_counts():
    """The numbers of a ViT, by hand: 64 + 64 + 16 + 16 + 40 γ + 40 β + 75 readers + 67 writers + 14 + 21."""
    found = count(build("vit"))
    assert found == {
        "qk": 64, "vo": 64, "gain": 40, "shift": 40, "reader": 75, "key bias": 16, "value bias": 16, "embeddings": 14,
        "writer": 67, "rotation": 21,
    }  # fmt: skip
    assert sum(count(build("vit"), classes=True).values()) == 425
    for family, dimension in {"bert": 365, "gpt2": 346, "gpt2-untied": 401, "llama": 132, "llama-tied": 96}.items():
        assert sum(count(build(family)).values()) == dimension, family


def test_every_kind_is_certified_and_moved():
    for family in ("dinov2", "bert", "qwen3", "t5"):
        report = verified(build(family), next(inputs(family)), forward=forward)
        assert report.ok, report
        assert {*report.residuals, *report.unreached} == set(report.changes)
        assert max(report.changes.values()) < 1e-10


def test_a_wrong_wiring_is_found_by_gradient_and_by_move():
    """A norm in the stack of BERT is read by the residual too."""

    class Wrong(type(build("bert"))):
        pass

    @register_wiring(Wrong)
    def wrong(model):
        model.__class__ = Wrong.__base__
        wiring = wiring_of(model)
        model.__class__ = Wrong
        first = wiring.sites[0]
        wiring.sites[0] = replace(first, carried=None)
        return wiring

    model = build("bert")
    model.__class__ = Wrong
    report = verified(model, next(inputs("bert")), forward=forward)
    assert {"gain", "shift"} <= {s.kind for s in report.failures}
    assert min(by_kind(values)["gain"] for values in (report.residuals, report.changes)) > 1e-3
    assert "NOT A SYMMETRY" in str(report)


def test_neurons_that_are_no_symmetry_are_refused_by_a_batch_and_a_misfit_by_its_reason():
    """Wrong neurons came back as symmetries; a network that its adapter does not fit, as one without an adapter."""
    model, batch = build("opt"), next(inputs("opt"))
    assert {p.kind for p in find(model, batch, scope=("neurons",), forward=forward).pairs} == {"relu"}
    for layer in model.model.decoder.layers:
        layer.activation_fn = nn.Tanh()  # of which the table does not know
    found = find(model, batch, scope=("neurons",), forward=forward)
    assert not found.pairs
    assert {r.cause for r in found.refused} == {Cause.CHANGES}
    del model.model.decoder.layers[0].fc2
    found = find(model, scope=ALL)
    assert "its adapter does not fit: " in found.table()
    assert "fc2" in found.unwired


def test_the_model_stays():
    model = build("vit").float().train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    batch = {key: value.float() for key, value in next(inputs("vit")).items()}
    assert verified(model, batch, forward=forward, classes=True).ok
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert model.training


def test_losses_and_hidden_states_are_not_what_is_compared():
    """With labels the first output is a loss, and T5 returns its encoder's states, which gains change."""
    for family, classes in (("bert", True), ("t5", False)):
        model, batch = build(family), next(inputs(family))
        report = verified(model, batch, classes=classes)
        assert report.ok, report
        assert {"qk", "vo"} <= set(by_kind(report.residuals))
    model, batch = build("bert"), next(inputs("bert"))
    labels = torch.zeros(len(batch["input_ids"]), dtype=torch.long)
    assert max(verified(model, batch | {"labels": labels}, classes=True).changes.values()) > 0


def test_a_gradient_that_is_not_a_number_certifies_nothing():
    """Python's max passed over NaN, and the kind had a residual of 0."""

    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("torch-pre")

        def forward(self, x):
            y = self.inner(x)
            return (y - y).abs().sqrt() + y

    @register_wiring(Root)
    def wiring(model):
        return wiring_of(model, "inner")

    report = verified(Root(), next(inputs("torch-pre")))
    assert any(residual != residual for residual in report.residuals.values())
    assert not report.ok


def test_gradients_are_on_whatever_the_caller_switched_off():
    model, batch = build("bert"), next(inputs("bert"))
    expected = verified(model, batch, forward=forward)
    with torch.no_grad():
        assert verified(model, batch, forward=forward) == expected
    with torch.inference_mode():
        assert verified(model, tree_map(torch.clone, batch), forward=forward) == expected


class Unnamed(torch.nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def test_heads_of_a_class_that_only_a_batch_tells_are_verified():
    """Nothing was counted, and nothing certified it; later key biases were counted and stood still."""
    seen = []

    def watched(model, batch):
        seen.append(model[0].in_proj_bias.detach()[8:16].clone())
        return model(batch)

    model = torch.nn.Sequential(Unnamed(8, 2, batch_first=True))
    report = verified(model, torch.randn(2, 3, 8), forward=watched)
    assert {"qk", "vo", "key bias"} <= set(by_kind(report.changes))
    assert report.ok
    assert not bool(model[0].in_proj_bias.any())
    assert any(bool(key_bias.any()) for key_bias in seen)

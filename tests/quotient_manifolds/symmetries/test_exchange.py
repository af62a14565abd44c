"""Symmetries as JSON, and acting with them on a state dict."""

import copy
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import ALL, Symmetries, canonical_form, find, from_json, moved_weights, to_json
from quotient_manifolds.symmetries.whole import State
from tests.support import architectures
from tests.support.extent import share
from tests.support.whole_networks import FAMILIES, build, forward, inputs


def outputs(model, batch):
    """Up to a constant in the logits, which a softmax does not see."""
    with torch.no_grad():
        return forward(model, batch).log_softmax(-1)


@pytest.mark.parametrize("family", share(FAMILIES, 2))
def test_what_is_read_is_what_was_written_and_moves_the_weights_alone(family):
    model, batch = build(family), next(iter(inputs(family)))
    found = find(model, scope=ALL, classes=True)
    read = from_json(to_json(found))
    assert read == found
    before, weights = outputs(model, batch), model.state_dict()
    twin = copy.deepcopy(model)
    twin.load_state_dict(moved_weights(weights, read, seed=3))
    torch.testing.assert_close(outputs(twin, batch), before, rtol=0, atol=1e-8)
    assert (
        max(float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        > 0.5
    )
    assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())


@pytest.mark.parametrize("family", share(FAMILIES, 2, 1))
def test_a_wrong_action_of_any_kind_changes_the_outputs(family):
    """The change of every entry is multiplied by a number of its own."""
    model, batch = build(family), next(iter(inputs(family)))
    found, generator = find(model, scope=ALL), torch.Generator().manual_seed(0)
    form = canonical_form(dict(model.named_parameters()), found)
    base = copy.deepcopy(model)
    base.load_state_dict(form.values, strict=False)
    before, weights = outputs(base, batch), {name: p.detach() for name, p in base.named_parameters()}

    def changed(moved):
        wrong = {n: weights[n] + torch.randn(v.shape, generator=generator) * (v - weights[n]) for n, v in moved.items()}
        twin = copy.deepcopy(base)
        twin.load_state_dict(wrong, strict=False)
        return float((outputs(twin, batch) - before).abs().max())

    for a in {a.kind: a for a in found.actions if a.kind != "key bias"}.values():  # of which any change has no effect
        state = State(weights)
        a.act_(state, 0.3 * torch.randn(a.shape, generator=generator))
        assert changed(state) > 1e-6, a.label
    for p in {p.kind: p for p in found.pairs}.values():
        moved = moved_weights(weights, Symmetries((p,)), seed=1)
        assert changed({name: moved[name] for name in p.names}) > 1e-6, p.name


def loaded(weights):
    """Return weights as torch reads them from a file, where they share memory, too."""
    torch.save(weights, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_pairs_of_architectures_without_a_wiring_too(name):
    model, _ = architectures.transformers_model(name, "eager")
    assert from_json(to_json(find(model))) == find(model)


def test_a_tied_weight_is_written_under_all_its_names_and_read_under_any():
    model, batch = build("gpt2"), next(iter(inputs("gpt2")))
    found, weights = find(model, scope=ALL), model.state_dict()
    assert ("lm_head.weight", "transformer.wte.weight") in found.tied
    whole = moved_weights(weights, found)
    assert torch.equal(whole["lm_head.weight"], whole["transformer.wte.weight"])
    for name in ("lm_head.weight", "transformer.wte.weight"):
        part = moved_weights({k: v for k, v in weights.items() if k != name}, found)
        assert name not in part
        assert all(torch.equal(part[k], whole[k]) for k in part)
        twin = copy.deepcopy(model)
        twin.load_state_dict(part, strict=False)
        torch.testing.assert_close(outputs(twin, batch), outputs(model, batch), rtol=0, atol=1e-8)


@pytest.mark.parametrize("again", [lambda weights: weights, loaded], ids=["model", "file"])
def test_symmetries_made_by_hand_move_all_names_of_a_tied_weight(again):
    """They know no further names: the one that was left undid the move when the state was loaded."""
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval(), torch.ones(1, 3, 8)
    model = nn.TransformerEncoder(layer, 2)
    model.layers[1] = model.layers[0]
    before, weights = model(x.double()).detach(), again(model.state_dict())
    moved = moved_weights(weights, Symmetries(find(model).pairs))
    name = "self_attn.in_proj_weight"
    assert float((moved[f"layers.1.{name}"] - weights[f"layers.1.{name}"]).abs().max()) > 1e-2
    model.load_state_dict(moved)
    assert torch.equal(model.layers[0].get_parameter(name), moved[f"layers.0.{name}"])
    torch.testing.assert_close(model(x.double()).detach(), before, rtol=0, atol=1e-10)


#: What another process does with files alone, at first with a pickle, for which it imports no table of classes.
PROGRAM = """
import pickle, sys, torch
from quotient_manifolds.symmetries import stacks
from quotient_manifolds.symmetries.orbits import move_stacks_
weights, found = torch.load("encoder.pt"), pickle.load(open("found", "rb"))
move_stacks_(stacks(found.pairs, weights), weights, 10.0, 0)
torch.save(weights, "moved encoder.pt")
print(hash(found.pairs[0].slots) != 0, "quotient_manifolds.symmetries.attention" in sys.modules)
from quotient_manifolds.symmetries import from_json, moved_weights
found = from_json(open("symmetries.json", encoding="utf-8").read())
torch.save(moved_weights(torch.load("weights.pt"), found), "moved.pt")
print("transformers" in sys.modules)
"""


def test_another_process_moves_files_without_the_model(tmp_path):
    """It imports no model, and moves checkpoints along the orbits: by a pickle, and by JSON."""
    model, batch = build("vit"), next(iter(inputs("vit")))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "symmetries.json").write_text(to_json(find(model, scope=ALL)), encoding="utf-8")
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 5, 8)
    torch.save(layer.state_dict(), tmp_path / "encoder.pt")
    (tmp_path / "found").write_bytes(pickle.dumps(find(layer)))
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, encoding="utf-8", check=True
    )
    assert ran.stdout.split() == ["True", "False", "False"]
    twin = copy.deepcopy(layer)
    twin.load_state_dict(torch.load(tmp_path / "moved encoder.pt"))
    assert (twin.self_attn.in_proj_weight - layer.self_attn.in_proj_weight).abs().max() > 0.1
    torch.testing.assert_close(twin(x), layer(x), rtol=1e-10, atol=1e-10)
    twin = copy.deepcopy(model)
    twin.load_state_dict(torch.load(tmp_path / "moved.pt"))
    torch.testing.assert_close(outputs(twin, batch), outputs(model, batch), rtol=0, atol=1e-8)
    assert not torch.equal(twin.classifier.weight, model.classifier.weight)


def test_what_is_no_such_file_is_said():
    found = find(build("vit"), scope=ALL)
    for text in ("", "{", "[]", "{}", '{"type": "Slot"}'):
        with pytest.raises(ValueError, match="no symmetries as JSON"):
            from_json(text)
    newer = {**json.loads(to_json(found)), "schema": 99}
    with pytest.raises(ValueError, match="another version of the format than 1; update"):
        from_json(json.dumps(newer))
    with pytest.raises(ValueError, match="no symmetries as JSON"):
        from_json(json.dumps({**json.loads(to_json(found)), "more": 1}))
    weights = build("vit").state_dict()
    del weights["classifier.weight"]
    with pytest.raises(ValueError, match=r"no weight 'classifier\.weight'; the names must be those of"):
        moved_weights(weights, found)

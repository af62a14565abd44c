from collections import Counter

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quotient_manifolds.symmetries import canonicalize_, find
from quotient_manifolds.symmetries.layout import table
from quotient_manifolds.symmetries.listing import actions_of
from quotient_manifolds.symmetries.whole import (
    Site,
    State,
    Wiring,
    affine,
    norm,
    register_wiring,
    wiring_of,
)  # fmt: skip
from quotient_manifolds.weights import weights_of
from tests import networks
from tests.whole_networks import build, folded, forward, inputs


@pytest.mark.parametrize(
    ("module", "shape"), [(nn.Linear(3, 2), (2, 3)), (Conv1D(2, 3), (2, 3)), (nn.Conv2d(3, 2, 2), (2, 12))]
)
def test_matrices_are_outputs_by_inputs(module, shape):
    net = nn.Sequential(module)
    a, state = affine(net, "0"), State(weights_of(net))
    assert state.read(a.matrix).shape == shape
    state.write(a.matrix, 2 * state.read(a.matrix))
    torch.testing.assert_close(state["0.weight"], 2 * module.weight.detach().double())
    state.add(a.bias, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(state["0.bias"], module.bias.detach().double() + 1)
    assert module.weight.shape[a.stream_dim] == 2
    assert [rows.size[1] for rows in a.written] == [2, 2]  # each row is a vector of outputs
    torch.testing.assert_close(state.read(a.written[0]), state.read(a.matrix).T)


def test_part_of_the_inputs():
    net = nn.Sequential(layer := nn.Linear(4, 2))
    state = State(weights_of(net))
    state.write(affine(net, "0", inputs=slice(1, 3)).matrix, torch.zeros(2, 2, dtype=torch.float64))
    expected = layer.weight.detach().double().clone()
    expected[:, 1:3] = 0
    torch.testing.assert_close(state["0.weight"], expected)


def test_part_of_the_outputs():
    net = nn.Sequential(layer := nn.Linear(2, 4))
    part, state = affine(net, "0", outputs=slice(1, 3)), State(weights_of(net))
    state.write(part.matrix, 2 * state.read(part.matrix))
    state.add(part.bias, torch.ones(2, dtype=torch.float64))
    factor, added = (torch.tensor([a, b, b, a], dtype=torch.float64) for a, b in ((1, 2), (0, 1)))
    torch.testing.assert_close(state["0.weight"], layer.weight.detach().double() * factor[:, None])
    torch.testing.assert_close(state["0.bias"], layer.bias.detach().double() + added)


def test_rows_of_a_table():
    net = nn.Sequential(words := nn.Embedding(4, 3))
    state, (rows,) = State(weights_of(net)), table(net, "0[1:]")
    state.add(rows, torch.ones(3, dtype=torch.float64))
    expected = words.weight.detach().double().clone()
    expected[1:] += 1
    torch.testing.assert_close(state["0.weight"], expected)


def test_gains_with_an_offset():
    net = nn.Sequential(nn.LayerNorm(3))
    found = norm(net, "0", offset=1.0).gamma(State(weights_of(net)), torch.zeros(3))
    assert torch.equal(found, torch.full((3,), 2.0, dtype=torch.float64))


def test_ties_are_seen():
    class Tied(nn.Sequential):
        pass

    @register_wiring(Tied)
    def wiring(net):
        site = Site("last", norm(net, "1"), (affine(net, "2"),))
        return Wiring(sites=[site], tables=[("words", *table(net, "0"))])

    words, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    net = Tied(words, nn.LayerNorm(4), head, nn.LayerNorm(4))
    assert not wiring_of(net).tied()
    head.weight = words.weight
    assert wiring_of(net).tied() == {"0.weight"}
    shared = Wiring(sites=[*wiring(net).sites, Site("again", norm(net, "3"), (affine(net, "2"),))])
    assert shared.tied() == {"2.weight"}


def test_subclasses_and_strangers_are_not_known():
    class Mine(nn.Sequential):
        pass

    class Other(Mine):
        pass

    register_wiring(Mine)(lambda model: Wiring())
    assert wiring_of(Mine()) == Wiring()
    assert wiring_of(torch.nn.DataParallel(Mine())) == Wiring()
    assert wiring_of(Other()) is None


def test_a_mistake_in_an_adapter_is_told():
    """Of a user's own adapter; it once counted as a network that nobody had described."""

    class Mistaken(nn.Sequential):
        pass

    @register_wiring(Mistaken)
    def adapter(model):
        return Wiring(sites=[Site("0", norm(model, "0"), (affine(model, "head"),))])

    with pytest.raises(AttributeError, match="head"):
        wiring_of(Mistaken(nn.LayerNorm(4), nn.Linear(4, 3)))


def test_replaced_and_shared_layers():
    """A class says what its own layers do, not what was put in their place."""
    model = build("vit")
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(8, 3)).double()
    assert not wiring_of(model).sites
    for name in ("bert", "vit"):
        model = build(name)
        layers = model.bert.encoder.layer if name == "bert" else networks.vit_layers(model)
        if name == "bert":
            layers[1] = layers[0]
        else:
            layers[1].layernorm_before = layers[0].layernorm_before
        (batch,) = inputs(name)
        before = forward(model, batch)
        canonicalize_(model)
        torch.testing.assert_close(forward(model, batch), before, rtol=1e-10, atol=1e-11)


def state_at(model, values):
    """A state with some values."""
    state = State(weights_of(model))
    state.update(values)
    return state


@pytest.mark.parametrize("family", ["dinov2", "roberta", "qwen3"])
def test_each_symmetry_alone_leaves_the_outputs_and_folds_back(family):
    """Symmetry by symmetry: a move from the canonical form changes nothing, and folding undoes it."""
    model = build(family)
    (batch,) = inputs(family)
    form, before = folded(model), forward(model, batch)
    at = state_at(model, form.values)

    def outputs(state):
        return torch.func.functional_call(model, dict(state), (), batch).logits

    for i, s in enumerate(form.symmetries.actions):
        state = state_at(model, form.values)
        t = 0.3 * torch.randn(s.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        s.act_(state, t)
        after = outputs(state)
        assert float((after - before).detach().abs().max() / before.detach().abs().max()) < 1e-12, s
        moved = [name for name in state if not torch.equal(state[name], at.of(name))]
        assert moved, s
        assert set(moved) <= set(s.names), s
        if s.kind == "rotation":
            continue
        s.fold_(state)
        for name in moved:
            torch.testing.assert_close(state[name], at.of(name), rtol=1e-9, atol=1e-10)
        wrong = state_at(model, form.values)
        wrong[moved[0]] = at.of(moved[0]) + (at.of(moved[0]) - torch.randn_like(at.of(moved[0]))) * 0.3
        if i % 7 == 0:
            assert float((outputs(wrong) - before).detach().abs().max()) > 1e-6 or s.kind == "key bias"


def test_a_move_of_nothing_is_none():
    model = build("bert")
    form = folded(model)
    at = state_at(model, form.values)
    for s in form.symmetries.actions:
        state = state_at(model, form.values)
        s.act_(state, torch.zeros(s.shape, dtype=torch.float64))
        for name in s.names:
            torch.testing.assert_close(state.of(name), at.of(name), rtol=0, atol=1e-14)


def listed(model, classes=False):
    found, refused = actions_of(wiring_of(model), find(model).pairs, weights_of(model), classes=classes)
    return Counter(s.kind for s in found), {f"{r.kind}: {r.module}" for r in refused}


def test_ties_close_doors():
    """A tied unembedding keeps the last norm, and the stream's frame."""
    tied, refused = listed(build("gpt2"))
    untied, none = listed(build("gpt2-untied"))
    assert untied["gain"] - tied["gain"] == 1
    assert (untied["rotation"], tied["rotation"]) == (1, 0)
    assert not none
    assert {"gain: ln_f", "shift: ln_f", "writer: wte", "embeddings: wpe"} <= refused


def test_rms_norms_see_the_mean():
    found, _ = listed(build("llama"))
    assert found == {"gain": 5, "rotation": 1}


def test_post_norm_keeps_its_gains():
    found, _ = listed(build("bert"))
    assert found["gain"] == 1  # the last, which the pooler alone reads
    assert found["shift"] == 5
    assert "rotation" not in found


def test_logits_of_a_softmax():
    without, _ = listed(build("vit"))
    found, _ = listed(build("vit"), classes=True)
    assert found["classes"] == 2  # of weights, and of biases, which may be all that moves
    assert without["classes"] == 0
    assert actions_of(None, [], {}, classes=True) == ([], [])

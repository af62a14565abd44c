import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quotient_manifolds.symmetries import ALL, Cause, canonicalize_, find, moved_weights
from quotient_manifolds.symmetries.folding import actions_of, renamed
from quotient_manifolds.symmetries.layout import table
from quotient_manifolds.symmetries.notation import NamedRows
from quotient_manifolds.symmetries.whole import (
    Site,
    State,
    Wiring,
    affine,
    norm,
    register_wiring,
    wiring_of,
)  # fmt: skip
from quotient_manifolds.weights import naming, weights_of
from tests.support import networks
from tests.support.whole_networks import build, folded, forward, inputs


@pytest.mark.parametrize(
    ("module", "shape"), [(nn.Linear(3, 2), (2, 3)), (Conv1D(2, 3), (2, 3)), (nn.Conv2d(3, 2, 2), (2, 12))]
)
def test_matrices_are_outputs_by_inputs(module, shape):
    net = nn.Sequential(module)
    a, state = affine(net, "0"), State(weights_of(net))
    assert a.matrix.read(state).shape == shape
    state.write(a.matrix, 2 * a.matrix.read(state))
    torch.testing.assert_close(state["0.weight"], 2 * module.weight.detach().double())
    state.write(a.bias, a.bias.read(state) + torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(state["0.bias"], module.bias.detach().double() + 1)
    assert [rows.size[1] for rows in a.written] == [2, 2]  # each row is a vector of outputs
    torch.testing.assert_close(a.written[0].read(state), a.matrix.read(state).T)


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
    state.write(part.matrix, 2 * part.matrix.read(state))
    state.write(part.bias, part.bias.read(state) + torch.ones(2, dtype=torch.float64))
    factor, added = (torch.tensor([a, b, b, a], dtype=torch.float64) for a, b in ((1, 2), (0, 1)))
    torch.testing.assert_close(state["0.weight"], layer.weight.detach().double() * factor[:, None])
    torch.testing.assert_close(state["0.bias"], layer.bias.detach().double() + added)


def test_rows_of_a_table():
    net = nn.Sequential(words := nn.Embedding(4, 3))
    state, (rows,) = State(weights_of(net)), table(net, NamedRows.read("0[1:]"))
    state.write(rows, rows.read(state) + torch.ones(3, dtype=torch.float64))
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
        return Wiring(sites=[site], tables=[("words", *table(net, NamedRows(("0",))))])

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


def test_a_value_bias_is_moved_against_the_bias_of_its_own_layer():
    """Layers that share the matrix of their outputs have biases of their own; that of the first was taken for all."""
    model, (batch,) = build("bert"), inputs("bert")
    first, second = (layer.attention for layer in model.bert.encoder.layer)
    first.self.value.bias = None
    own = [a for a in find(model, scope=ALL).actions if a.kind == "value bias"]
    second.output.dense.weight = first.output.dense.weight
    before, found = forward(model, batch), find(model, scope=ALL)
    heads = {f"bert.encoder.layer.0.attention vo head {head}" for head in (0, 1)}
    assert {r.name for r in found.refused if r.kind == "value bias"} == heads

    def change(symmetries):
        twin = copy.deepcopy(model)
        twin.load_state_dict(moved_weights(model.state_dict(), symmetries))
        return float((forward(twin, batch) - before).detach().abs().max())

    assert change(found) < 1e-9
    wrong = [replace(a, outputs=tuple((m, replace(b, name=_first(b.name))) for m, b in a.outputs)) for a in own]
    assert change(replace(found, pairs=(), actions=tuple(wrong))) > 1e-3


def _first(name):
    return name.replace("layer.1", "layer.0")


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
        moved = [name for name in state if not torch.equal(state[name], at[name])]
        assert moved, s
        assert set(moved) <= set(s.names), s
        if s.kind == "rotation":
            continue
        s.fold_(state)
        for name in moved:
            torch.testing.assert_close(state[name], at[name], rtol=1e-9, atol=1e-10)
        wrong = state_at(model, form.values)
        wrong[moved[0]] = at[moved[0]] + (at[moved[0]] - torch.randn_like(at[moved[0]])) * 0.3
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
            torch.testing.assert_close(state[name], at[name], rtol=0, atol=1e-14)


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


#: What is tied to what, in the two layers of OPT, and the kinds of pairs that both belong to.
TIES = {
    "fc1.weight = self_attn.out_proj.weight": {"relu", "vo"},
    "fc1.weight = self_attn.v_proj.weight": {"relu", "vo"},
    "fc2.weight = self_attn.q_proj.weight": {"relu", "qk"},
    "fc1.bias = final_layer_norm.weight": {"relu"},
    "self_attn.k_proj.bias = self_attn_layer_norm.weight": {"qk"},
}


@pytest.mark.parametrize("tie", TIES)
def test_a_pair_of_which_a_weight_is_used_elsewhere_too_is_refused(tie):
    """By another kind of pair, or by no pair at all: its moves change the outputs."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    options = {"hidden_size": 8, "ffn_dim": 8, "word_embed_proj_dim": 8, "vocab_size": 11}
    config = OPTConfig(num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8, **options)
    model = OPTForCausalLM(config).double().eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    pairs = find(model, scope=ALL).pairs
    first, second = model.model.decoder.layers
    (own, name), (other, source) = (side.rsplit(".", 1) for side in tie.split(" = "))
    setattr(first.get_submodule(own), name, getattr(second.get_submodule(other), source))
    found, batch = find(model, scope=ALL), torch.arange(6)[None]
    before = model(batch).logits.detach()

    def change(symmetries):
        twin = copy.deepcopy(model)
        twin.load_state_dict(moved_weights(model.state_dict(), symmetries))
        return float((twin(batch).logits - before).detach().abs().max())

    assert {r.kind for r in found.refused if r.cause is Cause.SHARED} >= TIES[tie]
    left = {p.name for p in found.pairs}
    assert {p.kind for p in pairs if p.name not in left} == TIES[tie]
    assert change(found) < 1e-9
    names = naming(model)
    wrong = tuple(renamed(p, lambda name: names("", name)) for p in pairs if p.name not in left)
    assert change(replace(found, pairs=wrong, actions=())) > 1e-3

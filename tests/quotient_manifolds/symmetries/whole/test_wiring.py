import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quotient_manifolds.symmetries.whole import (
    Affine,
    Norm,
    Site,
    State,
    Table,
    Wiring,
    canonicalize_,
    register_wiring,
    wiring_of,
)
from tests.whole_networks import build, forward, inputs


@pytest.mark.parametrize(
    ("module", "transposed", "shape"),
    [(nn.Linear(3, 2), False, (2, 3)), (Conv1D(2, 3), True, (2, 3)), (nn.Conv2d(3, 2, 2), False, (2, 12))],
)
def test_matrices_are_outputs_by_inputs(module, transposed, shape):
    a, state = Affine(module, transposed=transposed), State()
    assert a.matrix(state).shape == shape
    a.set_matrix(state, 2 * a.matrix(state))
    torch.testing.assert_close(state[module.weight], 2 * module.weight.detach().double())
    a.add_to_bias(state, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(state[module.bias], module.bias.detach().double() + 1)


def test_part_of_the_inputs():
    layer, state = nn.Linear(4, 2), State()
    Affine(layer, inputs=(1, 3)).set_matrix(state, torch.zeros(2, 2, dtype=torch.float64))
    expected = layer.weight.detach().double().clone()
    expected[:, 1:3] = 0
    torch.testing.assert_close(state[layer.weight], expected)


def test_part_of_the_outputs():
    layer, state = nn.Linear(2, 4), State()
    part = Affine(layer, outputs=(1, 3))
    part.set_matrix(state, 2 * part.matrix(state))
    part.add_to_bias(state, torch.ones(2, dtype=torch.float64))
    factor, added = (torch.tensor([a, b, b, a], dtype=torch.float64) for a, b in ((1, 2), (0, 1)))
    torch.testing.assert_close(state[layer.weight], layer.weight.detach().double() * factor[:, None])
    torch.testing.assert_close(state[layer.bias], layer.bias.detach().double() + added)


def test_rows_of_a_table():
    table, state = nn.Embedding(4, 3), State()
    Table(table, rows=(1, None)).add(state, torch.ones(3, dtype=torch.float64))
    expected = table.weight.detach().double().clone()
    expected[1:] += 1
    torch.testing.assert_close(state[table.weight], expected)


def test_gains_with_an_offset():
    norm = nn.LayerNorm(3)
    assert torch.equal(Norm(norm, True, offset=1.0).gamma(State()), torch.full((3,), 2.0, dtype=torch.float64))


def test_ties_are_seen():
    words, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    site = Site("last", Norm(nn.LayerNorm(4), True), (Affine(head),))
    wiring = Wiring(sites=[site], tables=[("words", Table(words))])
    assert not wiring.tied()
    head.weight = words.weight
    assert wiring.tied() == {words.weight}
    shared = Wiring(sites=[site, Site("again", Norm(nn.LayerNorm(4), True), (Affine(head),))])
    assert shared.tied() == {head.weight}


def test_subclasses_and_strangers_are_not_known():
    class Mine(nn.Sequential):
        pass

    class Other(Mine):
        pass

    register_wiring(Mine)(lambda model: Wiring())
    assert wiring_of(Mine()) == Wiring()
    assert wiring_of(torch.nn.DataParallel(Mine())) == Wiring()
    assert wiring_of(Other()) is None


def test_replaced_and_shared_layers():
    """A class says what its own layers do, not what was put in their place."""
    model = build("vit")
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(8, 3)).double()
    assert not wiring_of(model).sites
    for name in ("bert", "vit"):
        model = build(name)
        layers = model.bert.encoder.layer if name == "bert" else model.vit.layers
        if name == "bert":
            layers[1] = layers[0]
        else:
            layers[1].layernorm_before = layers[0].layernorm_before
        (batch,) = inputs(name)
        before = forward(model, batch)
        canonicalize_(model)
        torch.testing.assert_close(forward(model, batch), before, rtol=1e-10, atol=1e-11)

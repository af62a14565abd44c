"""The lengths that weight normalisation divides by: W = g v / |v|."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import sharpness
from quotient_manifolds.symmetries import (
    ALL,
    Cause,
    Symmetries,
    canonicalize_,
    find,
    from_json,
    moved_weights,
    slot,
    to_json,
    verify,
)
from quotient_manifolds.symmetries.kinds import Length
from tests.support.whole_networks import normalised

pytestmark = pytest.mark.filterwarnings("ignore:.*no adapter describes")
#: Dimensions that the convolution and the last layer keep in their lengths, and how many lengths these have.
DIMS = {(0, 0): (3, 4), (1, 1): (2, 9), (2, None): (2, 1), (-2, -1): (2, 1)}
every = pytest.mark.parametrize("dims", DIMS)


def batch(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def moved(model, found):
    twin = copy.deepcopy(model)
    twin.load_state_dict(moved_weights(model.state_dict(), found, scale=1.0))
    return twin


def largest(a, b):
    return float((a - b).detach().abs().max())


def null_directions(model, x):
    """How many directions of the weights change no output: all but the rank of the dense Jacobian."""
    weights = list(model.parameters())
    rows = (torch.autograd.grad(y, weights, retain_graph=True) for y in model(x).flatten())
    jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    return jacobian.shape[1] - int(torch.linalg.matrix_rank(jacobian, rtol=1e-10))


@every
def test_they_are_all_that_the_network_does_not_see(dims):
    model, x = normalised(*dims), batch(40, 2, 4)
    found = find(model, scope=ALL)
    assert [(a.label, a.dimension) for a in found.actions] == [
        ("length: 0.weight", DIMS[dims][0]), ("length: 3.weight", DIMS[dims][1])
    ]  # fmt: skip
    assert null_directions(model, x) == found.dimension
    assert from_json(to_json(found)) == found
    certificate = verify(model, x, found)
    assert certificate.ok
    assert set(certificate.residuals) == set(certificate.changes) == set(found.actions)


@every
def test_equivalent_weights_meet_where_lengths_are_one(dims):
    model, x = normalised(*dims), batch(40, 2, 4)
    found, before = find(model, scope=ALL), model(x).detach()
    twin = moved(model, found)
    assert largest(twin(x), before) < 1e-12
    for a in found.actions:
        name = a.rows.name
        assert largest(twin.get_parameter(name), model.get_parameter(name)) > 0.01
    assert largest(twin[3].weight, model[3].weight) < 1e-12
    loss = lambda m, b: m(b).square().mean()  # noqa: E731
    one, two = (
        float(sharpness.evaluate(m, [x], loss, measure="complete-inv", steps=3, progress=False)) for m in (model, twin)
    )
    assert two == pytest.approx(one, rel=1e-9)
    for m in (model, twin):
        assert canonicalize_(m) == found
        assert largest(m(x), before) < 1e-12
        for layer, dim in zip((m[0], m[3]), dims, strict=True):
            lengths = torch.norm_except_dim(layer.parametrizations.weight.original1, 2, -1 if dim is None else dim)
            assert largest(lengths, torch.ones_like(lengths)) < 1e-12
    once = copy.deepcopy(model)
    canonicalize_(model)
    for p, q, r in zip(once.parameters(), model.parameters(), twin.parameters(), strict=True):
        assert largest(p, q) < 1e-15
        assert largest(p, r) < 1e-12


@pytest.mark.parametrize("wrong", ["original0", "original1"])
def test_lengths_of_something_else_are_no_symmetry(wrong):
    """Of the gains; of rows along another dimension than that of the norm."""
    model, x = normalised(), batch(40, 2, 4)
    other = Symmetries(actions=(Length("length", "0", slot(model, f"0.parametrizations.weight.{wrong}")),))
    assert largest(moved(model, other)(x), model(x)) > 1e-3
    certificate = verify(model, x, other)
    assert certificate.failures == other.actions
    assert certificate.residuals[other.actions[0]] > 1e-3


def sharing(use):
    """Two layers with one v: both normalised alike, differently, one of them not at all, or one whose g it is too."""
    torch.manual_seed(0)
    if use == "gains":
        model = nn.Sequential(weight_norm(nn.Linear(1, 4)), nn.Tanh()).double()
        model[0].parametrizations.weight.original1 = model[0].parametrizations.weight.original0
        return model
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(weight_norm(first), nn.Tanh(), second).double()
    v = model[0].parametrizations.weight.original1
    if use == "plain":
        second.weight = v
    else:
        weight_norm(second, dim={"alike": 0, "differently": 1}[use]).parametrizations.weight.original1 = v
    return model


@pytest.mark.parametrize("use", ["alike", "differently", "plain", "gains"])
def test_what_else_uses_the_rows_must_divide_by_the_same_lengths(use):
    model = sharing(use)
    x, found = batch(9, model[0].in_features), find(model, scope=ALL)
    assert largest(moved(model, found)(x), model(x)) < 1e-12
    assert [a.label for a in found.actions] == ["length: 0.weight"] * (use == "alike")
    places = {"alike": [], "differently": ["0.weight", "2.weight"]}.get(use, ["0.weight"])
    assert [(r.name, r.cause) for r in found.refused] == [(place, Cause.SHARED) for place in places]
    rows = Length("length", "0", slot(model, "0.parametrizations.weight.original1"))
    change = largest(moved(model, replace(found, actions=(rows,)))(x), model(x))
    assert change < 1e-12 if use == "alike" else change > 1e-3


def test_each_weight_of_a_module_has_its_own_and_one_that_is_used_twice_counts_once():
    torch.manual_seed(0)
    layer = weight_norm(weight_norm(nn.Linear(4, 6)), "bias").double()
    model, x = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 4).double(), layer), batch(9, 4)
    found = find(model, scope=ALL)
    assert [(a.label, a.dimension) for a in found.actions] == [("length: 0.weight", 6), ("length: 0.bias", 6)]
    assert verify(model, x, found).ok
    twin = moved(model, found)
    assert largest(twin(x), model(x)) < 1e-12
    canonicalize_(twin)
    assert largest(twin[0].parametrizations.bias.original1.abs(), torch.ones(6)) < 1e-15


def test_rows_of_zeros_stay_and_complex_ones_are_left_alone():
    model = normalised()
    v = model[3].parametrizations.weight.original1
    with torch.no_grad():
        v[0] = 0.0
    canonicalize_(model)
    assert not v[0].any()
    assert largest(v[1:].norm(dim=1), torch.ones(3)) < 1e-12
    assert find(weight_norm(nn.Conv1d(2, 3, 2, dtype=torch.complex128), dim=1), scope=ALL) == Symmetries()


def test_the_convolution_of_positions_in_speech_models_is_normalised_along_its_kernel():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        conv_dim=(4,), conv_kernel=(4,), conv_stride=(2,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=5, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, x = Wav2Vec2Model(config).double().eval(), batch(2, 40)
    (length,) = (a for a in find(model, scope=ALL).actions if a.kind == "length")
    assert (length.name, length.dimension) == ("encoder.pos_conv_embed.conv.weight", 5)
    twin = moved(model, Symmetries(actions=(length,)))
    assert largest(twin(x)[0], model(x)[0]) < 1e-12
    assert verify(model, x, Symmetries(actions=(length,))).ok

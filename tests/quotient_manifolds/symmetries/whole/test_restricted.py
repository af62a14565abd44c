"""The symmetries of whole networks as a value, and what is left of them where only some weights move."""

import copy
import dataclasses
import pickle
from enum import Enum

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import sharpness
from quotient_manifolds.symmetries import (
    ALL,
    Cause,
    canonicalize_,
    find,
    from_json,
    move_,
    slot,
    to_json,
    verify,
)
from quotient_manifolds.symmetries.folding import canonical_form, write_values
from quotient_manifolds.symmetries.kinds import Scale
from quotient_manifolds.symmetries.whole import State
from quotient_manifolds.weights import weights_of
from tests.support.extent import EXHAUSTIVE, checkered, share
from tests.support.whole_networks import BACKBONES, FAMILIES, build, folded, forward, headed, inputs, symmetries_of

#: LayerScale, shifts that the next sublayer takes back, a bias for each of several readers, tied words, norms of
#: queries and keys.
SOME = FAMILIES if EXHAUSTIVE else ["dinov2", "roberta", "gpt2-untied", "llama-tied", "qwen3", "timm-no-bias"]


def difference(a, b):
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def normalised(name):
    """A network of which a layer is normalised by its weights' lengths."""
    model = build(name)
    parametrizations.weight_norm(model.model.decoder.layers[0].fc1)
    return model


def parts(value):
    """All that a value consists of."""
    yield value
    if dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    for part in value if isinstance(value, (list, tuple, set)) else ():
        yield from parts(part)


@pytest.mark.parametrize("family", [*FAMILIES, "weight norm"])
def test_they_are_names_and_numbers(family):
    """No module, tensor or function is in them, nor anything that another process could not read."""
    model = normalised("opt") if family == "weight norm" else build(family)
    found = find(model, scope=ALL, classes=True)
    assert found.actions
    for part in parts(found):
        plain = isinstance(part, (str, int, float, Enum, tuple, list, set, type(None)))
        assert plain or dataclasses.is_dataclass(part), part
        assert not vars(part) if isinstance(part, (tuple, list, set)) and hasattr(part, "__dict__") else True
    for same in (
        copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)),
        find(copy.deepcopy(model), scope=ALL, classes=True),
    ):
        assert same == found
        assert same.table() == found.table()
    again = pickle.loads(pickle.dumps(found.actions))
    assert {a: i for i, a in enumerate(found.actions)} == {a: i for i, a in enumerate(again)}
    slots = [s for a in found.actions for s in (*a.needed, *a.constant)]
    assert {s.name for s in slots} <= set(weights_of(model))
    assert all(set(a.names) == {s.name for s in a.slots} and set(a.constant) <= set(a.slots) for a in found.actions)


@pytest.mark.parametrize("family", [*FAMILIES, *(f for f in BACKBONES if f not in FAMILIES)])
def test_a_label_names_one_symmetry(family):
    """So that it tells what must be folded before; kind and place do not, nor kind and weight."""
    model = build(family) if family in FAMILIES else headed(family, BACKBONES[family][-1])[0]
    found = find(model, scope=ALL, classes=True)
    labels = [s.label for s in found]
    assert len(set(labels)) == len(labels)
    assert {label for a in found.actions for label in a.after} <= set(labels)
    if family == "dinov2":
        assert len({(a.kind, a.name) for a in found.actions}) < len(found.actions)
        assert len({(a.kind, a.names[0]) for a in found.actions}) < len(found.actions)


@pytest.mark.parametrize("family", share(FAMILIES, 2))
def test_what_is_trained_makes_no_difference(family):
    model = build(family)
    found = find(model, scope=ALL, classes=True)
    for trained in (lambda i: False, lambda i: i % 2 == 0, lambda i: i % 3 == 0):
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(trained(i))
        assert find(model, scope=ALL, classes=True) == found
        assert [p.requires_grad for p in model.parameters()] == [trained(i) for i, _ in enumerate(model.parameters())]
    assert found.restricted(weights_of(model)) == found


@pytest.mark.parametrize("family", share(SOME, 2, 1))
def test_the_function_stays_whichever_weight_is_frozen(family):
    """Rotations moved the stream past a shift that a frozen bias had kept."""
    model, (batch,) = build(family), inputs(family)
    before, weights = forward(model, batch), weights_of(model)
    given = {name: p.detach().clone() for name, p in weights.items()}
    full = symmetries_of(model)
    for name in weights:
        found = full.restricted(set(weights) - {name})
        part_of_one = any(name in each.names for each in (*full.pairs, *full.actions))
        assert (found.dimension < full.dimension) == part_of_one
        form = canonical_form(weights, found)
        assert name not in {n for each in (*found.pairs, *found.actions) for n in each.names} | set(form.values)
        write_values(weights, form.values)
        assert difference(forward(model, batch), before) < 1e-11, name
        move_(model, found)
        assert difference(forward(model, batch), before) < 1e-10, name
        assert torch.equal(weights[name], given[name])
        write_values(weights, given)


def test_a_frozen_weight_moved_all_the_same_is_seen():
    """What was refused would have changed the function: a writer is centred behind a scale that stays."""
    model, (batch,) = build("dinov2"), inputs("dinov2")
    before, weights = forward(model, batch), weights_of(model)
    found = symmetries_of(model)
    scales = {s.name for a in found.actions if a.kind == "layer scale" for s in (a.unit,)}
    left = found.restricted(set(weights) - scales)
    wrong = dataclasses.replace(left, actions=(*left.actions, *(a for a in found.actions if a.kind == "writer")))
    for some, ok in ((left, True), (wrong, False)):
        twin = copy.deepcopy(model)
        write_values(weights_of(twin), canonical_form(weights, some).values)
        assert (difference(forward(twin, batch), before) < 1e-11) == ok


def causes(found):
    return {f"{r.kind}: {r.module}": (r.cause, r.detail) for r in found.refused}


def test_what_must_be_folded_before():
    """A frozen LayerScale keeps its own writer from being centred, and the stream from being rotated."""
    model, scale = build("dinov2"), "dinov2.encoder.layer.0.layer_scale1.lambda1"
    full = symmetries_of(model)
    found = full.restricted(set(weights_of(model)) - {scale})
    lost = "layer scale: encoder.layer.0.norm1 scale"
    assert causes(full) == {}
    assert causes(found) == {
        lost: (Cause.FROZEN, scale),
        "writer: encoder.layer.0.norm1 writer": (Cause.UNFOLDED, lost),
        "rotation: the stream": (Cause.UNFOLDED, lost),
    }
    gone = [a for a in full.actions if a not in found.actions]
    assert [a.kind for a in gone] == ["layer scale", "writer", "rotation"]
    assert {r.slots for r in found.refused} == {a.slots for a in gone}
    assert found.dimension == full.dimension - sum(a.dimension for a in gone)
    assert f"not folded: 1 × writer (what must be folded before it cannot be: {lost})" in found.table()


def test_each_reader_of_a_norm_is_refused_for_itself():
    """Queries, keys and values have one name between them."""
    model = build("vit")
    full = symmetries_of(model)
    name = full.pairs[0].G[0].name  # the weight of the first queries
    found = full.restricted(set(weights_of(model)) - {name})
    readers = [r for r in found.refused if r.kind == "reader"]
    assert [(r.cause, r.detail, r.names) for r in readers] == [
        (Cause.FROZEN, name, (name, name.replace("weight", "bias")))
    ]
    assert found.dimensions["reader"] == full.dimensions["reader"] - 8


def test_a_bias_that_is_needed_and_frozen():
    """A gain of 0 waits for its shift; what has no bias, for that of its norm."""
    model = build("timm-no-bias")
    found = symmetries_of(model)
    left = found.restricted(set(weights_of(model)) - {"blocks.0.norm1.bias"})
    lost = {r.kind for r in left.refused if r.cause is Cause.UNFOLDED}
    assert lost == {"key bias", "value bias"}
    with torch.no_grad():
        model.blocks[0].norm2.weight[3] = 0
    left = symmetries_of(model).restricted(set(weights_of(model)) - {"blocks.0.mlp.fc1.bias"})
    assert causes(left)["gain: blocks.0.norm2"] == (Cause.UNFOLDED, "shift: blocks.0.norm2")
    with pytest.raises(ValueError, match=r"blocks.0.norm2 has a gain of 0, but had none when .* find them again"):
        canonical_form(weights_of(model), found)


@pytest.mark.parametrize("family", SOME)
def test_nothing_is_left_where_all_is_frozen(family):
    model = build(family)
    full = symmetries_of(model)
    found = full.restricted(())
    assert (found.pairs, found.actions, found.dimension, found.dimensions) == ((), (), 0, {})
    assert len(found.refused) == len(full.refused) + len(full.pairs) + len(full.actions)
    assert {r.cause for r in found.refused[len(full.refused) :]} == {Cause.FROZEN}
    form = canonical_form(weights_of(model), found)
    assert (form.values, form.constant) == ({}, {})


def tangents(found, weights):
    """The directions of all symmetries, as rows, at weights in canonical form."""

    def flat(state):
        return torch.cat([state[name].flatten() for name in weights])

    def acted(a, t):
        state = State(weights)
        a.act_(state, t)
        return flat(state)

    def turned(p, t):
        state, x = State(weights), p.gather(weights)
        L = torch.view_as_complex(t) if p.group.field == "complex" else t
        if p.group.diagonal:
            L = L[:, None, None]
            rows = torch.cat([x[:, : p.n] * (1 - L), x[:, p.n :] * (1 + L.conj())], -2)
        else:
            rows = torch.cat([x[: p.n] - x[: p.n] @ L, x[p.n :] + x[p.n :] @ L.mH])
        for s, own in zip(p.slots, p.group.from_point(rows[None])[0].split([s.size[0] for s in p.slots]), strict=True):
            state.write(s, own)
        return flat(state)

    def shape(group):
        return ((group.h,) if group.diagonal else (group.h, group.h)) + (2,) * (group.field == "complex")

    moves = [(lambda t, a=a: acted(a, t), a.shape) for a in found.actions]
    moves += [(lambda t, p=p: turned(p, t), shape(p.group)) for p in found.pairs]
    found = (torch.autograd.functional.jacobian(f, torch.zeros(s), vectorize=True) for f, s in moves)
    return torch.cat([J.reshape(len(J), -1).mT.detach() for J in found])


@pytest.mark.parametrize(("family", "rate"), checkered(share(SOME, 2), (1.0, 0.85)))
def test_dimensions_are_those_of_the_directions(family, rate):
    """None is counted twice: a symmetry knows which of its directions belong to others that are left."""
    generator = torch.Generator().manual_seed(FAMILIES.index(family))
    model = build(family)
    weights = weights_of(model)
    moving = [name for name in weights if torch.rand((), generator=generator) < rate]
    found = symmetries_of(model, classes=True).restricted(moving)
    write_values(weights, canonical_form(weights, found).values)
    sizes = torch.linalg.svdvals(tangents(found, weights))
    assert int((sizes > 1e-9 * sizes[0]).sum()) == found.dimension
    assert float(sizes[found.dimension - 1] / sizes[0]) > 1e-4


@pytest.mark.parametrize("frozen", [["classifier.bias"], ["vit.embeddings.patch_embeddings.projection.weight"]])
def test_directions_that_others_had_too_are_counted_where_these_are_refused(frozen):
    """A classifier's part along 1/γ is its reader's, the constant part of positions that of their writers."""
    model = build("vit")
    weights, full = weights_of(model), symmetries_of(model, classes=True)
    found = full.restricted(set(weights) - set(frozen))
    kind = "classes" if frozen == ["classifier.bias"] else "embeddings"
    before, after = ([a.dimension for a in f.actions if a.kind == kind] for f in (full, found))
    assert max(after) == 1 + max(before) == 8
    alone = full.of_kind([kind])
    assert max(a.dimension for a in alone.actions) == 8
    assert alone.restricted(weights) == alone
    assert full.restricted(weights) == full
    write_values(weights, canonical_form(weights, found).values)
    assert int(torch.linalg.matrix_rank(tangents(found, weights), rtol=1e-9)) == found.dimension


def test_a_form_names_what_it_holds():
    form = folded(build("bert"))
    assert set(form.constant) <= set(form.values) | {name for a in form.symmetries.actions for name in a.names}
    assert all(mask.dtype == torch.bool and mask.any() for mask in form.constant.values())


class Gated(nn.Module):
    """A vector of gains in front of a linear layer: γ s, W / s."""

    def __init__(self):
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.rand(4) + 0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(self.gain * x)


def test_symmetries_of_ones_own_are_folded_moved_verified_and_divided_out():
    torch.manual_seed(0)
    model, batch = Gated().double(), (torch.randn(5, 4).double(), torch.arange(5) % 3)
    unit, columns = slot(model, "gain"), slot(model, "linear.weight")
    mine, wrong = (Scale("gate", name, unit, (), rows) for name, rows in (("mine", (columns,)), ("wrong", ())))
    found = find(model).adding(mine)
    assert verify(model, batch[0], found).ok
    assert verify(model, batch[0], find(model).adding(wrong)).failures == (wrong,)
    assert from_json(to_json(found)) == found
    twin, options = copy.deepcopy(model), {"measure": "complete-inv", "rho": 0.1, "steps": 3, "progress": False}
    assert move_(twin, found) == {"gate": 1}
    assert torch.allclose(twin(batch[0]), model(batch[0]))
    values = [float(sharpness.evaluate(m, [batch], symmetries=found, **options)) for m in (model, twin)]
    assert values[1] == pytest.approx(values[0], rel=1e-9)
    with pytest.warns(UserWarning, match="Gated: no adapter describes how this network is wired"):
        others = [float(sharpness.evaluate(m, [batch], **options)) for m in (model, twin)]
    assert others[1] != pytest.approx(others[0], rel=1e-3)
    canonicalize_(twin, found)
    assert torch.equal(twin.gain, torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="two symmetries are called 'gate: mine'; give each of yours another name"):
        found.adding(mine)
    with pytest.raises(TypeError, match="got str"):
        find(model).adding("gate")

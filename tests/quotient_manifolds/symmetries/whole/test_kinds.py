import pytest
import torch

from quotient_manifolds.symmetries.whole import State, canonical_form
from tests.whole_networks import build, forward, inputs


def outputs_at(model, batch, state):
    names = {p: name for name, p in model.named_parameters()}
    values = {names[p]: value for p, value in state.items()}
    return torch.func.functional_call(model, values, (), batch) if isinstance(batch, dict) else None


@pytest.mark.parametrize("family", ["dinov2", "roberta", "qwen3"])
def test_each_symmetry_alone_leaves_the_outputs_and_folds_back(family):
    """Symmetry by symmetry: a move from the canonical form changes nothing, and folding undoes it."""
    model = build(family)
    (batch,) = inputs(family)
    form = canonical_form(model)
    at = State(form.values)
    before = forward(model, batch)
    for i, s in enumerate(form.symmetries):
        state = State(at)
        t = 0.3 * torch.randn(s.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        s.move(state, t)
        after = outputs_at(model, batch, state).logits
        assert float((after - before).detach().abs().max() / before.detach().abs().max()) < 1e-12, s
        moved = [p for p in state if not torch.equal(state[p], at.of(p))]
        assert moved, s
        assert set(moved) <= set(s.parameters), s
        if s.kind == "rotation":
            continue
        s.fold(state)
        for p in moved:
            torch.testing.assert_close(state[p], at.of(p), rtol=1e-9, atol=1e-10)
        wrong = State(at)
        wrong[moved[0]] = at.of(moved[0]) + (at.of(moved[0]) - torch.randn_like(at.of(moved[0]))) * 0.3
        if i % 7 == 0:
            assert (
                float((outputs_at(model, batch, wrong).logits - before).detach().abs().max()) > 1e-6
                or s.kind == "key bias"
            )


def test_a_move_of_nothing_is_none():
    form = canonical_form(build("bert"))
    at = State(form.values)
    for s in form.symmetries:
        state = State(at)
        s.move(state, torch.zeros(s.shape, dtype=torch.float64))
        for p in s.parameters:
            torch.testing.assert_close(state.of(p), at.of(p), rtol=0, atol=1e-14)

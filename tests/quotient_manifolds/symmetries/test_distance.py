import copy

import pytest
import torch

from quotient_manifolds.symmetries import apply_random_symmetry_, find_symmetric_pairs, model_distance


def encoder(heads=2):
    return torch.nn.TransformerEncoderLayer(12, heads, 16, batch_first=True)


def test_distances_are_those_of_the_manifold_and_do_not_see_the_symmetry():
    one, other = encoder(), encoder()
    found = model_distance(one, other)
    for p, q, d in zip(find_symmetric_pairs(one), find_symmetric_pairs(other), found.pairs, strict=True):
        assert (d.name, d.head, d.other_head) == (p.name, p.head, p.head)
        assert d.distance == pytest.approx(float(p.manifold("inv").dist(p.gather(), q.gather()).detach()), rel=1e-7)
    moved = copy.deepcopy(other)
    apply_random_symmetry_(moved)
    assert model_distance(one, moved).total == pytest.approx(found.total, rel=1e-6)
    plain = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (other, moved)]
    assert (plain[0] - plain[1]).norm() > 0.1
    modules, table = found.table("vo")
    assert modules == ["self_attn"]
    assert table.tolist() == [[d.distance for d in found.pairs if d.kind == "vo"]]


def test_permuted_heads_are_matched():
    one = encoder(3)
    other = copy.deepcopy(one)
    attention, order = other.self_attn, torch.tensor([2, 0, 1])
    with torch.no_grad():
        for name in ("in_proj_weight", "in_proj_bias"):
            w = getattr(attention, name)
            w.copy_(w.unflatten(0, (3, 3, 4))[:, order].flatten(0, 2))
        w = attention.out_proj.weight
        w.copy_(w.unflatten(1, (3, 4))[:, order].flatten(1, 2))
    batch = torch.randn(2, 5, 12)
    torch.testing.assert_close(one.eval()(batch), other.eval()(batch))
    found = model_distance(one, other, match="heads")
    assert found.total < 1e-5
    assert [p.other_head for p in found.pairs if p.kind == "qk"] == [1, 2, 0]
    assert model_distance(one, other).total > 1


def test_models_that_cannot_be_compared():
    with pytest.raises(ValueError, match="different pairs"):
        model_distance(encoder(2), encoder(3))
    with pytest.raises(ValueError, match='"inv" or "mix"'):
        model_distance(encoder(), encoder(), metric="flat")

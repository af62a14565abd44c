"""Singular values of pairs: those of the product are invariants of the orbit."""

import pytest
import torch

from quotient_manifolds.symmetries import (
    apply_random_symmetry_,
    find_symmetric_pairs,
    spectra,
)

from ...architectures import TRANSFORMERS
from ...networks import vit


def test_against_dense_products():
    model = vit()
    pairs = find_symmetric_pairs(model)
    for p, s in zip(pairs, spectra(pairs), strict=True):
        G, H = p.manifold().unpack_tensor(p.gather().detach())
        torch.testing.assert_close(s.product, torch.linalg.svdvals(G @ H.mT)[: p.group.h])
        assert s.min_singular_value_G == pytest.approx(float(torch.linalg.svdvals(G)[-1]))
        assert s.min_singular_value_H == pytest.approx(float(torch.linalg.svdvals(H)[-1]))
        assert (s.name, s.kind) == (p.name, p.kind)


def test_what_an_orbit_keeps():
    model = vit()
    before = spectra(find_symmetric_pairs(model))
    apply_random_symmetry_(model, condition=20)
    for a, b in zip(before, spectra(find_symmetric_pairs(model)), strict=True):
        torch.testing.assert_close(a.product, b.product)
        assert a.min_singular_value_G != pytest.approx(b.min_singular_value_G, rel=1e-2)


def test_groups_of_scalars_and_pairs_without_a_group():
    make, _ = TRANSFORMERS["llama"]
    pairs = [*find_symmetric_pairs(make("eager")), *find_symmetric_pairs(TRANSFORMERS["qwen3"][0]("eager"))]
    assert any(p.group is None for p in pairs)
    found = spectra(pairs)
    assert len(found) == sum(p.group is not None for p in pairs)
    rotary = next(s for s in found if s.name.endswith("rotary"))
    assert bool((rotary.product.diff() <= 0).all())
    assert spectra([]) == []

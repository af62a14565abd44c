import weakref

import pytest
import torch

from quotient_manifolds.symmetries import find_symmetric_pairs, stacks
from sharpness.building import build_blocks, divide
from sharpness.coordinates import Coordinates
from sharpness.measures import MEASURES
from tests import networks


@pytest.fixture
def coordinates():
    model = networks.vit()
    parameters = dict(model.named_parameters())
    measure = MEASURES["geodesic-inv"]
    blocks = build_blocks(measure, parameters, torch.float64, divide(model, measure, None, parameters))
    return model, blocks, Coordinates(blocks, torch.float64, torch.device("cpu"))


def test_every_coordinate_belongs_to_one_block(coordinates):
    _, blocks, space = coordinates
    assert space.dim == sum(b.dim for b in blocks)
    taken = torch.zeros(space.dim)
    for _, part in space._blocks:
        taken[part] += 1
    assert bool((taken == 1).all())


def test_norms_add_up_and_random_vectors_are_horizontal(coordinates):
    _, _, space = coordinates
    xi = space.random(torch.Generator().manual_seed(0))
    squares = [sum(block.squares(xi[part])) for block, part in space._blocks]
    assert space.norm(xi) == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
    assert torch.allclose(space.project(xi), xi, atol=1e-12)
    other = torch.randn(space.dim, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(space.project(other), other, atol=1e-3)
    assert space.norm(space.project(other)) < space.norm(other)


def test_spectrum_is_that_of_the_products(coordinates):
    model, _, space = coordinates
    products = [s.manifold().to_matrix(s.gather().detach()) for s in stacks(find_symmetric_pairs(model))]
    least = min(
        float(torch.linalg.svdvals(p)[:, s.group.h - 1].min())
        for p, s in zip(products, stacks(find_symmetric_pairs(model)), strict=True)
    )
    assert space.spectrum() == (pytest.approx(least, rel=1e-9), 0, 0)
    assert space.num_exited_pairs(space.random(torch.Generator())) == 0
    assert space.uncertified() == {p.name for p in space.pairs}
    assert space.residuals() == {}


def test_offloaded_vectors_are_near_the_blocks_one_part_at_a_time(coordinates, monkeypatch):
    _, blocks, space = coordinates
    away = Coordinates(blocks, torch.float64, torch.device("cpu"), offload=True)
    parts, most, real = [], [], torch.empty_like

    def watched(*args, **options):
        parts.append(weakref.ref(made := real(*args, **options)))
        most.append(sum(t.numel() for ref in parts if (t := ref()) is not None and "device" in options))
        return made

    monkeypatch.setattr(torch, "empty_like", watched)
    xi = away.random(torch.Generator().manual_seed(0))
    assert torch.equal(xi, space.random(torch.Generator().manual_seed(0)))
    other = torch.randn(space.dim, generator=torch.Generator().manual_seed(1))
    assert torch.equal(away.project(other), space.project(other))
    assert away.num_exited_pairs(xi) == 0
    assert 0 < max(most) <= 2 * max(b.dim for b in blocks)

import torch

from quotient_manifolds.symmetries.whole import count, nullity, verify_whole
from reproduction.vision import SmallViT, scratch_vit
from tests import networks


def test_every_symmetry_of_the_networks_from_scratch_is_known():
    """The complete measures had taken a network of unknown wiring for one of heads alone."""
    torch.manual_seed(2)
    net = SmallViT(width=8, depth=2, heads=2, hidden=6, classes=3, size=8, norm_first=True)
    networks.shake(net, seed=2)
    numbers = sum(p.numel() for p in net.parameters())
    found = nullity(net, [2 * torch.randn(1, 3, 8, 8) for _ in range(int(1.3 * numbers / 3))])
    counts = count(net)
    assert found.dimension == sum(counts.values())
    assert found.gap > 1e4
    assert {"relu", "gain", "shift", "reader", "writer", "embeddings", "rotation"} < set(counts)


def test_moves_of_a_whole_one_change_nothing():
    torch.set_default_dtype(torch.float32)
    found = verify_whole(scratch_vit(), torch.randn(2, 3, 32, 32), classes=True)
    assert found.ok, found
    assert {"relu", "rotation", "classes"} <= set(found.changes)

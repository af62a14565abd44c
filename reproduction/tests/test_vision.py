import pytest
import torch

from quotient_manifolds.symmetries import ALL, find, verify
from reproduction.nullity import nullity
from reproduction.vision import SmallViT, scratch_vit, vit_cifar10
from tests.support import networks
from tests.support.whole_networks import count


@torch.no_grad()
def make_neurons_switch(net, images):
    """Half of the images activate each: k neurons of a layer that never rest are linear, which adds k² directions."""
    for layer in net.transformer.layers:
        before = []
        hook = layer.linear1.register_forward_hook(lambda module, args, out, before=before: before.append(out[:, 0]))
        net(images)
        hook.remove()
        layer.linear1.bias -= before[0].median(0).values


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_symmetries_of_the_networks_of_the_study(norm_first):
    """The complete measures had taken a network of unknown wiring for one of heads alone."""
    torch.manual_seed(2)
    net = SmallViT(width=6, depth=2, heads=2, hidden=6, classes=3, size=8, norm_first=norm_first)
    networks.shake(net, seed=2)
    numbers = sum(p.numel() for p in net.parameters())
    images = 2 * torch.randn(int(1.3 * numbers / 3), 3, 8, 8)
    make_neurons_switch(net, images)
    found = nullity(net, images.split(1))
    counts = count(net)
    assert found.dimension == sum(counts.values()) + (0 if norm_first else 2 * 6)
    assert found.gap > 1e4
    assert {"relu", "shift", "reader", "writer", "embeddings"} < set(counts)
    assert ("rotation" in counts) == norm_first


@pytest.mark.parametrize("build", [scratch_vit, vit_cifar10])
def test_moves_of_a_whole_network_change_nothing(build):
    torch.set_default_dtype(torch.float32)
    model = build()
    found = verify(model, torch.randn(2, 3, 32, 32), find(model, scope=ALL, classes=True))
    assert found.ok, found
    assert {"relu", "shift", "classes"} <= {s.kind for s in found.changes}

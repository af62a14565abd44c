"""Norms and relative flatness, against their definitions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sharpness.baselines import distance, norms, relative_flatness


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def by_definition(net, x, y):
    """Σ ⟨w_s, w_s'⟩ Tr H_{s,s'} with the Hessian from autograd."""
    features = net.body(x).detach()

    def loss(w):
        return F.cross_entropy(features @ w.T + net.head.bias.detach(), y)

    w = net.head.weight.detach()
    hessian = torch.autograd.functional.hessian(loss, w)  # (s, j, s', j')
    return float(torch.einsum("sjtj,sd,td->", hessian, w, w))


def test_relative_flatness_is_that_of_the_definition():
    torch.manual_seed(0)
    net = Net()
    x, y = torch.randn(12, 5), torch.randint(3, (12,))
    expected = by_definition(net, x, y)
    found = relative_flatness(net, [(x[:8], y[:8]), (x[8:], y[8:])])
    assert found == pytest.approx(expected, rel=1e-10)
    # A layer rescaled against its input leaves the function and the quantity; the norm of the layer does not stay.
    with torch.no_grad():
        net.head.weight.mul_(2)
    assert relative_flatness(net, [(x, y)]) != pytest.approx(expected, rel=0.05)


def test_relative_flatness_is_known_for_linear_heads_only():
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    assert relative_flatness(nn.Sequential(Net(), nn.Softplus()), [(x, y)]) is None
    assert relative_flatness(nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), [(x, torch.randn(6))]) is None


def test_norms():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4), nn.Conv1d(4, 6, 3))
    net[1].bias.requires_grad_(False)
    found = norms(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    assert found["weight_norm"] == pytest.approx(torch.cat([p.flatten() for p in trained]).norm().item())
    spectral = [torch.linalg.svdvals(w)[0].log() for w in (net[1].weight, net[2].weight.flatten(1))]
    assert found["log_spectral"] == pytest.approx(sum(s.item() for s in spectral), rel=1e-5)


def test_distance_counts_what_both_have():
    net = Net()
    start = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        net.body[0].weight.add_(2.0)
        net.head.weight.add_(100.0)
    start["head.weight"] = torch.zeros(9, 4)  # a new head
    assert distance(net, start) == pytest.approx((4 * net.body[0].weight.numel()) ** 0.5)
    with pytest.raises(ValueError, match="have 0 of the 39 weights of Net"):
        distance(net, {"other": torch.zeros(2)})

"""Norms and relative flatness, against their definitions."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import model_distance, move_
from reproduction.baselines import (
    baselines,
    distance,
    fisher_trace,
    geodesic_distance,
    margin,
    norms,
    relative_flatness,
)  # fmt: skip
from tests.support import networks


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


def test_the_geodesic_distance_does_not_see_the_symmetry():
    torch.set_default_dtype(torch.float64)
    net = networks.vit(layers=1)
    start = {k: v.clone() for k, v in net.state_dict().items() if not k.startswith("classifier")}
    moved = networks.shake(copy.deepcopy(net), 0.05, seed=1)
    found = geodesic_distance(moved, start)
    assert found == pytest.approx(model_distance(moved, net).total)
    assert found > 0
    plain = distance(moved, start)
    move_(moved)
    before = {k: v.clone() for k, v in moved.state_dict().items()}
    assert geodesic_distance(moved, start) == pytest.approx(found, rel=1e-6)
    assert distance(moved, start) > 1.1 * plain
    assert all(torch.equal(v, before[k]) for k, v in moved.state_dict().items())  # neither changes the model
    assert geodesic_distance(Net(), Net().state_dict()) is None


def test_examples_without_a_label_do_not_count():
    torch.manual_seed(0)
    net, x, y = Net(), torch.randn(8, 5), torch.tensor([0, 1, 2, 0, -100, -100, -100, 1])
    seen = y != -100
    for baseline in (relative_flatness, margin, fisher_trace):
        assert baseline(net, [(x, y)]) == pytest.approx(baseline(net, [(x[seen], y[seen])]), rel=1e-5)
        assert baseline(net, [(x, y)]) != pytest.approx(baseline(net, [(x, y.clamp_min(0))]), rel=1e-5)


def test_the_margin_is_that_to_the_next_class():
    scores, y = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 4.0], [2.0, 2.5, 0.0]]), torch.tensor([0, 1, 1])
    found = [margin(nn.Identity(), [(scores[:2], y[:2]), (scores[2:], y[2:])], quantile=q) for q in (0.0, 0.5, 1.0)]
    assert found == [-3.0, 0.5, 2.0]
    assert margin(nn.Flatten(0), [(torch.randn(6, 1), torch.randn(6))]) is None


def test_the_trace_of_the_fisher_matrix_is_that_of_the_matrix():
    """F = Jᵀ (diag p − p pᵀ) J, example by example, with the Jacobian of the scores from autograd."""
    torch.manual_seed(0)
    net, x, y = Net(), torch.randn(5, 5), torch.randint(3, (5,))
    weights, expected = list(net.parameters()), 0.0
    for row in x:
        scores = net(row[None])[0]
        rows = [torch.autograd.grad(s, weights, retain_graph=True) for s in scores]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        p = scores.softmax(0).detach()
        expected += float((J.T @ (p.diag() - p.outer(p)) @ J).trace()) / 5
    assert fisher_trace(net, [(x[:3], y[:3]), (x[3:], y[3:])]) == pytest.approx(expected, rel=1e-10)
    # The labels of the data do not enter: this is no empirical Fisher matrix.
    assert fisher_trace(net, [(x, (y + 1) % 3)]) == pytest.approx(expected, rel=1e-10)
    # Of many classes labels are drawn: twelve of which nine have no chance are as good as three, up to the draws.
    many = nn.Sequential(net, nn.ConstantPad1d((0, 9), -1e3))
    drawn = fisher_trace(many, [(x.repeat(30, 1), y.repeat(30))])
    assert drawn == pytest.approx(expected, rel=0.25)
    assert drawn != pytest.approx(expected, rel=1e-6)
    assert fisher_trace(nn.Linear(2, 1), [(torch.randn(6, 2), torch.randn(6, 1))]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_baselines_of_a_half_precision_model_are_those_of_its_weights_in_float32(dtype):
    """Near a minimum a critical step is smaller than the spacing of such numbers."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).float()
    x = torch.randn(32, 8).to(dtype).float()
    y = torch.randint(3, (32,))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    narrow = net.to(dtype)
    before = {k: v.clone() for k, v in narrow.state_dict().items()}
    found = baselines(narrow, [(x.to(dtype), y)])
    assert all(torch.equal(v, before[k]) and v.dtype == dtype for k, v in narrow.state_dict().items())
    expected = baselines(net.float(), [(x, y)])
    for name in ("critical_sharpness", "fisher_trace", "margin", "weight_norm", "relative_flatness"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def test_distance_counts_what_both_have():
    net = networks.vit(layers=1)
    start = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        net.classifier.weight.add_(100.0)
        net.vit.embeddings.cls_token.add_(2.0)
    start["classifier.weight"] = torch.zeros(9, 4)  # a new head
    assert distance(net, start) == pytest.approx((4 * net.vit.embeddings.cls_token.numel()) ** 0.5)
    with pytest.raises(ValueError, match=r"have 0 of the .* weights of ViTForImageClassification"):
        distance(net, {"other": torch.zeros(2)})

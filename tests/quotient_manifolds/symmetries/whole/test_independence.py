import copy
from collections import Counter

import pytest
import scipy.stats
import torch
from torch import nn

from quotient_manifolds.symmetries import move_
from quotient_manifolds.symmetries.whole import independence, independence_test
from tests.support.whole_networks import build, outside, random_element


def drawn(seed, neurons=40, width=8):
    """Two layers of neurons whose weights out of them follow those into them, as training makes it."""
    g = torch.Generator().manual_seed(seed)
    up, noise = torch.randn(2, 2, neurons, width, generator=g, dtype=torch.float64)
    return [independence._Neurons(u, u, u + e) for u, e in zip(up, noise, strict=True)], torch.eye(width).double()


def p_of_poisson(monkeypatch, pairs=150):
    """How well the numbers of neurons that agree by chance follow the law that the p-value is computed from."""
    monkeypatch.setattr(independence, "_read", drawn)
    counts = Counter(min(independence_test(2 * i, 2 * i + 1).agreeing, 5) for i in range(pairs))
    expected = [pairs * scipy.stats.poisson.pmf(k, 2) for k in range(5)]
    return scipy.stats.chisquare([counts[k] for k in range(6)], [*expected, pairs - sum(expected)]).pvalue


def test_p_values_of_independent_networks_are_uniform(monkeypatch):
    assert p_of_poisson(monkeypatch) > 1e-5
    monkeypatch.setattr(independence, "_unexplained", lambda x: x.down)  # what training couples counts as kinship
    assert p_of_poisson(monkeypatch) < 1e-5


@pytest.mark.parametrize("family", ["vit", "bert", "gpt2-untied", "llama", "gemma", "t5", "timm-no-bias", "torch-post"])
def test_a_moved_fine_tune_is_known(family):
    one, unrelated = build(family), build(family, seed=2)
    other = copy.deepcopy(one)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.01 * p.abs().mean() * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).view_as(p)
    other = random_element(other).of(other)
    move_(other, outside(other))
    found = independence_test(one, other)
    assert found.p_value < 1e-3
    assert found.agreeing > 0.5 * found.neurons
    assert independence_test(one, unrelated).p_value > 1e-6


def test_dead_neurons_are_no_kinship(monkeypatch):
    def pruned(seed):
        layers, known = drawn(seed)
        return [independence._Neurons(*(rows * (torch.arange(40) < 10)[:, None] for rows in x)) for x in layers], known

    monkeypatch.setattr(independence, "_read", pruned)
    assert sum(independence_test(2 * i, 2 * i + 1).agreeing for i in range(20)) < 120  # of 1,600; by chance 40 ± 6
    matching = independence._matching
    monkeypatch.setattr(independence, "_matching", lambda x, y, g: matching(x, y, torch.Generator().manual_seed(0)))
    assert sum(independence_test(2 * i, 2 * i + 1).agreeing for i in range(20)) > 120  # ties fall alike


def test_a_network_is_not_changed_nor_are_gradients_asked_of_it():
    one = build("vit").requires_grad_(False)
    before = copy.deepcopy(one.state_dict())
    assert independence_test(one, one).agreeing == 24
    assert not any(p.requires_grad for p in one.parameters())
    for name, value in one.state_dict().items():
        assert torch.equal(value, before[name])


def test_networks_without_neurons_are_refused():
    with pytest.raises(ValueError, match="no layers of more neurons than the stream is wide are known of a Linear"):
        independence_test(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="compare networks of one architecture"):
        independence_test(build("vit"), build("gpt2"))


def test_networks_that_are_not_finite_are_refused():
    broken = build("vit")
    with torch.no_grad():
        next(broken.parameters())[0] = torch.nan
    for pair in ((build("vit"), broken), (broken, build("vit"))):
        with pytest.raises(ValueError, match="cls_token of a ViTForImageClassification has NaN or infinite entries"):
            independence_test(*pair)

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds import symmetries
from tests import networks
from tests.measured import values


def test_a_flat_start_begins_in_a_random_direction_and_says_so():
    model = networks.TinyAttention()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    x, y = networks.tokens(count=9, width=4)
    y = torch.arange(9) % 3  # balanced: the gradient of the bias vanishes too

    def saddle(model, batch):
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1]) + scores.square().mean()

    result = sharpness.evaluate(model, [(x, y)], saddle, measure="euclidean", rho=0.5)
    assert not result.batches[0].random_start
    result = sharpness.evaluate(model, [(x, y)], lambda m, b: m(b[0]).square().mean(), measure="euclidean", rho=0.5)
    assert result.batches[0].random_start
    assert float(result) > 0.01
    assert "random direction" in str(result)


def test_restarts_never_lower_the_value_and_depend_on_the_seed():
    model, batch = networks.vit(), networks.images()
    values = [float(sharpness.evaluate(model, [batch], rho=0.3, steps=3, restarts=k)) for k in range(3)]
    assert values == sorted(values)
    again = float(sharpness.evaluate(model, [batch], rho=0.3, steps=3, restarts=2))
    assert again == values[2]


def test_lora_before_training_has_no_direction_to_move_in():
    layer = nn.Linear(4, 4)
    A, B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))
    layer.requires_grad_(False)
    layer.A, layer.B = A, B
    pair = symmetries.pair(
        [symmetries.block(layer, "B")], [symmetries.block(layer, "A", transpose=True)], symmetries.GL(2)
    )

    def loss(model, batch):
        return (batch + batch @ model.A.T @ model.B.T).square().mean()

    with pytest.raises(ValueError, match="no direction to move in"):
        sharpness.evaluate(layer, [torch.randn(3, 4)], loss, rho=0.1, pairs=[pair])


BOUNDED = {
    "sine": lambda m, b: torch.sin(3 * m(b[0]).square().sum()),
    "error": lambda m, b: 1 - m(b[0]).softmax(1).gather(1, b[1][:, None]).mean(),
    "bump": lambda m, b: torch.exp(-(m(b[0]) - 1).square().sum()),
    "tanh": lambda m, b: m(b[0]).tanh().mean(),
    "entropy": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "square": lambda m, b: m(b[0]).square().mean(),
}


class Mean(nn.Module):
    """An attention layer whose tokens are averaged to scores."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix", "adaptive", "euclidean"])
@pytest.mark.parametrize("loss", BOUNDED)
def test_sharpness_never_falls_with_the_radius(measure, loss):
    torch.manual_seed(3)
    model, batch = Mean(), (torch.randn(6, 3, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
    radii = [0.05 * 3**k for k in range(6)]
    for ascent in ("power", "apgd"):
        result = sharpness.evaluate(
            model, [batch], BOUNDED[loss], measure=measure, rho=radii, steps=5, ascent=ascent, progress=False
        )
        values = [float(result[rho]) for rho in radii]
        assert values == sorted(values)
        assert values[0] > 0
        for r in result.batches:
            assert 0 < r.distance <= r.rho * (1 + 1e-9)
            direction = result[r.rho].direction(0)
            assert direction.norm == pytest.approx(r.distance)
            with torch.no_grad(), sharpness.perturbed(model, direction):
                assert float(BOUNDED[loss](model.eval(), batch)) == pytest.approx(r.worst_loss, abs=1e-7)


def test_the_sphere_alone_would_fall(monkeypatch):
    """What the test above is for: one radius by itself finds what lies inside the ball, and the sphere does not."""
    model, batch = nn.Linear(2, 1, bias=False), (torch.tensor([[1.0, 0.3]]), None)
    model.weight.data = torch.tensor([[1.0, 2.0]])

    def sine(m, b):
        return torch.sin(3 * m(b[0])).sum()

    options = {"measure": "euclidean", "progress": False}
    inside = [sharpness.evaluate(model, [batch], sine, rho=rho, **options) for rho in (0.5, 1.0, 2.0)]
    assert all(float(r) > 1 for r in inside)
    monkeypatch.setattr("sharpness.ball_search._HALVINGS", 0)
    on_sphere = [float(sharpness.evaluate(model, [batch], sine, rho=rho, **options)) for rho in (0.5, 1.0, 2.0)]
    assert min(on_sphere) < 0.9 * max(on_sphere)


def test_average_case_of_a_quadratic_is_half_the_trace():
    model = nn.Linear(3, 1, bias=False)
    H = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 0.5]])

    def loss(model, batch):
        w = model.weight[0]
        return 0.5 * w @ H @ w

    options = {"rho": 0.1, "statistic": "average", "num_samples": 4000}
    plain = sharpness.evaluate(model, [0], loss, measure="euclidean", **options).batches[0]
    assert plain.value == pytest.approx(0.5 * 0.1**2 * float(H.trace()), abs=4 * plain.std_error)
    w = model.weight.detach()[0]
    scaled = sharpness.evaluate(model, [0], loss, measure="adaptive", **options).batches[0]
    assert scaled.value == pytest.approx(0.5 * 0.1**2 * float(w**2 @ H.diagonal()), abs=4 * scaled.std_error)
    assert plain.passes == 4001
    assert len(plain.history) == 4000


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_average_case_and_gradient_norm_are_invariant(trained, metric):
    rho = 0.01 if metric == "geodesic-inv" else 0.002
    one, two = values(trained, measure=metric, statistic="average", rho=rho)
    assert one == pytest.approx(two, rel=1e-6)
    one, two = values(trained, measure="adaptive", statistic="average", rho=rho)
    assert abs(one / two - 1) > 0.01
    one, two = (sharpness.gradient_norm(m, [trained[2]], measure=metric).gradient_norm for m in trained[:2])
    assert one == pytest.approx(two, rel=1e-8)
    small = values(trained, measure=metric, rho=1e-4)[0] / 1e-4
    assert small == pytest.approx(one, rel=0.02)
    one, two = (sharpness.gradient_norm(m, [trained[2]], measure="adaptive").gradient_norm for m in trained[:2])
    assert abs(one / two - 1) > 0.01


def test_every_ascent_and_radius_is_independent_of_the_list(trained):
    model, _, batch = trained
    options = {"rho": [0.05, 0.2], "restarts": 1, "steps": 6}
    together = sharpness.evaluate(model, [batch, batch], **options)
    for rho in options["rho"]:
        alone = sharpness.evaluate(model, [batch, batch], **{**options, "rho": rho})
        assert float(alone) == float(together[rho])

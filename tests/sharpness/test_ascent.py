import math
import weakref

import pytest
import torch
from torch import nn

import sharpness
from reproduction.additive import AdditiveMeasure
from sharpness import Measure
from sharpness import ascent as arithmetic
from sharpness.ascent import auto_pgd, checkpoints, power
from tests.support.functions import into, problem, shifted


def plain_auto_pgd(f, start, radius, steps):
    """Algorithm 1 of Croce and Hein (2020), L2, line by line, with explicit projections."""

    def project(x):
        norm = x.norm()
        return x * (radius / norm) if norm > radius else x

    marks, p0, p1 = [], 0, 22
    while p1 <= 100:
        marks.append(math.ceil(p1 * steps / 100 - 1e-9))
        p0, p1 = p1, p1 + max(p1 - p0 - 3, 6)
    eta, x, x_prev = 2 * radius, start, start
    value, g = f(x, True)
    best, best_value, best_g = x, value, g
    values, etas, bests, last = [value], [eta], [best_value], 0
    for k in range(steps):
        z = project(x + eta * g / (g.norm() + 1e-12))
        alpha = 1.0 if k == 0 else 0.75
        x, x_prev = project(x + alpha * (z - x) + (1 - alpha) * (x - x_prev)), x
        value, g = f(x, True)
        values.append(value)
        rises = values[-1] > values[-2]
        etas.append(eta)
        if value > best_value:
            best, best_value, best_g = x, value, g
        bests.append(best_value)
        etas[-1] = (eta, rises)
        if k + 1 in marks:
            count = sum(e[1] for e in etas[last + 1 : k + 2])
            one = count < 0.75 * (k + 1 - last)
            before = etas[last][0] if isinstance(etas[last], tuple) else etas[last]
            two = before == eta and bests[last] == best_value
            if one or two:
                eta, x, x_prev, g = eta / 2, best, best, best_g
                values[-1] = best_value
            last = k + 1
    return best, best_value


def test_checkpoints():
    assert checkpoints(20) == [5, 9, 12, 14, 16, 18, 19, 20]
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(1)[-1] == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [1, 2, 7, 20, 60])
def test_equals_the_algorithm_written_out(seed, steps):
    f, start = problem(seed), 0.1 * torch.randn(20)
    found = auto_pgd(into(f), start.clone(), 1.5, steps)
    point, value = plain_auto_pgd(f, start, 1.5, steps)
    torch.testing.assert_close(found.value, value)
    torch.testing.assert_close(found.point, point)


@pytest.mark.parametrize("seed", range(10))
def test_the_gap_at_the_best_iterate_is_always_known(seed):
    """Auto-PGD goes back to its best iterate when it halves its steps; then the last iterate is the best one, too."""
    f = problem(seed)
    for start in (torch.zeros(20), 0.1 * torch.randn(20)):
        for steps in (12, 20):
            found = auto_pgd(into(f), start.clone(), 1.5, steps)
            gradient = f(found.point, True)[1]
            gap = float(1.5 * gradient.norm() - gradient @ found.point)
            last = found.history.index(max(found.history)) == steps  # whose gradient is not computed
            assert (found.fw_gap is None) if last else found.fw_gap == pytest.approx(gap, abs=1e-12)


def test_the_best_iterate_and_its_value_belong_together():
    f = problem(1)
    found = auto_pgd(into(f), torch.zeros(20), 2.0, 30)
    assert found.value == f(found.point, False)[0]
    assert found.value == max(found.history)
    assert len(found.history) == 31
    assert found.point.norm() <= 2 * (1 + 1e-12)


def test_quadratics_are_maximised():
    A = torch.diag(torch.tensor([3.0, 1.0, 0.5]))

    def f(x, wanted):
        return float(0.5 * x @ A @ x), A @ x

    found = auto_pgd(into(f), torch.tensor([0.1, 0.1, 0.1]), 2.0, 100)
    assert found.value == pytest.approx(0.5 * 3 * 4, rel=1e-6)


def test_calls_one_function_a_step_and_no_gradient_at_the_last():
    calls = []
    f = into(problem(0))

    def counted(x, out):
        calls.append(out is not None)
        return f(x, out)

    auto_pgd(counted, torch.zeros(20), 1.0, 6)
    assert calls == [True] * 6 + [False]


@pytest.mark.parametrize("ascend", [power, auto_pgd])
def test_a_gradient_that_is_known_is_not_computed_again_and_every_step_is_seen(ascend):
    f, calls, seen = into(problem(0)), [], []

    def counted(x, out):
        calls.append(out is not None)
        return f(x, out)

    gradient, start = torch.empty(20), torch.zeros(20)
    base, known = f(start, gradient), [gradient]
    plain = ascend(f, start.clone(), 1.0, 6)
    found = ascend(counted, start, 1.0, 6, base=base, known=known, seen=lambda values: seen.append(tuple(values)))
    assert calls == [True] * 5 + [False]
    assert known == []  # so that its memory is free after the first step
    assert torch.equal(found.point, plain.point)
    assert found.history == plain.history == seen[-1]
    assert [len(values) for values in seen] == [2, 3, 4, 5, 6, 7]


def plain_power(f, radius, steps):
    """The power method of the docstring with explicit norms, from the origin."""

    def onto(x):
        return x * (radius / x.norm())

    value, g = f(torch.zeros(20), True)
    values = [value]
    best_x = best_g = other = None
    best, omega = -math.inf, 1.0
    for _ in range(steps):
        y = onto(g if best_x is None else best_g)
        if other is not None:
            y = onto(y + 0.25 * (best_x - other))
        x = y if omega == 1 else onto(omega * y + (1 - omega) * best_x)
        value, g = f(x, True)
        values.append(value)
        if value > best:
            other, best_x, best_g, best, omega = best_x, x, g, value, min(1.0, 1.2 * omega)
        else:
            other, omega = None, omega / 2
    return values, best_x


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_power_equals_the_algorithm_written_out(seed, radius):
    f = shifted(seed)
    # Both amplify rounding over many steps wherever the path is unstable.
    found = power(into(f), torch.zeros(20), radius, 15)
    values, point = plain_power(f, radius, 15)
    torch.testing.assert_close(torch.tensor(found.history), torch.tensor(values), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.point, point, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ascend", [power, auto_pgd])
@pytest.mark.parametrize("seed", range(3))
def test_tolerance_ends_an_ascent_near_its_maximum(ascend, seed):
    f, rho = shifted(seed), 0.5
    full = ascend(into(f), torch.zeros(20), rho, 300)
    short = ascend(into(f), torch.zeros(20), rho, 300, relative_tol=1e-3)
    assert short.converged
    assert full.converged is None
    assert len(short.history) < 290 < len(full.history)
    base, _ = f(torch.zeros(20), False)
    assert short.value - base > 0.99 * (full.value - base)
    value, g = f(short.point, True)
    assert value == short.value
    assert short.fw_gap == pytest.approx(rho * float(g.norm()) - float(g @ short.point), rel=1e-6, abs=1e-12)
    assert short.fw_gap <= 1e-3 * (short.value - base) + 1e-12
    assert ascend(into(f), torch.zeros(20), rho, 300, relative_tol=0.3).value < short.value
    for found in (full, short):
        assert float(found.point.norm()) <= rho * (1 + 1e-9)


def test_more_steps_of_the_power_method_continue_fewer():
    f = shifted(3)
    long = power(into(f), torch.zeros(20), 2.0, 40)
    short = power(into(f), torch.zeros(20), 2.0, 12)
    assert long.history[:13] == short.history


@pytest.mark.parametrize("ascend", [power, auto_pgd])
def test_a_start_on_the_surface_counts_with_its_value(ascend):
    f = shifted(1)
    best = power(into(f), torch.zeros(20), 1.0, 200).point
    found = ascend(into(f), best.clone(), 1.0, 3)
    assert found.value >= f(best, False)[0]


def test_a_maximum_at_the_centre():
    """The gradient points straight back, and halfway between opposite points there is no direction."""

    def f(x, wanted):
        return -float(x @ x), -2 * x

    for ascend in (power, auto_pgd):
        found = ascend(into(f), torch.tensor([0.6, -0.8]), 1.0, 8)
        assert bool(found.point.isfinite().all())
        assert found.value <= 0


@pytest.mark.parametrize("ascend", [power, auto_pgd])
def test_a_start_that_stays_the_best_has_a_slope(ascend):
    """The search goes on inside the ball where it is negative; Auto-PGD had none there."""

    def f(x, wanted):
        centre = torch.tensor([0.8, 0.0])
        return -float((x - centre).square().sum()), 2 * (centre - x)

    found = ascend(into(f), torch.tensor([1.0, 0.0]), 1.0, 1)
    assert found.slope == pytest.approx(-0.4)
    assert found.inward
    assert ascend(into(f), torch.zeros(2), 1.0, 0 if ascend is auto_pgd else 1).slope != 0


def test_vectors_longer_than_a_chunk(monkeypatch):
    f, start = problem(3), 0.1 * torch.randn(20)
    expected = auto_pgd(into(f), start.clone(), 1.5, 25)
    monkeypatch.setattr(arithmetic, "_CHUNK", 7)
    found = auto_pgd(into(f), start, 1.5, 25)
    torch.testing.assert_close(found.point, expected.point)


@pytest.mark.parametrize(("ascend", "vectors"), [(power, 4), (auto_pgd, 6)])
def test_vectors_in_memory_while_f_is_computed(ascend, vectors):
    """Two points and two gradients; Auto-PGD one more point, and the start, which its caller keeps."""
    f, start, seen, most = into(shifted(2)), torch.zeros(20), [], []

    def counted(x, out):
        seen.extend(weakref.ref(t) for t in (x, out) if t is not None)
        most.append(len({t.data_ptr() for ref in seen if (t := ref()) is not None} | {start.data_ptr()}))
        return f(x, out)

    expected = ascend(f, torch.zeros(20), 1.5, 60).point
    torch.testing.assert_close(ascend(counted, start, 1.5, 60).point, expected)
    assert max(most) == vectors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": True}, "rho must be one or several positive numbers, got True"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1, got 2.5"),
        ({"seed": -1}, f"seed must be a whole number of at least 0 and below {2**63}, got -1"),
        ({"seed": 2**63}, f"seed must be a whole number of at least 0 and below {2**63}, got {2**63}"),
        ({"relative_tol": "x"}, "relative_tol must be a number of at least 0, got 'x'"),
        ({"micro_batch": 2.5}, "micro_batch must be a whole number of at least 1, got 2.5"),
        ({"measure": 3}, "unknown measure 3"),
        ({"batches": torch.ones(3)}, "batches is a single Tensor; wrap it in a list"),
    ],
)
def test_arguments_are_named(options, words):
    arguments = {"batches": [(torch.ones(2, 3), torch.tensor([0, 1]))], "measure": "adaptive", **options}
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(nn.Linear(3, 2), **arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measure": AdditiveMeasure("additive", pair_metric="inv", geodesic="exact")}, "no geodesic equation"),
        ({"measure": AdditiveMeasure("additive", pair_metric="inv", relaxation=0.0)}, "must be positive"),
        ({"ascent": "newton"}, "unknown ascent 'newton'; choose one of power, apgd"),
        ({"relative_tol": -1}, "relative_tol must be a number of at least 0"),
        ({"measure": Measure("own"), "rho": None}, "the measure 'own' has no default"),
    ],
)
def test_bad_arguments(trained, options, words):
    model, _, batch = trained
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(model, [batch], **{"rho": 0.1, **options})

import math

import pytest
import torch

from sharpness.ascent import auto_pgd, checkpoints


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
    value, g = both(f, x)
    best, best_value, best_g = x, value, g
    values, etas, bests, last = [value], [eta], [best_value], 0
    for k in range(steps):
        z = project(x + eta * g / (g.norm() + 1e-12))
        alpha = 1.0 if k == 0 else 0.75
        x, x_prev = project(x + alpha * (z - x) + (1 - alpha) * (x - x_prev)), x
        value, g = both(f, x)
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


def problem(seed, dim=20):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(dim, dim, generator=generator)
    A, b = A @ A.T / dim - 0.5 * torch.eye(dim), torch.randn(dim, generator=generator)

    def f(x, out):
        if out is not None:
            out.copy_(A @ x - torch.sin(b @ x) * b)
        return float(0.5 * x @ A @ x + torch.cos(b @ x))

    return f


def both(f, x):
    g = torch.empty_like(x)
    return f(x, g), g


def test_checkpoints():
    assert checkpoints(20) == [5, 9, 12, 14, 16, 18, 19, 20]
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(1)[-1] == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [1, 2, 7, 20, 60])
def test_equals_the_algorithm_written_out(seed, steps):
    f, start = problem(seed), 0.1 * torch.randn(20)
    found = auto_pgd(f, start, 1.5, steps)
    point, value = plain_auto_pgd(f, start, 1.5, steps)
    torch.testing.assert_close(found.value, value)
    torch.testing.assert_close(found.point, point)


def test_the_best_iterate_and_its_value_belong_together():
    f = problem(1)
    found = auto_pgd(f, torch.zeros(20), 2.0, 30, first=both(f, torch.zeros(20)))
    assert found.value == f(found.point, None)
    assert found.value == max(found.history)
    assert len(found.history) == 31
    assert found.point.norm() <= 2 * (1 + 1e-12)


def test_quadratics_are_maximised():
    A = torch.diag(torch.tensor([3.0, 1.0, 0.5]))

    def f(x, out):
        if out is not None:
            torch.mv(A, x, out=out)
        return float(0.5 * x @ A @ x)

    found = auto_pgd(f, torch.tensor([0.1, 0.1, 0.1]), 2.0, 100)
    assert found.value == pytest.approx(0.5 * 3 * 4, rel=1e-6)


def test_calls_one_function_a_step_and_no_gradient_at_the_last():
    calls = []
    f = problem(0)

    def counted(x, out):
        calls.append(out is not None)
        return f(x, out)

    shown = []
    auto_pgd(counted, torch.zeros(20), 1.0, 6, callback=lambda *v: shown.append(v))
    assert calls == [True] * 6 + [False]
    assert len(shown) == 6


def test_vectors_longer_than_a_chunk(monkeypatch):
    from sharpness import ascent

    f, start = problem(3), 0.1 * torch.randn(20)
    expected = auto_pgd(f, start, 1.5, 25)
    monkeypatch.setattr(ascent, "_CHUNK", 7)
    found = auto_pgd(f, start, 1.5, 25)
    torch.testing.assert_close(found.point, expected.point)


def test_at_most_five_vectors_beside_the_start():
    from sharpness import ascent

    made = []

    f, start = problem(2), 0.1 * torch.randn(20)
    with pytest.MonkeyPatch.context() as patch:
        real = torch.empty_like
        patch.setattr(ascent.torch, "empty_like", lambda t: made.append(1) or real(t))
        auto_pgd(f, start, 1.5, 60)
    assert len(made) <= 5

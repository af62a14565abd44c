from dataclasses import replace

import pytest
import torch

from quotient_manifolds.gl.bent import first_path
from quotient_manifolds.gl.path import energy
from quotient_manifolds.gl.preconditioner import Preconditioner
from tests.geodesics import metric, problem
from tests.quotient_manifolds.gl.test_path import some_path


@metric
def test_the_preconditioner_is_symmetric_and_near_the_inverse(name):
    _, path = some_path(name)
    pc = Preconditioner(path)
    a, b = (torch.randn_like(energy(path)[1]) for _ in range(2))
    size = (pc(a, path).norm(dim=1) * b.norm(dim=1)).max().item()
    torch.testing.assert_close((pc(a, path) * b).sum(1), (a * pc(b, path)).sum(1), rtol=0, atol=3e-6 * size)
    assert bool(((pc(a, path) * a).sum(1) > 0).all())

    if name == "inv":  # near the inverse where the path is a geodesic, nearly
        manifold, x, u = problem(name, 6, 5, 2, batch=(3,))
        path = first_path(manifold.metric, 6, x, manifold.expmap(x, 0.5 * u), 4)
        pc = Preconditioner(path)

        def product(d):
            return (energy(path.moved(1e-5 * d))[1] - energy(path.moved(-1e-5 * d))[1]) / 2e-5

        d = torch.randn(20, *a.shape)
        ratios = torch.stack([(v * product(v)).sum(1) / (v * v).sum(1) for v in d])
        # The same quotients in coordinates that the preconditioner makes: P⁻¹ d for d.
        ours = torch.stack([(pc(v, path) * product(pc(v, path))).sum(1) / (v * pc(v, path)).sum(1) for v in d])
        assert ours.min() > 0.3
        assert ours.log().abs().median() < 0.3 * ratios.log().abs().median()


@pytest.mark.parametrize("entry", [torch.nan, torch.inf, 1e153, 1e200])
def test_a_path_that_failed_leaves_the_others_alone(entry):
    manifold, x, u = problem("inv", 5, 4, 3, batch=(3,))
    path = first_path(manifold.metric, 5, x, manifold.expmap(x, 0.5 * u), 4)
    y = path.y.clone()
    y[1] *= entry
    a = torch.randn_like(energy(path)[1])
    found = Preconditioner(replace(path, y=y))(a, path)
    expected = Preconditioner(path)(a, path)[::2]  # in single precision
    torch.testing.assert_close(found[::2], expected, rtol=1e-3, atol=1e-3)

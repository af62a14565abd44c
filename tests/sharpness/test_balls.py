import pytest
import torch

from sharpness.ascent import auto_pgd, power
from sharpness.balls import CubeBall, RoundBall


@pytest.mark.parametrize("ascend", [power, auto_pgd])
def test_the_cube_has_its_maximum_in_a_corner(ascend):
    g = torch.tensor([3.0, -1.0, 0.5])

    def f(x, wanted):
        return float(g @ x + 0.05 * x @ x), g + 0.1 * x

    found = ascend(f, torch.zeros(3), CubeBall(2.0), 20)
    torch.testing.assert_close(found.point, torch.tensor([2.0, -2.0, 2.0]))
    assert RoundBall(2.0).norm(found.point) > 2

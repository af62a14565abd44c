import pytest
import torch

from sharpness import vectors as arithmetic
from sharpness.ascent import auto_pgd, power
from sharpness.balls import RoundBall
from sharpness.vectors import Buffers
from tests.functions import both, problem, shifted


def test_vectors_longer_than_a_chunk(monkeypatch):
    f, start = problem(3), 0.1 * torch.randn(20)
    expected = auto_pgd(f, start, RoundBall(1.5), 25)
    monkeypatch.setattr(arithmetic, "_CHUNK", 7)
    found = auto_pgd(f, start, RoundBall(1.5), 25)
    torch.testing.assert_close(found.point, expected.point)


@pytest.mark.parametrize(("ascend", "vectors"), [(power, 4), (auto_pgd, 5)])
def test_vectors_in_memory(ascend, vectors, monkeypatch):
    """With the gradient at the start given, the start included."""
    f, zero = shifted(2), torch.zeros(20)
    first = both(f, zero)
    made = []
    real = torch.empty_like
    monkeypatch.setattr(arithmetic.torch, "empty_like", lambda t: made.append(1) or real(t))
    buffers = Buffers(zero)
    for _ in range(3):
        buffers.keep()
        found = ascend(f, buffers.take().zero_(), RoundBall(1.5), 60, first=first, buffers=buffers)
        buffers.adopt(found.point)
    assert len(made) == vectors

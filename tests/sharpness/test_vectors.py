import pytest
import torch

from sharpness import vectors as arithmetic
from sharpness.ascent import auto_pgd, power
from sharpness.balls import RoundBall
from sharpness.vectors import Buffers
from tests.functions import problem, shifted


def test_vectors_longer_than_a_chunk(monkeypatch):
    f, start = problem(3), 0.1 * torch.randn(20)
    expected = auto_pgd(f, start, RoundBall(1.5), 25)
    monkeypatch.setattr(arithmetic, "_CHUNK", 7)
    found = auto_pgd(f, start, RoundBall(1.5), 25)
    torch.testing.assert_close(found.point, expected.point)


@pytest.mark.parametrize(("ascend", "vectors"), [(power, 3), (auto_pgd, 4)])
def test_vectors_in_memory_while_f_is_computed_and_after_it(ascend, vectors, monkeypatch):
    """With the gradient at the start given, the start included; one more when f asks for that of its gradient."""
    f, zero = shifted(2), torch.zeros(20)
    expected, first, made, held = ascend(f, zero, RoundBall(1.5), 60).point, f(zero, True), [], []
    real = torch.empty_like
    monkeypatch.setattr(arithmetic.torch, "empty_like", lambda t: made.append(real(t)) or made[-1])
    buffers = Buffers(zero)

    def counted(x, wanted):
        value, gradient = f(x, wanted)
        held.append(sum(t.untyped_storage().nbytes() > 0 for t in made))
        return value, buffers.take().copy_(gradient) if wanted else None

    for _ in range(3):
        buffers.keep()
        found = ascend(counted, buffers.take().zero_(), RoundBall(1.5), 60, first=first, buffers=buffers)
        torch.testing.assert_close(found.point, expected)
        buffers.adopt(found.point)
    assert max(held) == vectors
    assert len(made) == vectors + 1

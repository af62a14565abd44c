"""The count of what operations read and write."""

import torch

from benchmarks.traffic import CACHE, LEAST, Traffic


def test_operations_by_hand():
    n = CACHE  # four times what the cache holds, so none stays
    a, b, c = (torch.zeros(n, dtype=torch.float32) for _ in range(3))
    cases = {
        "two are read, one is written": (lambda: torch.mul(a, b, out=c), 3),
        "in place": (lambda: a.add_(b), 3),
        "overwritten": (lambda: a.copy_(b), 2),
        "the same twice": (lambda: torch.dot(a, a), 1),
        "a view": (lambda: a.view(2, -1).T[1:], 0),
        "expanded": (lambda: torch.mul(a, torch.ones((), dtype=torch.float32).expand(n), out=c), 2),
        "memory alone": (lambda: torch.empty(n), 0),
        "small": (lambda: torch.ones(LEAST) + 1, 0),
    }
    for name, (work, vectors) in cases.items():
        with Traffic() as found:
            work()
        assert found.bytes // (4 * n) == found.of_memory // (4 * n) == vectors, name


def test_what_is_processed_piece_by_piece_is_read_once():
    a, b = (torch.zeros(2 * CACHE, dtype=torch.float32) for _ in range(2))
    with Traffic() as whole:
        torch.dot(a, b)
        torch.dot(a, a)
    with Traffic() as pieces:
        for x, y in zip(a.split(CACHE // 16), b.split(CACHE // 16), strict=True):
            torch.dot(x, y)
            torch.dot(x, x)
    assert whole.bytes == whole.of_memory == pieces.bytes == 3 * 8 * CACHE
    assert pieces.of_memory == 2 * 8 * CACHE

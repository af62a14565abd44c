"""Pairs that share weights."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import GL, block, pair
from quotient_manifolds.symmetries.pairs import SHARED, merged, refused
from quotient_manifolds.symmetries.stacks import sharing


def layers(count=4):
    return [nn.Linear(3, 3, bias=False) for _ in range(count)]


def test_pairs_with_a_block_in_common_become_one():
    a, b, c, _ = layers()
    one, two = (pair([block(x, "weight")], [block(c, "weight")], GL(3)) for x in (a, b))
    (found,) = merged([one, two])
    assert (len(found.G), len(found.H)) == (2, 1)
    other = pair([block(c, "weight")], [block(a, "weight")], GL(3))
    assert [p.group for p in merged([one, other])] == [None, None]  # one block on both sides


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_in_common_is_found_whatever_it_is_seen_through(overlap):
    a, b, c, d = layers()
    memory = torch.randn(30)
    a.weight.data = memory[:9].view(3, 3)
    c.weight.data = memory[5:14].view(3, 3) if overlap else memory[9:18].view(3, 3)
    pairs = [pair([block(x, "weight")], [block(y, "weight")], GL(3)) for x, y in ((a, b), (c, d))]
    assert sharing(pairs) == ({0, 1} if overlap else set())


def test_every_pair_that_meets_another_is_found_and_no_other():
    """Against the numbers themselves, for blocks anywhere in one memory: rows, columns, one within another.

    Some weights are transposes of that memory, as those of tied adapters.
    """
    for seed in range(40):
        torch.manual_seed(seed)
        memory, pairs, places = torch.zeros(60), [], []
        for _ in range(4):
            first, second = layers(2)
            rows, columns = torch.randint(1, 4, (2,)).tolist()
            turned = bool(torch.randint(2, ()))
            own = memory[int(torch.randint(50, ())) :][:9].view(3, 3)
            first.weight.data = own.T if turned else own
            transpose = bool(torch.randint(2, ()))
            G = block(first, "weight", slice(0, rows), slice(0, columns), transpose=transpose)
            h = rows if transpose else columns
            pairs.append(pair([G], [block(second, "weight", columns=slice(0, h))], GL(h)))
            numbers = torch.arange(60)[first.weight.storage_offset() :][:9].view(3, 3)
            numbers = (numbers.T if turned else numbers)[:rows, :columns]
            places.append(set(numbers.flatten().tolist()))
        met = {i for i, a in enumerate(places) for j, b in enumerate(places) if i != j and a & b}
        assert sharing(pairs) == met


def test_a_refused_pair_says_why():
    a, b, *_ = layers()
    found = refused(pair([block(a, "weight")], [block(b, "weight")], GL(3)), SHARED, frozen=True)
    assert (found.group, found.reason, found.frozen) == (None, SHARED, True)

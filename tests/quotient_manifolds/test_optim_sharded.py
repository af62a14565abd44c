"""Optimisers of models that FSDP2 shards: the same training as in one process."""

import pytest
import torch

from .. import sharded_training as training
from ..processes import together


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """What every process has at the end, by number of processes and rank."""
    folder, found = tmp_path_factory.mktemp("sharded"), {}
    for size in (2, 4):
        done = together(size, training.work, folder, folder=folder)
        assert not any(done.codes), done.output
        found.update(((size, rank), torch.load(folder / f"{size}-{rank}.pt")) for rank in range(size))
    return found


def far(one, two):
    return max(float((one[k] - two[k]).abs().max() / one[k].abs().max()) for k in one)


@pytest.mark.parametrize(("way", "kind", "dtype"), training.CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_sharded_training_equals_that_of_one_process(ends, way, kind, dtype):
    def whole(*like):
        model = training.network(way, dtype)
        optimizer = training.optimizer_of(model, way, kind)
        for size in like:
            training.trained(model, optimizer, way, training.half(way), like=size)
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    bound = 1e-10 if dtype == torch.float64 else 1e-6
    of_size = {size: (size,) * training.halves(way, dtype, size) for size in (2, 4)}
    wanted = {like: whole(*like) for like in (*of_size.values(), (2, 4)) if like}
    for (size, _), found in ends.items():
        if not of_size[size]:
            continue
        assert far(wanted[of_size[size]], found[way, kind, dtype][0]) < bound
        if size == 4:
            assert far(wanted[2, 4], found[way, kind, dtype, "resumed"][0]) < bound


def test_every_process_has_the_state_of_its_share(ends):
    """Three heads: two processes have one and two of them, of four one has none."""
    case = ("attention", "adam", torch.float64)
    of_two, of_four = ([ends[size, rank][case][1] for rank in range(size)] for size in (2, 4))
    assert sum(of_two) == sum(of_four) == 3 * max(of_four) > 0
    assert max(of_two) == 2 * max(of_four)

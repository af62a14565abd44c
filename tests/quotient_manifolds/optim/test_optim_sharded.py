"""Optimisers of models that FSDP2 shards: the same training as in one process."""

import pytest
import torch
import torch.distributed as dist

from tests.support import sharded_training as training
from tests.support.processes import together


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """What every process has at the end, by number of processes and rank."""
    folder, found = tmp_path_factory.mktemp("sharded"), {}
    for size in (2, 4):
        # Where this is not set accelerate takes more threads, in which forked processes stand still.
        done = together(size, training.work, folder, folder=folder, OMP_NUM_THREADS="1")
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
            training.trained(model, optimizer, way, range(training.STEPS // 2), like=size)
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    # In an autocast pass rounding may flip the last of a weight's 8 bits.
    bound = 1e-10 if dtype == torch.float64 else 1e-2 if way == "autocast" else 1e-6
    of_size = {size: (size,) * training.halves(way, dtype, size) for size in (2, 4)}
    if not training.possible(way, dtype):
        pytest.skip("FSDP2 of this torch cannot do that on a CPU")
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


def test_a_trainer_trains_alike(ends, tmp_path):
    """That of transformers, which lets accelerate shard."""
    model = training.trained_by_trainer(tmp_path, 1)
    wanted = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    start = dict(training.network("root", torch.float64).named_parameters())
    assert far(wanted, {name: start[name].detach() for name in wanted}) > 1e-2
    for found in ends.values():
        assert far(wanted, found["trainer"]) < 1e-10


def test_all_processes_refuse_what_one_of_them_cannot_use(ends):
    """NaN in one process's copy of a gradient that is not sharded, though others are."""
    for (size, rank), found in ends.items():
        for words, stays in found["spoilt"]:
            assert stays
            assert words.endswith("no weight was changed") or "no weight was changed; check the loss" in words
            assert ("NaN" in words) == (rank == size - 1)


def test_pairs_of_one_shape_are_sharded_before_the_optimiser_is_made_or_all():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = training.network("part", torch.float64)
        optimizer, old = training.optimizer_of(model, "part", "adam"), dict(model.named_parameters())
        training.shard(model, "part", 1)
        new = {old[name]: p for name, p in model.named_parameters()}
        for group in optimizer.param_groups:  # as accelerate does
            group["params"] = [new[p] for p in group["params"]]
        training.loss(model, "part", training.X, training.Y).backward()
        with pytest.raises(ValueError, match=r"sharded .* in part since the optimiser was made; fully_shard all"):
            optimizer.step()
    finally:
        dist.destroy_process_group()

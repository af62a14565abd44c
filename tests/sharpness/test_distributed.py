import copy
import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharpness
from sharpness import cli
from sharpness.distributed import World, checksum
from tests.support import spread
from tests.support.processes import together


def run(folder, *arguments, **environment):
    """``sharpness run`` by two processes."""
    return together(2, cli.main, ["run", *map(str, arguments), "--quiet"], folder=folder, **environment)


def without_times(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_one_and_two_processes_give_identical_values(tmp_path):
    options = ["--measure", "geodesic-inv", "adaptive", "--rho", "0.1", "0.3", "--restarts", "1", "--steps", "5"]
    done = run(
        tmp_path, "tests.support.spread:model", "tests.support.spread:batches", *options, "--out", tmp_path / "two.json"
    )
    assert done.codes == [0, 0], done.output
    assert [o.count("nats at ρ = 0.1 (geodesic-inv):\n    loss") for o in done.output] == [1, 0]  # one reports
    found = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))["results"]
    torch.set_default_dtype(torch.float32)
    for two, measure in zip(found, ("geodesic-inv", "adaptive"), strict=True):
        one = sharpness.evaluate(
            spread.model(), spread.batches(), measure=measure, rho=[0.1, 0.3], restarts=1, steps=5
        ).to_dict()
        one, two = json.loads(json.dumps(one)), dict(two)
        assert without_times(one.pop("batches")) == without_times(two.pop("batches"))
        assert {"quantity": measure, **one} == two


@pytest.mark.parametrize("failure", ["error", "kill"])
def test_a_process_that_fails_ends_the_run(failure, tmp_path):
    start = time.monotonic()
    options = ["--measure", "adaptive", "--rho", "0.1", "0.3", "--restarts", "1", "--relative-tol", "0"]
    done = run(tmp_path, "tests.support.spread:failing", "tests.support.spread:batches", *options, FAILURE=failure)
    assert time.monotonic() - start < 120
    assert all(done.codes)  # nobody tells the first that the other is gone
    said = "process 1 failed with ValueError: the eighth pass failed" if failure == "error" else "another process"
    assert said in done.output[0]


@pytest.fixture(scope="module")
def in_a_group(tmp_path_factory):
    """What both processes of a group say."""
    folder = tmp_path_factory.mktemp("group")
    done = together(2, spread.in_a_group, folder, folder=folder)
    assert not any(done.codes), done.output
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_a_model_in_ddp_is_measured_like_its_module(in_a_group):
    """DDP broadcasts buffers in every pass, and processes make other passes; also where one process alone measures."""
    expected = pytest.approx(spread.said(spread.network(nn.BatchNorm1d(8)), spread.examples()), rel=1e-12)
    assert in_a_group[0]["alone"] == expected
    assert all([*found["DDP"], found["same"]] == [expected] * 3 for found in in_a_group)
    expected = pytest.approx(spread.said(spread.network(), spread.examples()), rel=1e-10)
    assert all(found["sharded, same"] == expected for found in in_a_group)


@pytest.mark.parametrize(
    ("what", "name"),
    {
        "shares": "batch 0", "order": "batch 0", "counts": "batch 5", "labels": "batch 2",
        "weights": "'0.weight' of the model", "buffers": "'1.running_mean' of the model",
    }.items(),
)  # fmt: skip
def test_processes_hold_the_same_batches_and_weights(in_a_group, what, name):
    """Else half of the data would be measured, or a mixture of models; also where they share a sharded model."""
    ways = [what, f"sharded, {what}"] if f"sharded, {what}" in in_a_group[0] else [what]
    assert len(ways) == 1 + name.startswith("batch")
    for way in ways:
        for found in in_a_group:
            assert found[way].startswith(f"{name} is not the same on all processes; give all of them"), found[way]


def test_a_training_in_ddp_goes_on_as_if_it_had_not_been_measured(tmp_path):
    done = together(2, spread.training, tmp_path, folder=tmp_path)
    assert not any(done.codes), done.output
    for rank in range(2):
        plain, measured = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert measured["weights"] == plain["weights"]
        assert [len(values) for values in measured["values"]] == [2] * 3


def test_checksums_are_those_of_contents():
    t = torch.arange(6.0).view(2, 3)
    kinds = [
        t, t.T, t.bfloat16(), t.bool(), torch.complex(t, t).conj(), t[:0], t[0, 1], t.sum(), {"x": t.int()}, ["a", "b"],
    ]  # fmt: skip
    sums = [checksum(kind) for kind in kinds]
    assert sums == [checksum(copy.deepcopy(kind)) for kind in kinds]
    assert len(set(sums)) == len(kinds)
    assert checksum(t.T) == checksum(t.T.contiguous())
    assert checksum([t, "a"]) != checksum(["a", t])
    assert checksum([t.to_sparse(), t.to("meta"), 1]) == checksum([])  # what cannot be read counts for nothing


def test_world_of_one():
    world = World()
    assert world.owns(7)
    assert world.gather([1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="as it was"), world.together():
        raise ValueError("as it was")


def lost(model, batch):
    raise RuntimeError("Connection reset by peer: the data server is gone")


def test_nothing_is_communicated_without_a_group(tmp_path):
    """In an initialised process group, a call on one rank alone must not wait for others."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        called = []
        real = dist.all_gather_object
        dist.all_gather_object = lambda *a, **k: called.append(1) or real(*a, **k)
        try:
            plain = sharpness.evaluate(spread.model(), spread.batches(), rho=0.1, steps=2)
            assert not called
            shared = sharpness.evaluate(spread.model(), spread.batches(), rho=0.1, steps=2, group=dist.group.WORLD)
            assert len(called) == 1
            for group in (None, dist.group.WORLD):  # the user's own error, which looks like that of a lost process
                with pytest.raises(RuntimeError, match="Connection reset by peer: the data server is gone"):
                    sharpness.evaluate(spread.model(), spread.batches(), lost, rho=0.1, steps=2, group=group)
        finally:
            dist.all_gather_object = real
        assert float(plain) == float(shared)
    finally:
        time.sleep(0.1)  # as in torchrun
        dist.destroy_process_group()


def test_units_go_round():
    worlds = [World() for _ in range(3)]
    for rank, world in enumerate(worlds):
        world.rank, world.size = rank, 3
    for unit in range(10):
        assert sum(w.owns(unit) for w in worlds) == 1


@pytest.mark.parametrize("wrong", [torch.ones(2), "world", [0, 1]])
def test_a_group_is_one_of_torch(wrong):
    with pytest.raises(TypeError, match=f"group must be a process group of .*, got {type(wrong).__name__}"):
        sharpness.gradient_norm(nn.Linear(2, 2), [(torch.ones(3, 2), torch.arange(3) % 2)], group=wrong)

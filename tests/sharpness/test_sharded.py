"""A sharded model gives what it gives whole: FSDP2 over processes of this machine."""

import json

import pytest
import torch

from tests import sharded
from tests.extent import EXHAUSTIVE
from tests.processes import together

#: How the last of two processes fails.
WAYS = ("error", "interrupt", "kill")
#: Model, processes, and whether examples are spread over them.
JOBS = [("vit", 2, ""), ("llama", 3, ""), ("bert", 4, "spread")]
if EXHAUSTIVE:
    JOBS = [(name, size, how) for name in sharded.MODELS for size in (2, 3, 4) for how in ("", "spread")]


def assert_close(one, two, tolerance, path=()):
    if isinstance(one, dict):
        assert set(one) == set(two), path
        for key in one:
            assert_close(one[key], two[key], tolerance, (*path, key))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_close(a, b, tolerance, (*path, i))
    elif isinstance(one, float):
        assert abs(one - two) <= tolerance * max(abs(one), 1e-3), (path, one, two)
    elif isinstance(one, torch.Tensor):
        assert one.shape == two.shape
        assert float((one - two).norm()) <= tolerance * max(float(one.norm()), 1e-3), path
    else:
        assert one == two, path


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Where all processes have left what they found."""
    folder = tmp_path_factory.mktemp("sharded")
    for name, size, how in JOBS:
        done = together(size, sharded.work_sharded, sharded.measure, folder, name, how, folder=folder)
        assert not any(done.codes), done.output
    for how in WAYS:
        together(2, sharded.work_sharded, sharded.fail, folder, how, folder=folder)
    return folder


@pytest.mark.parametrize(("name", "size", "how"), JOBS)
def test_sharded_equals_whole(out, name, size, how):
    build, batch = sharded.MODELS[name]
    whole = sharded.results(name, build(), [batch()])
    assert all(max(of_all.values()) < 1e-10 for of_all in whole["residuals"].values())
    for rank in range(size):
        found = torch.load(out / f"{name}-{size}-{rank}{how}.pt")
        assert found.pop("untouched")
        assert_close(whole, found, 1e-10)


def test_a_process_that_fails_ends_all_and_leaves_the_weights(out):
    for how in WAYS:
        said, untouched, seconds = json.loads((out / f"{how}-0.json").read_text())
        assert said.startswith("RemoteError: another process of the group ended"), said
        assert untouched
        assert seconds < 60
    own = {how: json.loads((out / f"{how}-1.json").read_text())[:2] for how in ("error", "interrupt")}
    assert own["error"] == ["RuntimeError: no more", True]
    assert own["interrupt"] == ["KeyboardInterrupt: ", True]

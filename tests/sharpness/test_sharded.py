"""A sharded model gives what it gives whole: FSDP2 over processes of this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import sharded

pytestmark = pytest.mark.xdist_group("torchrun")  # one after the other, as all that starts processes

#: The last of them is said with SHARDED=all; those are 2, 3 and 4 processes for each.
JOBS = [("vit", 2, ""), ("llama", 3, ""), ("bert", 4, "spread")]
if os.environ.get("SHARDED") == "all":
    JOBS = [(name, size, how) for name in sharded.MODELS for size in (2, 3, 4) for how in ("", "spread")]


def started(*jobs, timeout=300):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sharded", *(",".join(map(str, job)) for job in jobs)],
        cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


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


@pytest.mark.parametrize(("name", "size", "how"), JOBS)
def test_sharded_equals_whole(tmp_path, name, size, how):
    done = started((size, "measure", tmp_path, name, how))
    assert done.returncode == 0, done.stderr
    build, batch = sharded.MODELS[name]
    whole = sharded.results(build(), [batch()])
    for rank in range(size):
        found = torch.load(tmp_path / f"{name}-{size}-{rank}.pt")
        assert found.pop("untouched")
        # Llama takes the roots of its norms in float32, whatever its weights are.
        assert_close(whole, found, 1e-6 if name == "llama" else 1e-9)


def test_a_process_that_fails_ends_all_and_leaves_the_weights(tmp_path):
    begin = time.monotonic()
    ways = ("error", "interrupt", "kill")
    done = started(*((2, "fail", tmp_path, how) for how in ways))
    assert time.monotonic() - begin < 60 * len(ways)
    assert done.returncode == 0, done.stderr
    for how in ways:
        said, untouched = json.loads((tmp_path / f"{how}-0.json").read_text())
        assert said.startswith("RemoteError: another process of the group ended"), said
        assert untouched
    own = {how: json.loads((tmp_path / f"{how}-1.json").read_text()) for how in ("error", "interrupt")}
    assert own["error"] == ["RuntimeError: no more", True]
    assert own["interrupt"] == ["KeyboardInterrupt: ", True]

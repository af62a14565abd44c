"""Whatever a user hands over: a result or a refusal in one line, nothing else on disk, nobody else's model."""

import pytest

from tests.support.extent import EXHAUSTIVE
from tests.support.fuzzing import cases, world

CHUNKS = list(cases.chunks(12_000 if EXHAUSTIVE else 84))


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    world.build(place := tmp_path_factory.mktemp("fuzz") / "base")
    return place


@pytest.mark.parametrize(("surface", "numbers"), CHUNKS, ids=[f"{surface}-{n.start}" for surface, n in CHUNKS])
def test_only_results_and_refusals(surface, numbers, base):
    failures, _ = cases.run(surface, numbers, base)
    if failures:
        pytest.fail(f"{len(failures)} of {len(numbers)} cases\n" + "\n".join(map(str, failures[:20])), pytrace=False)

"""Every architecture: its pairs are right or there is a reason; a measure is invariant, or refused in a sentence."""

import csv

import pytest

from tests.support import tiny, verdicts
from tests.support.extent import EXHAUSTIVE

#: What has gone wrong once, for every run of the tests: types that compute in single precision inside, latent attention
#: without a rotated part, names that say little or mislead, rows of positions.
SAMPLE = [("transformers", name) for name in ("xglm", "glm5_next", "cpmant", "rwkv", "parakeet_encoder", "xlnet")]
CASES = [(lib, name) for lib in tiny.NAMES for name in tiny.NAMES[lib]()] if EXHAUSTIVE else SAMPLE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), CASES)
def test_nothing_is_wrong_and_nothing_crashes(library, name):
    if (library, name) in SAMPLE and name not in tiny.NAMES[library]():
        pytest.skip(f"this {library} has no {name}")
    measures = verdicts.MEASURES[: None if EXHAUSTIVE else 1]
    row = verdicts.judge(library, name, measures)
    if "left out" in row:
        assert EXHAUSTIVE, row["left out"]
        pytest.skip(row["left out"])
    assert verdicts.word(row["pairs"]) in ("right", "no attention", "none, with a reason"), row
    assert {verdicts.word(row[measure]) for measure in measures} <= {"right", "refused"}, row


def test_the_table_says_that_nothing_is_wrong():
    with verdicts.TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert not [r for r in rows if verdicts.word(r["answer"]) in ("wrong", "crash")]
    assert all(verdicts.word(r["answer"]) in ("right", "no attention", "no pair", "refused") for r in rows)
    count = {q: sum(int(r[q[1]] or 0) for r in rows if r["library"] == q[0]) for q in
             ((lib, question) for lib in tiny.NAMES for question in ("pairs", *verdicts.MEASURES))}  # fmt: skip
    least = {"transformers": 370, "timm": 30, "open_clip": 8}
    assert all(n >= least[library] for (library, _), n in count.items())

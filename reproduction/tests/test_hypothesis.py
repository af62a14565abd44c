"""The deciding test, on rows whose answer is known beforehand."""

import numpy as np
import pytest

from reproduction.hypothesis import GIVEN, hypothesis
from reproduction.statistics import kendall


def zoo(effect, models=300, bend=0.0, seed=0):
    """The test loss follows the controls and, beside them, the sharpness at the larger radius alone."""
    rng = np.random.default_rng(seed)
    loss, error, distance, own, other, noise = rng.standard_normal((6, models))
    shared = loss + error + distance
    goal = shared + effect * own + bend * (distance**2) + noise
    rows = []
    for i in range(models):
        of = {"checkpoint": f"m{i:03d}"}
        rows.append({**of, "kind": "fit", "train_loss": loss[i], "train_error": error[i], "test_loss": goal[i]})
        rows.append({**of, "kind": "baselines", "distance": distance[i]})
        for rho, mine in ((0.3, own[i]), (0.1, other[i])):
            value = np.exp(shared[i] + mine + bend * distance[i] ** 2)
            rows.append({**of, "kind": "sharpness", "measure": "complete-inv", "ablation": {}, "rho": rho,
                         "sharpness": value})  # fmt: skip
    return rows


@pytest.mark.parametrize(
    ("effect", "models", "said"), [(1, 100, "confirmed"), (-1, 100, "refuted"), (0, 30, "unresolved")]
)
def test_the_answer_is_that_of_the_deciding_line_alone(effect, models, said):
    rows = zoo(effect, models)
    found = hypothesis(rows, seen=["m000", "m001"])
    assert found["answer"].tolist() == [said, "–", "–", "–"]
    assert found["models"].tolist() == [models, models, models - 2, models - 2]
    assert len(hypothesis(rows)) == 2


def test_the_deciding_line_is_the_test_of_the_plan():
    rows = zoo(0.3, 60)
    tables = {kind: [r for r in rows if r["kind"] == kind] for kind in ("fit", "baselines")}
    sharp = {rho: [r["sharpness"] for r in rows if r.get("rho") == rho] for rho in (0.1, 0.3)}
    given = [[r[c] for r in tables["baselines" if c == "distance" else "fit"]] for c in GIVEN]
    right, small = (
        kendall(sharp[rho], [r["test_loss"] for r in tables["fit"]], given=given, resamples=10_000)
        for rho in (0.3, 0.1)
    )
    found = hypothesis(rows)[["τ", "low", "high"]].values[0].tolist()
    assert found == [right.value, right.low, right.high]
    assert found != [small.value, small.low, small.high]


def test_squares_remove_a_shared_minimum():
    plain, squared = hypothesis(zoo(0, bend=2.0))["τ"]
    assert plain > 0.2 > squared


def test_a_zoo_without_the_measure():
    with pytest.raises(ValueError, match="measured by complete-inv"):
        hypothesis([{"checkpoint": "m", "kind": "fit", "train_loss": 1.0, "train_error": 0.1, "test_loss": 1.0}])

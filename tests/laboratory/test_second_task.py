"""The study of second tasks: its order, its statistics on planted collections, and a small network from end to end."""

import json
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from studies import _second_report

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def study():
    pytest.importorskip("peft")
    from studies import second_task

    return second_task


def test_every_twelve_networks_are_balanced(study):
    order = study.tasks.grid()
    assert len(set(order)) == len(order) == 48
    for count in (12, 24, 36, 48):
        for axis in ("rate", "decay", "smoothing", "seed", "optimizer"):
            assert len(set(Counter(getattr(r, axis) for r in order[:count]).values())) == 1, (count, axis)


def planted(seed, networks=48):
    """Collections whose target depends on the controls and on something else, which one predictor knows with noise."""
    rng, found = np.random.default_rng(seed), {}
    for name in ("a", "b", "c"):
        loss, noise, hidden, *more = rng.standard_normal((6, networks))
        target = loss + hidden
        found[name] = pd.DataFrame(
            {
                "loss": loss, "error": loss + 0.3 * noise, "target": target, "planted": target + 0.7 * more[0],
                "shuffled": rng.permutation(target + 0.7 * more[0]),
                "of controls": 2 * loss + 0.3 * noise + 0.3 * more[1],
            }
        )  # fmt: skip
    return found


def test_only_what_was_planted_is_found(study):
    report, wrong = _second_report, Counter()
    for seed in range(10):
        pairs = [(x, "target") for x in ("planted", "shuffled", "of controls")]
        rows = report.correlations(planted(seed), pairs, resamples=1000)
        mean = rows[rows.collection == "mean"].set_index("predictor")
        assert mean.all_low["planted"] > 0
        wrong.update(x for x in ("shuffled", "of controls") if not mean.all_low[x] < 0 < mean.all_high[x])
        assert (rows.all_low <= rows.low).all()
        assert (
            abs(mean["τ"]["planted"] - rows[(rows.predictor == "planted") & (rows.collection != "mean")]["τ"].mean())
            < 1e-9
        )
    assert wrong.total() <= 1  # intervals of 95 %
    plain = report.correlations(planted(0), pairs, given=(), resamples=100)
    assert plain[plain.predictor == "of controls"]["τ"].min() > 0.2  # which the controls explain


def test_granulated_correlations_compare_networks_that_differ_in_one_axis(study):
    report = _second_report
    rows = pd.DataFrame([r._asdict() for r in study.tasks.grid()])
    kinds = rows.optimizer.map({"plain": 0, "SAM": 1, "GeodesicSAM": 2})
    rows["x"] = 100 * rows.rate + 10 * kinds + rows.seed + 5 * rows.decay + 2.5 * rows.smoothing
    rows["y"] = 100 * rows.rate - 10 * kinds + rows.seed + 5 * rows.decay + 2.5 * rows.smoothing
    found = report.granulated(rows, "x", "y")
    assert found == pytest.approx({"rate": 1, "decay": 1, "smoothing": 1, "optimizer": -1, "seed": 1, "mean": 0.6})


@pytest.fixture
def small(study, tmp_path, monkeypatch):
    """A collection of byte-level language models that takes seconds."""
    for name in ("alps", "official"):
        (tmp_path / name).mkdir()
    (tmp_path / "alps" / "dev.tsv").write_text(
        "".join(f"{i} of them came\tSports\n" for i in range(50)), encoding="utf-8"
    )
    (tmp_path / "official" / "test.csv").write_text(
        "".join(f'"2","t","{i} went"\n' for i in range(50)), encoding="utf-8"
    )
    for name in ("train", "dev"):
        text = "label\tsentence\n" + "".join(f"1\t{i} good ones\n" for i in range(50))
        (tmp_path / f"{name}.tsv").write_text(text, encoding="utf-8")
    sizes = dict.fromkeys(("train", "test", "second_train", "second_test"), 8)
    rho = {m: study.COLLECTIONS["gpt"].rho[m] for m in ("euclidean", "adaptive", "complete-inv")}
    made = study.COLLECTIONS["gpt"]._replace(
        steps=2, second_steps=2, batch=4, points=4, curvature_points=2, sizes=sizes, rho=rho
    )
    monkeypatch.setattr(study, "COLLECTIONS", {"gpt": made})
    monkeypatch.setattr(study, "most_frequent", lambda batch: 2.0)  # it will have learned nothing
    monkeypatch.setattr(study, "ADAPTED", 1)
    quick = study.sharpness.gradient_norm
    monkeypatch.setattr(study.sharpness, "hessian", lambda *a, num_matvecs, **o: quick(*a, **o), raising=False)
    return tmp_path


def varied(row, recipes):
    """Rows of three collections: a row with random factors."""
    rng = np.random.default_rng(0)

    def moved(value):
        if isinstance(value, dict):
            return {k: moved(v) for k, v in value.items()}
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value * rng.uniform(0.5, 2) if isinstance(value, float) else value

    numbered = list(enumerate(recipes))
    return [
        {**moved(row), **r._asdict(), "collection": c, "number": i}
        for c in ("minilm", "vit", "gpt")
        for i, r in numbered
    ]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_network_from_end_to_end(study, small, monkeypatch, capsys):
    def rows(name, *networks):
        command = [
            "second_task.py",
            "run",
            "--sst2",
            small,
            "--ag-news",
            small,
            "--out",
            small / name,
            "--only",
            *networks,
        ]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        study.main()
        return [json.loads(line) for line in (small / name).read_text(encoding="utf-8").splitlines()]

    first = rows("rows.jsonl", "gpt:0")[0]
    assert [r["method"] for r in first["second"]] == [m for m in study.tasks.METHODS for _ in study.SEEDS]
    assert all(r["distance"] > 0 for r in first["second"])
    assert set(first["rounding"]) == set(study.GAUGES)
    for gauge in first["rounding"].values():
        assert gauge["unrounded"] == pytest.approx(first["loss"], rel=1e-4)
        assert abs(gauge["8 bits"] - first["loss"]) < abs(gauge["2 bits"] - first["loss"]) + 1e-3
    assert first["rounding"]["random"]["euclidean"] != pytest.approx(
        first["predictors"]["euclidean worst large"], rel=1e-3
    )
    assert len(rows("rows.jsonl", "gpt:0")) == 1  # what is there is not done again
    monkeypatch.setattr(study, "ADAPTED", 0)
    again = rows("again.jsonl", "gpt:0")[0]
    known = {k: v for k, v in first["predictors"].items() if v is not None}
    assert {k: again["predictors"][k] for k in known} == pytest.approx(known, rel=1e-3)
    assert again["rounding"]["own"] == pytest.approx(first["rounding"]["own"], rel=1e-3)
    flat = _second_report.flat(first)
    assert flat["forgetting"] == pytest.approx(np.mean([r["loss"] for r in first["second"][:2]]) - first["loss"])
    capsys.readouterr()


def test_the_tables_have_all_rows(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_second_report, "LOOKS", {12: 0.99, 15: 0.95})
    report, losses = _second_report, {f"{b} bits": 2.0 + 1 / b for b in study.BITS}
    names = [f"{m} worst large" for m in ("euclidean", "adaptive", "geodesic-inv", "complete-inv")]
    row = {
        "loss": 2.0, "error": 0.5, "predictors": dict.fromkeys(names, 1.0),
        "rounding": dict.fromkeys(study.GAUGES, losses),
        "second": [{"method": "AdamW", "seed": 200, "loss": 2.5, "error": 0.6, "distance": 1.0}],
    }  # fmt: skip
    rows = varied(row, study.tasks.grid()[:14])
    unfinished = [r for r in rows if r["number"] < 12 or (r["collection"], r["number"]) in {("vit", 12), ("gpt", 13)}]
    assert {(r["collection"], r["number"]) for r in report.complete(unfinished)} == set(
        product(report.DECISIVE, range(12))
    )
    with pytest.raises(ValueError, match="11 networks of each collection are complete; the first look is at 12"):
        report.complete([r for r in unfinished if r["number"] != 11])
    tmp_path, images = tmp_path / "tables", tmp_path / "images"
    for folder in (tmp_path, images):
        folder.mkdir()
    report.report(unfinished, tmp_path, resamples=50)
    assert (images / "second_task.png").stat().st_size > 1000
    assert pd.read_csv(tmp_path / "second_task_hypothesis.csv").level[0] == 0.99
    assert report.PRIMARY[0] in capsys.readouterr().out
    partial = pd.read_csv(tmp_path / "second_task_partial.csv")
    assert set(partial.collection) == {"minilm", "vit", "gpt", "mean"}
    assert set(partial.target) == set(report.TARGETS)
    assert set(partial.predictor) == {*names, "loss", "error", "distance moved"}
    assert len(pd.read_csv(tmp_path / "second_task_gauges.csv")) == 3 * 12 * len(study.GAUGES)
    assert len(pd.read_csv(tmp_path / "second_task_second.csv")) == 3 * 12


def test_the_recorded_answer_is_that_of_the_recorded_networks():
    text = (ROOT / "results" / "second_task.jsonl").read_text(encoding="utf-8")
    rows = _second_report.complete([json.loads(line) for line in text.splitlines()])
    level = _second_report.LOOKS[1 + max(r["number"] for r in rows)]
    found = _second_report.primary(_second_report.tables(rows), level)
    (recorded,) = pd.read_csv(ROOT / "docs" / "tables" / "second_task_hypothesis.csv").to_dict("records")
    assert found["answer"] == recorded["answer"]
    for name in ("τ", "low", "high"):
        assert found[name] == pytest.approx(recorded[name], abs=2e-3)
    page = (ROOT / "docs" / "results" / "second-task.md").read_text(encoding="utf-8")
    said = f"| {found['τ']:+.2f} | {found['low']:+.2f} to {found['high']:+.2f} | {found['answer']} |"
    assert said in page

"""Rankings at comparable radii; rows as files; tables and figures of a sweep."""

import json

import numpy as np
import pytest
import scipy.stats

from sharpness import cli
from sharpness.comparison import common_increases, compare, curves, formatted
from sharpness.rows import read_results, targets, write_results
from sharpness.statistics import kendall_difference


def study(models=12, seed=0):
    """Gaps g; "adaptive" rises like (c ρ)², and "geodesic-inv" is the same quantity at a tenth of the radius."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(models):
        gap, power = rng.uniform(0.1, 0.4), rng.uniform(1.2, 2.8)
        name = f"m{i:02d}"
        rows.append(
            {
                "checkpoint": name, "kind": "fit", "train_loss": 0.3 + rng.normal() / 50, "train_error": 0.1,
                "test_loss": 1.0, "test_error": 0.1 + gap, "seconds": 1.0,
            }
        )  # fmt: skip
        rows.append({"checkpoint": name, "kind": "baselines", "weight_norm": rng.uniform(), "relative_flatness": None})
        for measure, unit, radii in (("adaptive", 1.0, (0.05, 0.5, 5.0)), ("geodesic-inv", 10.0, (0.01, 0.1, 1.0))):
            rows += [
                {
                    "checkpoint": name, "kind": "sharpness", "measure": measure, "ablation": ablation, "rho": rho,
                    "sharpness": gap * (unit * rho) ** power * factor, "passes": 7, "unconverged": 0,
                }
                for ablation, factor in (({}, 1.0), ({"statistic": "average"}, 0.5))
                for rho in radii
            ]  # fmt: skip
    return rows


def test_every_radius_has_the_tau_of_its_column():
    rows = study()
    found = compare(rows, resamples=50)
    goal = targets(rows)
    line = next(r for r in found if r.quantity == "adaptive" and r.choice == "ρ" and r.rho == 0.5)
    values = [next(r["sharpness"] for r in rows if r["checkpoint"] == m and r.get("rho") == 0.5) for m in line.models]
    assert line.values == tuple(values)
    assert line.tau.value == pytest.approx(scipy.stats.kendalltau(values, [goal[m] for m in line.models]).statistic)
    assert line.loss_increase == np.median(values)
    assert next(r for r in found if r.quantity == "adaptive" and r.choice == "paper").rho == 0.5
    best = next(r for r in found if r.quantity == "adaptive" and r.choice == "best")
    assert abs(best.tau.value) == max(
        abs(r.tau.value) for r in found if r.quantity == "adaptive" and r.choice == "ρ"
    )  # fmt: skip
    assert {r.quantity for r in found} >= {"train_loss", "weight_norm", "adaptive, statistic = average"}


def test_a_matched_increase_makes_equal_quantities_equal():
    """The two measures differ by their unit of length alone: no difference at a matched increase, one at a radius."""
    rows = study()
    found = [r for r in compare(rows, resamples=50) if r.choice == "matched_increase"]
    assert len(found) == 6
    for r in found:
        assert np.median(r.values) == pytest.approx(r.loss_increase, rel=0.02)
        if r.quantity == "geodesic-inv":
            assert (r.difference.value, r.difference.low, r.difference.high) == (0, 0, 0)
    same_radius = {r.quantity: r.tau.value for r in compare(rows, resamples=50) if r.choice == "ρ" and r.rho == 0.5}
    assert same_radius["adaptive"] != {r.quantity: r for r in found}["geodesic-inv"].tau.value


def test_a_measure_that_no_model_has_at_every_radius_is_left_out():
    rows = [{**r, "rho": r["rho"] + 1e-3 * int(r["checkpoint"][1:])} if "rho" in r else r for r in study()]
    assert {r.choice for r in compare(rows, resamples=5)} == {"–"}


def test_common_increases_lie_in_all_ranges():
    found = [c for c in curves(study()) if not c.ablation]
    increases = common_increases(found)
    assert increases == sorted(increases)
    assert all(
        c.medians.min() <= r * (1 + 1e-9) and r <= c.medians.max() * (1 + 1e-9) for c in found for r in increases
    )
    far = [r for r in study() if r.get("measure") != "geodesic-inv" or r["rho"] == 0.01]
    assert common_increases([c for c in curves(far) if not c.ablation]) == []


def test_difference_of_tau_resamples_both_together():
    rng = np.random.default_rng(0)
    y = rng.normal(size=40)
    x, other = y + 0.1 * rng.normal(size=40), rng.normal(size=40)
    found = kendall_difference(x, other, y)
    assert found.value == pytest.approx(
        scipy.stats.kendalltau(x, y).statistic - scipy.stats.kendalltau(other, y).statistic
    )  # fmt: skip
    assert 0.3 < found.low < found.value < found.high
    assert kendall_difference(x, x, y).high == 0


def test_too_few_models_with_a_target():
    with pytest.raises(ValueError, match="0 models have a gap"):
        compare([r for r in study() if r["kind"] != "fit"])
    with pytest.raises(ValueError, match="target must be one of"):
        targets(study(), "luck")


@pytest.mark.parametrize("style", ["markdown", "latex", "csv"])
def test_tables(style):
    text = formatted(compare(study(), resamples=20), style)
    assert "geodesic-inv" in text
    assert text.count("\n") > 10
    with pytest.raises(ValueError, match="markdown, latex or csv"):
        formatted([], "html")


def test_rows_survive_a_csv(tmp_path):
    rows = study()
    write_results(tmp_path / "r.csv", rows)
    write_results(tmp_path / "results.jsonl", rows)
    one, two = (compare(read_results(p), resamples=20) for p in (tmp_path / "r.csv", tmp_path))
    assert formatted(one) == formatted(two)
    back = read_results(tmp_path / "r.csv")
    assert [r["checkpoint"] for r in back] == [r["checkpoint"] for r in rows]
    assert back[2]["ablation"] == {}
    assert back[2]["sharpness"] == pytest.approx(rows[2]["sharpness"], rel=1e-7)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="holds no results"):
        read_results(tmp_path / "bad.csv")
    with pytest.raises(FileNotFoundError, match="no results at"):
        read_results(tmp_path / "none")


def test_commands(tmp_path, capsys):
    rows = study()
    write_results(tmp_path / "r.csv", rows)
    assert cli.main(["table", str(tmp_path / "r.csv"), "--short"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| quantity | radius |")
    assert "| adaptive | ρ |" not in printed
    assert cli.main(["table", str(tmp_path / "r.csv"), "--format", "latex", "--out", str(tmp_path / "t.tex")]) == 0
    assert (tmp_path / "t.tex").read_text().startswith("\\begin{tabular}")
    assert cli.main(["plot", str(tmp_path / "r.csv"), "--out", str(tmp_path / "figures")]) == 0
    drawn = sorted(p.name for p in (tmp_path / "figures").iterdir())
    assert drawn == ["radius.png", "scatter.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "figures").iterdir())
    assert cli.main(["table", str(tmp_path / "none.csv")]) == 2
    assert "there are no results at" in capsys.readouterr().err


def test_json_of_a_row_is_readable(tmp_path):
    write_results(tmp_path / "r.jsonl", study(3))
    assert all(json.loads(line)["kind"] for line in (tmp_path / "r.jsonl").read_text().splitlines())

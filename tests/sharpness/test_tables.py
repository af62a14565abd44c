"""Tables of rankings, and what they say in a word."""

from dataclasses import replace

import pytest

from sharpness.comparison import compare
from sharpness.tables import formatted, model_records, per_model, verdicts
from tests.studies import study


@pytest.mark.parametrize("style", ["text", "markdown", "latex", "csv"])
def test_tables(style):
    text = formatted(compare(study(), resamples=20), style)
    assert "geodesic-inv" in text
    assert text.count("\n") > 10
    with pytest.raises(ValueError, match="markdown, latex or csv"):
        formatted([], "html")


def test_names_in_latex():
    rows = [{**r, "checkpoint": r["checkpoint"] + r" $a_1^#\{x}~&%"} for r in study(models=2)]
    printed = per_model(rows, "latex")
    assert r"m00 \$a\_1\textasciicircum{}\#\textbackslash{}\{x\}\textasciitilde{}\&\%" in printed


def test_a_verdict_needs_all_radii_and_one_side():
    one = next(r for r in compare(study(), resamples=20) if r.corrected is not None and r.choice == "ρ")

    def said(*intervals):
        taus = [replace(one.corrected, low=a, high=b, value=(a + b) / 2) for a, b in intervals]
        return verdicts([replace(one, corrected=tau) for tau in taus])[one.quantity]

    assert said((0.1, 0.5), (0.2, 0.6)) == "yes, +"
    assert said((-0.5, -0.1), (-0.6, -0.2)) == "yes, −"
    assert said((0.1, 0.5), (-0.1, 0.6)) == said((0.1, 0.5), (-0.6, -0.2)) == "unresolved"
    assert said((-0.2, 0.2), (-0.1, 0.25)) == "nothing of size"
    assert said((-0.2, 0.2), (-0.1, 0.35)) == "unresolved"
    # The radius that came out best is no vote of its own, nor one without a corrected interval.
    assert verdicts([replace(one, choice="best"), replace(one, corrected=None)]) == {}


def test_one_quantity_in_two_units_has_one_verdict():
    found = verdicts(compare(study(), resamples=50))
    assert found["adaptive"] == found["geodesic-inv"]


def test_a_row_for_each_model():
    rows = study(models=3)
    for row in rows:
        if row["kind"] == "sharpness" and row["checkpoint"] != "m02":
            row["per_batch"] = [row["sharpness"] - 0.3, row["sharpness"] + 0.3]
    head, _, *lines = per_model(rows, "markdown", short=True).splitlines()
    # Four of the fit, the gap, two measures and their two ablations at one radius each.
    assert head.count("|") - 1 == 10
    assert "| adaptive, ρ = 0.5 | geodesic-inv, statistic = average, ρ = 0.1 | geodesic-inv, ρ = 0.1 |" in head
    assert [" ± 0.3 |" in line for line in lines] == [True, True, False]
    text = per_model(rows, "text").splitlines()
    assert len({line.index("m0") for line in text if "m0" in line}) == 1
    assert max(map(len, text)) == len(text[[line[0] for line in text].index("─")])
    assert r"$\pm$" in per_model(rows, "latex")
    records = model_records(rows)
    assert records[0]["geodesic-inv, ρ = 0.1, standard error"] == pytest.approx(0.3)
    assert records[2]["geodesic-inv, ρ = 0.1, standard error"] is None

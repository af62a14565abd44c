"""Tables and figures of a sweep: its rows, what they say of each model, and how every measure ranks the models."""

import csv
import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import reproduction.statistics
from reproduction.tables import read_table, write_rows
from sharpness import cli, evaluate, files
from sharpness.evaluation import progress_bar
from sharpness.results import DOUBTS
from sharpness.study import (
    compare,
    kendall,
    per_model,
    plot_sweep,
    read_config,
    read_failures,
    read_results,
    remarks,
    targets,
)
from sharpness.study.rows import write_results
from tests.sharpness.test_space import Gated
from tests.support import networks
from tests.support.studies import study


def test_rows_survive_a_csv(tmp_path):
    rows = study()
    write_rows(tmp_path / "r.csv", rows)
    write_results(tmp_path / "results.jsonl", rows)
    back = read_table(tmp_path / "r.csv")
    pd.testing.assert_frame_equal(compare(back), compare(read_results(tmp_path)), rtol=1e-6)
    assert [r["checkpoint"] for r in back] == [r["checkpoint"] for r in rows]
    assert back[2]["sharpness"] == pytest.approx(rows[2]["sharpness"], rel=1e-7)
    (tmp_path / "bad.jsonl").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no results"):
        read_results(tmp_path / "bad.jsonl")
    with pytest.raises(FileNotFoundError, match="no results at"):
        read_results(tmp_path / "none")
    (tmp_path / "failed.jsonl").write_text('{"checkpoint": "a", "kind": "fit", "err', encoding="utf-8")
    with pytest.raises(ValueError, match=r"failed.jsonl: Unterminated string"):
        read_failures(tmp_path)


def test_files_that_an_editor_has_saved_with_a_mark_are_read(tmp_path):
    """Windows' editors begin UTF-8 with a byte order mark."""
    row = {"checkpoint": "Größe", "kind": "fit", "train_loss": 0.5}
    (tmp_path / "results.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8-sig")
    (tmp_path / "failed.jsonl").write_text(json.dumps({**row, "error": "so"}), encoding="utf-8-sig")
    assert read_results(tmp_path) == [row]
    assert read_failures(tmp_path) == ["Größe (fit): so"]
    (tmp_path / "net.pt").touch()
    config = {"checkpoints": [{"path": "*.pt", "model": "torch.nn:PReLU"}], "data": "x.pt"}
    (tmp_path / "sweep.json").write_text(json.dumps(config), encoding="utf-8-sig")
    assert read_config(tmp_path / "sweep.json").checkpoints[0].name == "net.pt"


def test_the_result_of_one_run_is_named(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"command": "sharpness run", "results": []}, indent=2), encoding="utf-8")
    with pytest.raises(ValueError, match="holds no results of a sweep: it is the result of one run, not of a sweep"):
        read_results(path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([{"kind": "fit"}], "KeyError: 'checkpoint'"), ([{"checkpoint": "a"}], "KeyError: 'kind'"),
        ([{"checkpoint": "a", "kind": "sharpness"}], "KeyError: 'measure'"), (np.arange(3), "IndexError"),
        ([None], "TypeError"),
        ([{"checkpoint": "a", "kind": "fit", "test_error": "x", "train_error": 0}], "TypeError: unsupported"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_named(wrong, words):
    for read in (compare, per_model, lambda rows: plot_sweep(rows, "gap", "a.png")):
        with pytest.raises(ValueError, match=f"rows are not those of a sweep, as .*read_results returns them: {words}"):
            read(wrong)
    with pytest.raises(ValueError, match="rows are not those of a sweep"):
        remarks([None])
    with pytest.raises(ValueError, match=r"^target must be one of"):
        targets(wrong, "other")


def test_a_flag_is_true_or_false(tmp_path):
    (tmp_path / "a.tsv").write_text("a\n1\n", encoding="utf-8")
    for wrong in (torch.ones(2), "no", None):
        said = f"must be True or False, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=f"header {said}"):
            files.read_table(tmp_path / "a.tsv", wrong)
        with pytest.raises(TypeError, match=f"short {said}"):
            per_model(study(), short=wrong)
        with pytest.raises(TypeError, match=f"progress {said}"):
            progress_bar(3, "steps", "step", progress=wrong)


def test_json_of_a_row_is_readable(tmp_path):
    write_results(tmp_path / "r.jsonl", study(3))
    assert all(json.loads(line)["kind"] for line in (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("style", ["text", "latex", "csv"])
def test_tables(style, tmp_path, capsys):
    write_results(tmp_path / "r.jsonl", study())
    assert cli.main(["table", str(tmp_path / "r.jsonl"), "--format", style]) == 0
    text = capsys.readouterr().out
    assert "geodesic-inv" in text
    assert text.count("\n") > 10


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_a_terminal(monkeypatch, *arguments, columns=2000):
    """The lines of a table as a terminal of so many columns gets them."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    assert cli.main(["table", *map(str, arguments)]) == 0
    return shown.getvalue().partition("\n\n\033[2m-" if "\033[2m-" in shown.getvalue() else "\n\n- ")[0].splitlines()


def plain(line):
    return re.sub(r"\033\[.m", "", line)


@pytest.mark.parametrize("models", [4, 12])
def test_a_terminal_is_shown_the_best_and_sizes(models, tmp_path, monkeypatch):
    """Bold: of models the smallest number of a column, of measures the largest correlation."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    write_results(path := tmp_path / "r.jsonl", rows := study(models))
    lines = on_a_terminal(monkeypatch, path)
    if models < 10:
        frame = per_model(rows).set_index("model")
        best = {c: {frame[c].idxmin()} for c in frame if frame[c].nunique() > 1}
        number = frame["gap"]
    else:
        frame = compare(rows)
        frame.index = frame["quantity"] + [f" {r:g}" if r else "" for r in frame["rho"]]
        best = {c: set(frame.index[frame[c].abs() == frame[c].abs().max()]) for c in ("tau", "partial")}
        number = frame["tau"].abs().dropna()
    bold = [re.findall(r"\033\[1m *([\d.e+-]+)", line) for line in lines[1:]]
    for name, found in zip(frame.index, bold, strict=True):
        assert found == [f"{frame[c][name]:.3g}" for c in best if name in best[c]]
    assert any(bold)
    start = lines[0].index("gap" if models < 10 else "tau") + 3
    blocks = [plain(line)[start - 1] for line in lines[1:]]
    drawn = dict(zip(frame.index, blocks, strict=True))
    order = sorted(number.index, key=number.get)
    assert [drawn[name] for name in order] == sorted(drawn[name] for name in order)
    assert drawn[order[-1]] == "█"
    assert drawn[order[0]] < "█"
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_a_terminal(monkeypatch, path) == [plain(line) for line in lines]
    # Pieces are as wide as the terminal, and nothing is left out of them.
    narrow = on_a_terminal(monkeypatch, path, columns=70)
    assert max(map(len, narrow)) <= 70 < max(len(plain(line)) for line in lines)
    assert sorted(" ".join(narrow).split()) != sorted(plain(" ".join(lines)).split())  # names are repeated
    assert set(" ".join(narrow).split()) == set(plain(" ".join(lines)).split())


def test_a_pipe_gets_no_drawings(tmp_path, capsys):
    write_results(tmp_path / "r.jsonl", study())
    assert cli.main(["table", str(tmp_path / "r.jsonl")]) == 0
    assert not set("█▁\033") & set(capsys.readouterr().out)


def test_names_in_latex(tmp_path, capsys):
    rows = [{**r, "checkpoint": r["checkpoint"] + r" $a_1^#\{x}~&%"} for r in study(models=2)]
    write_results(tmp_path / "r.jsonl", rows)
    assert cli.main(["table", str(tmp_path / "r.jsonl"), "--per-model", "--format", "latex"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\\begin{tabular}")
    assert r"m00 \$a\_1\textasciicircum \#\textbackslash \{x\}\textasciitilde \&\%" in printed


def test_a_row_for_each_model():
    rows = study(models=3)
    for row in rows:
        if row["kind"] == "sharpness" and row["checkpoint"] != "m02":
            row["per_batch"] = [row["sharpness"] - 0.3, row["sharpness"] + 0.3]
    table = per_model(rows, short=True)
    # The model, four of the fit, the gap, two measures and their two averages at one radius each, and their errors.
    assert len(table.columns) == 1 + 4 + 1 + 4 * 2
    assert list(table.columns[6::2]) == [
        "adaptive, rho = 0.5", "adaptive, statistic = average, rho = 0.5", "geodesic-inv, rho = 0.1",
        "geodesic-inv, statistic = average, rho = 0.1",
    ]  # fmt: skip
    assert table["geodesic-inv, rho = 0.1, standard error"].tolist() == pytest.approx([0.3, 0.3, np.nan], nan_ok=True)
    assert len(per_model(rows).columns) == 1 + 4 + 1 + 12 * 2


def test_every_radius_has_the_tau_of_its_column():
    rows, goal = study(), targets(study())
    found = compare(rows)
    assert list(found["quantity"][:3]) == ["train_loss", "train_error", "weight_norm"]
    line = found[(found["quantity"] == "adaptive") & (found["rho"] == 0.5)].iloc[0]
    values = {r["checkpoint"]: r["sharpness"] for r in rows if r.get("measure") == "adaptive" and r["rho"] == 0.5}
    expected = scipy.stats.kendalltau(list(values.values()), [goal[m] for m in values])
    assert (line["tau"], line["p"]) == pytest.approx(expected)
    assert line["median"] == np.median(list(values.values()))
    assert line["models"] == 12
    assert set(found["quantity"]) >= {"adaptive, statistic = average", "geodesic-inv"}


def test_kendall_is_that_of_the_study():
    """The same resamples, with and without controls, with ties, and with models of which some are alike."""
    rng = np.random.default_rng(0)
    x, y, *z = rng.integers(6, size=(4, 15)).astype(float)
    for given in ([], z[:1], z):
        found = kendall(x, y, given, level=0.9)
        old = reproduction.statistics.kendall(x, y, given=given, level=0.9, resamples=10_000)
        assert (found.value, found.low, found.high) == pytest.approx((old.value, old.low, old.high), abs=1e-12)
        assert found.p == pytest.approx(old.p) or given
    assert np.isnan(kendall(x, np.ones(15)).value)
    assert np.isnan(kendall(z[0], y, z).value)
    for wrong in ([1.0, 2.0], [1.0, float("nan"), 2.0]):
        with pytest.raises(ValueError, match="at least 3 models, and finite numbers"):
            kendall(wrong, wrong)


def test_partial_intervals_hold_together():
    """They are wider than those of one coefficient."""
    rows, goal = study(), targets(study())
    found = compare(rows)
    assert found["partial"].isna().sum() == 2  # of the controls
    line = found[(found["quantity"] == "adaptive") & (found["rho"] == 0.5)].iloc[0]
    fits = [r for r in rows if r["kind"] == "fit"]
    x = [next(r["sharpness"] for r in rows if r["checkpoint"] == f["checkpoint"] and r.get("rho") == 0.5) for f in fits]
    given = [[f[name] for f in fits] for name in ("train_loss", "train_error")]
    y = [goal[f["checkpoint"]] for f in fits]
    alone, together = (kendall(x, y, given, level=level) for level in (0.95, 1 - 0.05 / len(found)))
    assert line["partial"] == pytest.approx(alone.value)
    assert line["partial_low"] < alone.low <= alone.high <= line["partial_high"]
    assert (line["partial_low"], line["partial_high"]) == pytest.approx((together.low, together.high), abs=1e-12)


def test_a_further_control():
    """A measure and a gap that share nothing but the distance: found given the losses, gone given the distance too."""
    rng = np.random.default_rng(0)
    loss, error, far, *noise = rng.standard_normal((5, 200))
    rows = []
    for i, (gap, sharp) in enumerate(zip(2 * far + noise[0], 2 * far + noise[1], strict=True)):
        of = {"checkpoint": f"m{i:03d}"}
        rows.append({**of, "kind": "fit", "train_loss": loss[i], "train_error": error[i], "test_error": error[i] + gap})
        rows.append({**of, "kind": "baselines", "distance": far[i], "geodesic_distance": None if i else 1.0})
        rows.append({**of, "kind": "sharpness", "measure": "adaptive", "ablation": {}, "rho": 0.5, "sharpness": sharp})
    further = ("train_loss", "train_error", "distance")
    one, two = (compare(rows, given=given).set_index("quantity").loc["adaptive"] for given in (further[:2], further))
    assert one["partial_low"] > 0.4
    assert abs(two["partial"]) < 0.15
    for name, count in (("geodesic_distance", 199), ("depth", 200)):
        with pytest.raises(ValueError, match=f"{count} models have no {name} to control for; there are train_loss"):
            compare(rows, given=("train_loss", name))


def test_too_few_models_with_a_target():
    with pytest.raises(ValueError, match="0 models have a gap"):
        compare([r for r in study() if r["kind"] != "fit"])
    with pytest.raises(ValueError, match="target must be one of"):
        targets(study(), "luck")


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    rows, path = study(), str(tmp_path / "r.jsonl")
    write_results(path, rows)
    assert cli.main(["table", path, "--short"]) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:2] == ["quantity", "rho"]
    assert [line.split()[1] for line in printed.splitlines() if line.split()[:1] == ["adaptive"]] == ["0.5"]
    assert "adaptive, statistic = average" in printed
    assert cli.main(["table", path, "--given", "weight_norm", "--format", "csv"]) == 0
    found = capsys.readouterr()
    assert "partial is tau given train_loss, train_error, weight_norm." in found.err
    assert next(line for line in found.out.splitlines() if line.startswith("weight_norm")).endswith(",,,")
    assert cli.main(["table", path, "--given", "relative_flatness"]) == 2
    assert "12 models have no relative_flatness to control for" in capsys.readouterr().err
    assert cli.main(["table", path, "--short", "--format", "csv"]) == 0
    found = csv.DictReader(capsys.readouterr().out.splitlines())
    assert {row["quantity"] for row in found} >= {"adaptive", "weight_norm"}
    for name, start in (("scatter.png", b"\x89PNG"), ("scatter.pdf", b"%PDF")):
        assert cli.main(["plot", path, "--out", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}\n"
        assert (tmp_path / name).read_bytes().startswith(start)
    before = Path(path).read_bytes()
    assert cli.main(["plot", path, "--out", path]) == 2
    assert "r.jsonl is no figure by its name; choose one that ends in .png" in capsys.readouterr().err
    assert Path(path).read_bytes() == before
    assert cli.main(["table", str(tmp_path / "none.jsonl")]) == 2
    assert "there are no results at" in capsys.readouterr().err


def test_a_sweep_replaces_nothing_that_it_reads(tmp_path, capsys):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "images" / "a").mkdir(parents=True)
    for name in ("results.jsonl", "net.pt"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    config = {"checkpoints": [{"path": "net.pt", "model": "torch.nn:PReLU"}], "data": "net.pt"}
    for more, out in (
        ({"initial": "results.jsonl"}, tmp_path),
        ({"data": "images"}, tmp_path / "images" / "results"),
    ):
        (tmp_path / "sweep.json").write_text(json.dumps(config | more), encoding="utf-8")
        assert cli.main(["sweep", str(tmp_path / "sweep.json"), "--out", str(out), "--quiet"]) == 2
        assert "which is read; choose another place" in capsys.readouterr().err
    assert (tmp_path / "results.jsonl").read_text(encoding="utf-8") == "{}"


def test_few_models_are_listed_one_by_one(tmp_path, capsys):
    """Nine models give no ranking, whatever is asked for; ten do."""
    rows = study(models=10)
    for row in rows:
        if row["kind"] == "sharpness":
            row["per_batch"] = [row["sharpness"]]
    write_results(tmp_path / "ten.jsonl", rows)
    write_results(tmp_path / "nine.jsonl", [r for r in rows if r["checkpoint"] != "m09"])
    assert cli.main(["table", str(tmp_path / "ten.jsonl")]) == 0
    assert "quantity" in capsys.readouterr().out
    assert cli.main(["table", str(tmp_path / "nine.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "9 models with a gap: too few to correlate, which needs 10." in printed
    assert "tau" not in printed
    assert "sharpness are in nats" in printed
    assert cli.main(["table", str(tmp_path / "nine.jsonl"), "--format", "csv"]) == 0
    found = capsys.readouterr()
    assert "too few to correlate" in found.err  # not in the file that a program reads
    assert [row["model"] for row in csv.DictReader(found.out.splitlines())] == [f"m{i:02d}" for i in range(9)]
    assert cli.main(["table", str(tmp_path / "ten.jsonl"), "--per-model", "--format", "csv", "--short"]) == 0
    first = next(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert float(first["adaptive, rho = 0.5"]) == next(r["sharpness"] for r in rows if r.get("rho") == 0.5)
    assert not any("standard error" in name or name.endswith("rho = 0.05") for name in first)  # of one batch


def test_models_without_errors_are_ranked_by_their_losses(tmp_path, capsys):
    rows = [{k: v for k, v in r.items() if not k.endswith("_error")} for r in study(models=10)]
    for row in rows:
        if row["kind"] == "fit":
            row |= {"train_loss": 0.1, "test_loss": 0.1 * int(row["checkpoint"][1:])}
    write_results(tmp_path / "r.jsonl", rows)
    assert cli.main(["table", str(tmp_path / "r.jsonl")]) == 0
    assert "too few to correlate, which needs 10. Give the sweep test data, or choose another --target" in (
        capsys.readouterr().out
    )
    assert cli.main(["table", str(tmp_path / "r.jsonl"), "--target", "loss-gap"]) == 0
    assert "quantity" in capsys.readouterr().out


def test_a_sweep_is_drawn(tmp_path):
    """The target of every model stands above its sharpness, in a panel for each measure."""
    rows = study()
    drawn = plot_sweep(rows, "gap", tmp_path / "scatter.png")
    gaps = {r["checkpoint"]: r["test_error"] - r["train_error"] for r in rows if r["kind"] == "fit"}
    panel = next(axes for axes in drawn.axes if "geodesic-inv" in axes.get_title())
    assert "τ = " in panel.get_title()
    shown = [line.get_xydata() for line in panel.lines] + [np.asarray(c.get_offsets()) for c in panel.collections]
    heights = next(points[:, 1] for points in shown if len(points) == len(gaps))
    np.testing.assert_allclose(sorted(heights), sorted(gaps.values()))
    with pytest.raises(ValueError, match="models have a gap"):
        plot_sweep([r for r in rows if r["kind"] != "fit"], "gap", tmp_path / "none.png")


@pytest.mark.parametrize(("models", "words"), [(9, "too few to correlate"), (13, "τ = ")])
def test_few_models_bear_no_correlation(tmp_path, models, words):
    panel = plot_sweep(study(models=models), "gap", tmp_path / "scatter.png").axes[0]
    assert words in panel.get_title()


def test_tables_fit_a_terminal(tmp_path, capsys, monkeypatch):
    """Few models stand side by side, many columns in blocks; every number is there; a file has long lines."""
    rows = study(models=2)
    for row in rows:
        if row["kind"] == "sharpness":
            row["per_batch"] = [row["sharpness"] - 0.1, row["sharpness"] + 0.1]
    write_results(tmp_path / "two.jsonl", rows)
    write_results(tmp_path / "many.jsonl", study())
    printed = {}
    for name, columns in (("two", ""), ("two", "80"), ("many", ""), ("many", "80")):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["table", str(tmp_path / f"{name}.jsonl")]) == 0
        printed[name, columns] = capsys.readouterr().out.partition("\n\n-")[0]
    assert max(map(len, printed["two", "80"].splitlines())) <= 80
    assert printed["two", ""].splitlines()[0].split()[:3] == ["model", "train", "loss"]
    assert printed["two", "80"].splitlines()[0].split() == ["model", "m00", "m01"]
    line = next(v for v in printed["two", "80"].splitlines() if v.startswith("geodesic-inv, rho = 0.1 "))
    expected = [row["sharpness"] for row in rows if row.get("measure") == "geodesic-inv" and row["rho"] == 0.1]
    assert [float(v) for v in line.split()[4::3]] == pytest.approx(expected, rel=5.1e-3)
    assert line.split()[5::3] == ["±"] * 2
    assert all(float(v) == pytest.approx(0.1) for v in line.split()[6::3])
    assert max(map(len, printed["many", ""].splitlines())) > 80 >= max(map(len, printed["many", "80"].splitlines()))
    assert sorted(re.findall(r"[\d.]+ \[.*?\]", printed["many", ""])) == sorted(
        re.findall(r"[\d.]+ \[.*?\]", printed["many", "80"])
    )


def test_every_place_that_prints_a_result_says_what_limits_it(tmp_path, capsys, monkeypatch):
    """A sweep kept that an ascent had not converged, and no table or figure said so."""
    monkeypatch.setattr("sharpness.study.correlation._RESAMPLES", 30)
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    run = ["tests.sharpness.study.test_study_tables:network", "tests.sharpness.study.test_study_tables:batches"]
    own = ["--rho", "2", "--steps", "1", "--measure", "geodesic-mix", "--quiet"]
    assert cli.main(["run", *run, *own, "--out", "r.json", "--report", "r.html"]) == 0
    printed, page = capsys.readouterr().out, html.unescape(Path("r.html").read_text(encoding="utf-8"))
    result = evaluate(network(), batches(), measure="geodesic-mix", rho=2.0, steps=1, progress=False)
    assert result.num_uncertified == len(result.direction(0).symmetries.pairs) // 2
    assert not result.batches[0].converged
    (kept,) = json.loads(Path("r.json").read_text(encoding="utf-8"))["results"]
    assert (kept["num_uncertified"], kept["batches"][0]["converged"]) == (result.num_uncertified, False)
    assert f"num_uncertified={result.num_uncertified}" in repr(result)
    assert "converged=False" in repr(result)
    words = [
        f"{result.num_uncertified} pairs got no gradient from these data",
        "1 of 1 ascents used all their steps and did not converge",
        "beyond 0.71 the ball of the mix metric leaves the manifold",
    ]
    for place in (printed, page, str(result)):
        assert [word for word in words if word not in place] == []
    assert re.search(r"converged[^\n]*\n.* 0 of 1", printed)
    # A sweep over the same network, as if of several.
    torch.save(network().state_dict(), "net.pt")
    data = ["--data", run[1], "--test", run[1], "--model", run[0]]
    assert cli.main(["sweep", "net.pt", *data, *own, "--out", "one"]) == 0
    rows = read_results("one")
    sound = [{k: 0 if k in DOUBTS else v for k, v in row.items()} for row in rows]
    commands = (["table"], ["table", "--format", "csv"], ["table", "--format", "latex"], ["plot", "--out", "p.png"])
    for models, column in ((3, "geodesic-mix, rho = 2, unconverged"), (10, "unconverged")):
        several = rows + [{**row, "checkpoint": f"{i}"} for i in range(models - 1) for row in sound]
        write_results("r.jsonl", several)
        capsys.readouterr()
        for command in commands if models == 3 else commands[:2]:
            assert cli.main([command[0], "r.jsonl", *command[1:]]) == 0
            found = capsys.readouterr()
            for word in words:
                lines = [v for v in (found.out + found.err).splitlines() if word.replace("of 1", f"of {models}") in v]
                assert [line.endswith("(geodesic-mix; net.pt)") for line in lines] == [True]
            if command == ["table"]:
                marks = re.search(r"\d \*", found.out), re.search(r"\* did not converge: a lower bound", found.out)
                assert [*map(bool, marks)] == [models == 3] * 2
            if "csv" in command:
                assert sum(int(row[column]) for row in csv.DictReader(found.out.splitlines())) == 1
    panel = plot_sweep(several, "gap", "p.png").axes[0]
    hollow = [line for line in panel.lines if line.get_markerfacecolor() == "white"]
    assert [len(line.get_xdata()) for line in hollow] == [1]
    assert panel.get_legend().get_texts()[0].get_text() == "not converged"
    assert not [c for c in per_model(sound) if "unconverged" in c]  # nor anything else of sound rows
    assert remarks(sound) == [f"{remark} (geodesic-mix; net.pt)" for remark in rows[-1]["remarks"]]


def test_standard_errors_are_explained_where_there_are_any(tmp_path, capsys):
    rows = study(models=2)
    for several in (False, True):
        for row in rows:
            if row["kind"] == "sharpness" and several:
                row["per_batch"] = [row["sharpness"], row["sharpness"]]
        write_results(tmp_path / "r.jsonl", rows)
        assert cli.main(["table", str(tmp_path / "r.jsonl")]) == 0
        printed = capsys.readouterr().out
        assert ("±" in printed) == ("standard error" in printed) == several


def network():
    torch.manual_seed(0)
    return networks.shake(Gated())


def batches():
    """One that reaches half of the pairs."""
    x, y = networks.tokens(count=6, width=4)
    return [(x.index_fill(2, torch.tensor([0]), 1.0), y)]

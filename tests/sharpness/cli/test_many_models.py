import csv
import json
import shlex
from pathlib import Path

from sharpness import cli
from sharpness.rows import write_results
from tests.studies import study


def test_commands(tmp_path, capsys):
    rows = study()
    write_results(tmp_path / "r.csv", rows)
    assert cli.main(["table", str(tmp_path / "r.csv"), "--short"]) == 0
    printed = capsys.readouterr().out
    assert any(line.split()[:3] == ["quantity", "radius", "ρ"] for line in printed.splitlines())
    assert "adaptive               ρ" not in printed
    assert "adaptive, statistic = average" in printed
    assert "Does it predict anything beyond training loss and error?" in printed
    assert cli.main(["table", str(tmp_path / "r.csv"), "--given", "weight-norm", "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert "τ given train loss and error, weight norm" in printed
    assert "Does it predict anything beyond training loss and error, weight norm?" in printed
    assert "- weight norm:" not in printed
    twice = ["table", "--given", "weight-norm", "--given", "weight_norm", str(tmp_path / "r.csv"), "--json"]
    assert cli.main(twice) == 0
    assert json.loads(capsys.readouterr().out)["given"] == ["train_loss", "train_error", "weight_norm"]
    assert cli.main(["table", str(tmp_path / "r.csv"), "--given", "relative-flatness"]) == 2
    assert "12 models have no relative_flatness to control for" in capsys.readouterr().err
    assert cli.main(["table", str(tmp_path / "r.csv"), "--short", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdicts"].keys() >= {"adaptive", "geodesic-inv"}
    assert {r["quantity"] for r in found["rankings"]} >= {"adaptive", "weight_norm"}
    assert cli.main(["table", str(tmp_path / "r.csv"), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("| quantity | radius |")
    assert cli.main(["table", str(tmp_path / "r.csv"), "--format", "latex", "--out", str(tmp_path / "t.tex")]) == 0
    assert (tmp_path / "t.tex").read_text().startswith("\\begin{tabular}")
    capsys.readouterr()
    assert cli.main(["plot", str(tmp_path / "r.csv"), "--out", str(tmp_path / "figures"), "--json"]) == 0
    assert {Path(p) for p in json.loads(capsys.readouterr().out)["figures"]} == set((tmp_path / "figures").iterdir())
    drawn = sorted(p.name for p in (tmp_path / "figures").iterdir())
    assert drawn == ["radius.png", "scatter.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "figures").iterdir())
    assert cli.main(["table", str(tmp_path / "none.csv")]) == 2
    assert "there are no results at" in capsys.readouterr().err


def test_results_are_not_replaced_by_their_table(tmp_path, capsys):
    (tmp_path / "sweep").mkdir()
    write_results(tmp_path / "r.csv", study())
    write_results(tmp_path / "sweep" / "results.jsonl", study())
    (tmp_path / "sweep" / "jobs").mkdir()
    for read, out in (
        ("r.csv", "r.csv"), ("sweep", "sweep/results.csv"), ("sweep", "sweep/../sweep/results.jsonl"),
        ("sweep", "sweep/jobs/a.json"), ("sweep/results.jsonl", "sweep/jobs/a.json"),
    ):  # fmt: skip
        assert cli.main(["table", str(tmp_path / read), "--short", "--out", str(tmp_path / out)]) == 2
        assert f"writing to {tmp_path / out} would " in capsys.readouterr().err
    for _ in range(2):  # a table may stand beside the results, and be written again
        assert (
            cli.main(["table", str(tmp_path / "sweep"), "--short", "--out", str(tmp_path / "sweep" / "table.txt")]) == 0
        )


def test_a_sweep_replaces_nothing_that_it_reads(tmp_path, capsys):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "images" / "a").mkdir(parents=True)
    for name in ("results.csv", "net.pt"):
        (tmp_path / name).write_text("name,test")
    config = {"checkpoints": [{"path": "net.pt", "model": "torch.nn:PReLU"}], "data": "net.pt"}
    for more, out in (
        ({"accuracies": {"file": "results.csv", "name": "name", "test": "test"}}, tmp_path),
        ({"data": "images"}, tmp_path / "images" / "results"),
    ):
        (tmp_path / "sweep.json").write_text(json.dumps(config | more))
        assert cli.main(["sweep", str(tmp_path / "sweep.json"), "--out", str(out), "--quiet"]) == 2
        assert "which is read; choose another place" in capsys.readouterr().err
    assert (tmp_path / "results.csv").read_text() == "name,test"


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
    assert "9 models with a gap: too few to correlate. A ranking needs at least 10." in printed
    assert "τ" not in printed
    assert "one batch: no spread" in printed
    assert "sharpness are in nats" in printed
    assert cli.main(["table", str(tmp_path / "nine.jsonl"), "--format", "csv"]) == 0
    found = capsys.readouterr()
    assert "too few to correlate" in found.err  # not in the file that a program reads
    assert "--given and" not in found.err
    assert [row["model"] for row in csv.DictReader(found.out.splitlines())] == [f"m{i:02d}" for i in range(9)]
    for further in (["--given", "distance"], ["--level", "0.9"]):
        assert cli.main(["table", str(tmp_path / "nine.jsonl"), *further]) == 0
        assert "--given and --level are for a ranking" in capsys.readouterr().err
    assert cli.main(["table", str(tmp_path / "ten.jsonl"), "--per-model", "--json", "--short"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first["adaptive, ρ = 0.5"] == next(r["sharpness"] for r in rows if r.get("rho") == 0.5)
    assert first["adaptive, ρ = 0.5, standard error"] is None
    assert "adaptive, ρ = 0.05" not in first


def test_models_without_errors_are_ranked_by_their_losses(tmp_path, capsys):
    rows = [{k: v for k, v in r.items() if not k.endswith("_error")} for r in study(models=10)]
    for row in rows:
        if row["kind"] == "fit":
            row |= {"train_loss": 0.1, "test_loss": 0.1 * int(row["checkpoint"][1:])}
    write_results(tmp_path / "r.jsonl", rows)
    assert cli.main(["table", str(tmp_path / "r.jsonl")]) == 0
    assert "A ranking needs at least 10; choose --target loss-gap or test-loss." in capsys.readouterr().out
    assert cli.main(["table", str(tmp_path / "r.jsonl"), "--target", "loss-gap"]) == 0
    assert "quantity" in capsys.readouterr().out


def test_the_help_of_every_command_has_commands_that_are_read():
    top = cli.parser()
    (commands,) = (a.choices for a in top._actions if isinstance(a.choices, dict))
    for command in (top, *commands.values()):
        shown = [line.split(None, 1)[1] for line in command.epilog.splitlines() if line.startswith("  sharpness ")]
        assert shown, command.prog
        for line in shown:
            top.parse_args(shlex.split(line))
            assert line in command.format_help()  # as it is, not wrapped

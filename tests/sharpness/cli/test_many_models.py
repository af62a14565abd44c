from sharpness import cli
from sharpness.rows import write_results
from tests.studies import study


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

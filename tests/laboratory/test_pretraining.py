"""The study of pre-training runs, goes on where it was cut short, and its page shows what was recorded."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def study():
    pytest.importorskip("transformers")
    from studies import pretraining

    return pretraining


@pytest.fixture
def texts(tmp_path, study, monkeypatch):
    for name, value in {"BATCH": 2, "CONTEXT": 8, "TEST": 4, "WIDTH": 16, "LAYERS": 1, "HEADS": 2}.items():
        monkeypatch.setattr(study, name, value)
    for name in ("alps", "official"):
        (tmp_path / name).mkdir()
    (tmp_path / "alps" / "dev.tsv").write_text(
        "".join(f"{i} of them came home\tSports\n" for i in range(50)), encoding="utf-8"
    )
    (tmp_path / "official" / "test.csv").write_text(
        "".join(f'"2","title","{i} went"\n' for i in range(50)), encoding="utf-8"
    )
    return tmp_path


def test_every_method_trains_every_parameter(study, texts):
    for positions in study.POSITIONS:
        for name, method in study.ALL.items():
            unit = study.Unit(positions, 2, 0.0, name, 0.01, 0.01, 0)
            model = study.network(positions)
            named = dict(model.named_parameters())
            before = {n: w.detach().clone() for n, w in named.items()}
            made = study.optimizers(model, method, unit)
            for _ in range(2):
                model.zero_grad()
                study.loss_of(model, study.data(texts)[1]).backward()
                for o in made:
                    o.step()
            same = {n for n, w in named.items() if bool((w == before[n]).all())}
            pairs = method.attention.startswith("quotient") and method.attention != "quotient vo"
            keys = {n for n in named if n.endswith("k_proj.bias")} if pairs else set()
            assert same == keys, (positions, name)


def test_a_study_goes_on(study, texts, monkeypatch, capsys):
    monkeypatch.setattr(study, "TUNING", (100,))
    monkeypatch.setattr(study, "SEEDS", (0, 1))
    out = texts / "rows.jsonl"
    arguments = ["pretraining.py", "--ag-news", texts, "--out", out, "--steps", "2", "--positions", "rotary"]
    arguments += ["--methods", "Muon", "AdamW on attention, Muon"]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    study.main()
    lines = out.read_text(encoding="utf-8").splitlines()
    out.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    study.main()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(lines)
    assert rows[-1]["loss"] == json.loads(lines[-1])["loss"]
    for name in ("Muon", "AdamW on attention, Muon"):
        done = study.tuned(rows, "rotary", 2, name, 0.0)
        assert set(study.beside(name, study.best(rows, "rotary", 2, name, 0.0))) <= set(done)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*map(str, arguments), "--report"])
    study.main()
    printed = capsys.readouterr().out
    for name in ("Muon", "AdamW on attention, Muon"):
        assert printed.count(f"| rotary | {name} |") == 2


def test_the_page_shows_the_recorded_runs(study, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretraining.py", "--report"])
    study.main()
    page = (ROOT / "docs" / "results" / "pretraining.md").read_text(encoding="utf-8")
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert printed
    for line in printed:
        assert line in page, line

"""The tables in docs/ are those that the recorded rows give."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def study():
    from studies import generalization

    return generalization


def test_a_zoo_in_parts(study, tmp_path, monkeypatch):
    """Only a zoo of which all models are there is reported; a part that is gathered again replaces itself."""
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    monkeypatch.setattr(study, "KINDS", {"minilm": (4, {})})
    parts = {"a": (0, [0, 1], {}), "b": (2, [10, 3], {"model_02": "it has learned nothing"})}

    def rows(zoo):
        return {"": [{"checkpoint": f"model_{i:02d}", "kind": "fit", "train_loss": 1.0 + i} for i in parts[zoo][1]]}

    def account(zoo):
        return {"first": parts[zoo][0], "left_out": parts[zoo][2], "hours": {"training": 1.5}}

    monkeypatch.setattr(study, "rows_of", rows)
    monkeypatch.setattr(study, "account", account)
    monkeypatch.setattr(
        study,
        "write",
        lambda name, rows: (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8"),
    )
    for zoo in ("b", "b"):
        study.gather("minilm", zoo)
    assert study.zoos() == ({}, {})
    study.gather("minilm", "a")
    own, _ = study.zoos()
    assert [r["checkpoint"] for r in own["minilm"]] == ["model_00", "model_01", "model_03", "model_10"]
    assert [r["train_loss"] for r in own["minilm"]] == [1.0, 2.0, 4.0, 11.0]
    assert study.trained("minilm", own["minilm"]) == 5
    assert study.hours("minilm") == {"training": 3.0}
    study.gather("minilm", "a")
    assert study.hours("minilm") == {"training": 3.0}


def test_tables_and_figures_regenerate(study, tmp_path, monkeypatch):
    study.report(tmp_path)
    from studies import lora_text_report as lora

    files = ["--tables", tmp_path / "tables" / "lora_text.md", "--figure", tmp_path / "images" / "lora_text.png"]
    monkeypatch.setattr(sys, "argv", ["lora_text_report.py", *map(str, files)])
    lora.main()
    others = ("adapter_identity.csv", "adapters_merge.md", "architectures.csv", "verdicts.csv")  # of other studies
    own = (p.name for p in (ROOT / "docs" / "tables").iterdir() if not p.name.startswith("second_task_"))
    committed = sorted(name for name in own if name not in others)
    assert sorted(p.name for p in (tmp_path / "tables").iterdir()) == committed
    for name in committed:
        assert (tmp_path / "tables" / name).read_text(encoding="utf-8") == (ROOT / "docs" / "tables" / name).read_text(
            encoding="utf-8"
        ), name
    for path in (tmp_path / "images").iterdir():
        assert (ROOT / "docs" / "images" / path.name).is_file(), path.name
    assert len(list((tmp_path / "images").iterdir())) == 4

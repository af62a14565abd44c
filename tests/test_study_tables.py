"""The tables in docs/ are those that the recorded rows give."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def study(monkeypatch):
    path = ROOT / "benchmarks" / "generalization.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("generalization", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("_common", "_lora_rivals", "lora_text", "lora_text_report"):
        sys.modules.pop(name, None)


def test_tables_and_figures_regenerate(study, tmp_path, monkeypatch):
    study.report(tmp_path)
    lora = importlib.import_module("lora_text_report")
    files = ["--tables", tmp_path / "tables" / "lora_text.md", "--figure", tmp_path / "images" / "lora_text.png"]
    monkeypatch.setattr(sys, "argv", ["lora_text_report.py", *map(str, files)])
    lora.main()
    committed = sorted(p.name for p in (ROOT / "docs" / "tables").iterdir() if p.name != "architectures.csv")
    assert sorted(p.name for p in (tmp_path / "tables").iterdir()) == committed
    for name in committed:
        assert (tmp_path / "tables" / name).read_text() == (ROOT / "docs" / "tables" / name).read_text(), name
    for path in (tmp_path / "images").iterdir():
        assert (ROOT / "docs" / "images" / path.name).is_file(), path.name
    assert len(list((tmp_path / "images").iterdir())) == 9

"""The examples run, and show what they say."""

import importlib.util
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.syspath_prepend(FOLDER)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_lora_vit(example, capsys):
    found = example("lora_vit").main(["--base-epochs", "2", "--epochs", "2"])
    change = {name: float((a - b).norm() / a.norm()) for name, (a, b) in found.items()}
    assert change["QuotientAdam"] < 1e-3
    assert change["AdamW"] > 0.05
    assert "QuotientAdam  accuracy" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_lora_trainer(example, capsys):
    assert example("lora_trainer").main(["--steps", "60"])["eval_accuracy"] > 0.8
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_sam_trainer(example, capsys):
    assert example("sam_trainer").main(["--steps", "60"])["eval_accuracy"] > 0.8
    assert "accuracy" in capsys.readouterr().out


def test_matrix_completion(example, capsys):
    module = example("matrix_completion")
    module.N, module.M, module.RANK, module.KNOWN = 60, 50, 2, 0.4
    found = module.main([])
    for optimiser in ("RiemannianSGD", "RiemannianAdam"):
        balanced, unbalanced = (found[f"{optimiser}, GLQuotientMix", i, 30] for i in (1, 1000))
        assert unbalanced == pytest.approx(balanced, rel=0.01)
    for optimiser in ("SGD", "SGD with momentum", "Adam"):
        balanced, unbalanced = (found[f"{optimiser}, factors", i, 30] for i in (1, 1000))
        assert unbalanced > 2 * balanced
    assert "at the end" not in capsys.readouterr().out

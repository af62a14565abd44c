"""The examples run, and show what they say."""

import importlib.util
import json
import types
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from quotient_manifolds.symmetries import find
from sharpness import cli, demo

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
@pytest.mark.parametrize(("optimizer", "lr"), [("adam", "5e-3"), ("muon", "5e-2")])
def test_lora_trainer(example, capsys, optimizer, lr):
    found = example("lora_trainer").main(["--steps", "60", "--optimizer", optimizer, "--lr", lr])
    assert found["eval_accuracy"] > 0.65  # of 512 sentences, half of each class: .5 +- .022 without learning
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_sam_trainer(example, capsys):
    assert example("sam_trainer").main(["--steps", "60"])["eval_accuracy"] > 0.65
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


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["muon", "adam"])
def test_peft_method_comparison(example, kind, monkeypatch):
    """The comparison's own code, cut down to how it makes an optimiser, gets ours by its name."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = FOLDER / "peft_method_comparison" / "experiments" / "lora" / f"llama-3.2-3B-rank32-quotient-{kind}"
    options = json.loads((folder / "training_params.json").read_text(encoding="utf-8"))
    small = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    net = transformers.LlamaForCausalLM(small)
    model = peft.get_peft_model(net, peft.PeftConfig.from_pretrained(folder))
    name = options["optimizer_type"]
    utils = types.SimpleNamespace(
        get_optimizer_and_scheduler=lambda model, *, optimizer_type, max_steps, **kwargs: (
            getattr(torch.optim, optimizer_type)(model.parameters(), **kwargs), None
        )
    )  # fmt: skip
    for known in ("QuotientMuon", "QuotientAdam"):
        monkeypatch.setattr(torch.optim, known, None, raising=False)  # and taken away again
    example("peft_method_comparison/run_quotient").install(utils)
    assert hasattr(torch.optim, name)
    optimizer, _ = utils.get_optimizer_and_scheduler(
        model, optimizer_type=name, max_steps=10, **options["optimizer_kwargs"]
    )
    assert type(optimizer).__name__ == name
    group = optimizer.param_groups[0]
    assert (len(group["params"]), group.get("scale", 2.0)) == (4, 2.0)
    ids = torch.randint(20, (2, 7))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


# -- the demo ----------------------------------------------------------------------------------------------------------


def test_the_digits_and_their_transformer():
    torch.set_default_dtype(torch.float32)
    x, y, _, y_test = demo.digits(0)
    assert (len(y), len(y_test)) == (1437, 360)
    model = demo.vision_transformer()
    assert len(find(model).pairs) == 24
    assert model(x[:2]).logits.shape == (2, 10)
    # The loss that training lowers: after one epoch the accuracy is still that of chance.
    before = cross_entropy(model(x).logits, y)
    demo.train(model, x, y, epochs=1, progress=False)
    assert cross_entropy(model(x).logits, y) < before


def test_demo_end_to_end(tmp_path, monkeypatch, capsys):
    """The demo at a quarter of its training; the full one is ``make demo``."""
    torch.set_default_dtype(torch.float32)
    full = demo.train
    monkeypatch.setattr(demo, "train", lambda *a, **k: full(*a, **k | {"epochs": 14}))
    monkeypatch.setattr(demo, "MOVES", {kind: demo.MOVES[kind] for kind in ("heads", "gain")})
    out = tmp_path / "picture.png"
    assert cli.main(["demo", "--seed", "1", "--out", str(out), "--quiet"]) == 0
    assert "LayerNorm gains" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert found["test_accuracy"] > 0.7  # of ten classes, after a quarter of the training: .83 to .89 over seeds
    network, heads, gain = found["rows"]
    assert found["output_change"] < 1e-3
    for name, moved in (("complete-inv", heads), ("complete-inv", gain), ("geodesic-inv", heads)):
        assert abs(moved[name] / network[name] - 1) < 5e-3
    for name, moved in (("adaptive", heads), ("euclidean", gain), ("geodesic-inv", gain)):
        assert abs(moved[name] / network[name] - 1) > 0.05


def test_numbers_of_another_origin_are_not_replaced(tmp_path, capsys):
    """The numbers go beside the picture: beside config.png stands a model's configuration."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert cli.main(["demo", "--quiet", "--out", str(tmp_path / "config.png")]) == 2
    assert "config.json, which the numbers would replace, is not from a demo" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "{}"

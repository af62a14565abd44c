import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import reproduction.cli
from quotient_manifolds.symmetries import UnknownAttentionError
from sharpness import cli, evaluate
from tests import networks, spread, whole_networks


def commands(parser, *names):
    """The names of every command below a parser, and its own."""
    yield names
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, command in action.choices.items():
                yield from commands(command, *names, name)


@pytest.mark.parametrize("program", [cli, reproduction.cli], ids=["sharpness", "reproduction"])
def test_every_command_prints_its_help(program, capsys):
    """Two ended in a TypeError, for a default that is a list of numbers."""
    found = list(commands(program.parser()))
    assert len(found) >= 7
    for names in found:
        with pytest.raises(SystemExit) as ended:
            program.main([*names, "--help"])
        assert ended.value.code == 0
        assert " ".join(["usage:", program.parser().prog, *names]) in capsys.readouterr().out
    if program is reproduction.cli:
        with pytest.raises(SystemExit):
            program.main(["diagonal", "--help"])
        assert "(default: 0.001 0.1)" in capsys.readouterr().out


def test_mistakes_end_in_one_line(tmp_path, capsys):
    assert cli.main(["demo", "--quiet", "--out", str(tmp_path / "p.txt")]) == 2
    err = capsys.readouterr().err
    assert f"'{tmp_path}/p.txt' is not a figure: its name must end in" in err
    assert err.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main(["nothing"])


def test_help_and_module(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sharpness", "demo", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sharpness", run_name="__main__")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--seed", "--out", "--quiet"):
        assert option in printed


def test_run_on_files(tmp_path, capsys, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    model = spread.model()
    x, y = networks.tokens(10)
    safetensors.save_file({"x": x, "y": y}, tmp_path / "data.safetensors")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    out = tmp_path / "out.json"
    arguments = [
        "run", "tests.spread:model", str(tmp_path / "data.safetensors"), "--checkpoint", str(tmp_path / "weights.pt"),
        "--rho", "0.1", "--batch-size", "4", "--batches", "2", "--quiet", "--out", str(out), "--measure", "adaptive",
        "gradient-norm",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--help"])
    assert caught.value.code == 0
    assert "torchrun" in capsys.readouterr().out
    own = [a if a != str(out) else str(tmp_path / "data.safetensors") for a in arguments[:-1]]
    assert cli.main(own) == 2
    assert "would replace" in capsys.readouterr().err
    assert cli.main(arguments) == 0
    assert "adaptive sharpness of Encoder: 2 batches" in capsys.readouterr().out
    written = json.loads(out.read_text())
    found, local = written["results"]
    assert (found["rhos"], local["rhos"]) == ([0.1], [0.0])  # a gradient norm has no radius
    assert found["quantity"] == "adaptive"
    batches = [(x[:4], y[:4]), (x[4:8], y[4:8])]
    result = evaluate(model, batches, measure="adaptive", rho=0.1)
    assert found["sharpness"]["0.1"] == float(result)
    # What makes the number citable: the command, versions, and digests that follow the contents.
    assert written["command"].startswith("sharpness run tests.spread:model")
    assert written["versions"]["torch"] == torch.__version__.partition("+")[0]
    digests = written["model"]["digest"], written["data"]["digest"]
    torch.save({k: v + 1 for k, v in model.state_dict().items()}, tmp_path / "weights.pt")
    assert cli.main([*arguments[:-1]]) == 0
    written = json.loads(out.read_text())
    assert (written["model"]["digest"], written["data"]["digest"]) != digests
    assert written["data"]["digest"] == digests[1]


def test_the_spread_over_batches_is_said(tmp_path, capsys, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)

    def refuse(*_):
        raise AssertionError("hashed for nothing: --out is not given")

    monkeypatch.setattr("sharpness.commands.of_model", refuse)
    arguments = [
        "run",
        "tests.spread:model",
        "tests.spread:batches",
        "--measure",
        "adaptive",
        "--rho",
        "0.1",
        "--quiet",
    ]
    assert cli.main([*arguments, "--batches", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-3:-1] == ["error", "rate"]
    assert cli.main(arguments) == 0
    values = [b.value for b in evaluate(spread.model(), spread.batches(), measure="adaptive", rho=0.1).batches]
    expected = (sum((v - sum(values) / 3) ** 2 for v in values) / 2 / 3) ** 0.5
    assert f" {expected:.5f} " in capsys.readouterr().out
    assert cli.main([*arguments[:3], "--measure", "gradient-norm", "--quiet"]) == 0
    found = evaluate(spread.model(), spread.batches(), statistic="gradient norm")
    values = [b.value for b in found.batches]
    expected = (sum((v - sum(values) / 3) ** 2 for v in values) / 2 / 3) ** 0.5
    assert f": {float(found):.6g} ± {expected:.2g}, 3 batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("tests.spread:nothing", "tests.spread:batches", "not an importable module:function"),
        ("tests.spread:batches", "tests.spread:batches", "returned list, not a torch module"),
        ("tests.spread:model", "nowhere.safetensors", "there is no data at nowhere.safetensors"),
        ("no-such-model", "tests.spread:batches", "nor module:function"),
        ("test_vit", "tests.spread:batches", "names an architecture without weights; give them with --checkpoint"),
    ],
)
def test_mistakes_of_run_are_named(model, data, words, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    assert cli.main(["run", model, data, "--rho", "0.1", "--quiet"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "out",
    ["xy.pt", "mine.py", "bert/model.safetensors", "bert/config.json", "data/a/0.png", "data/new.json", "w.pt"],
)
def test_what_is_read_is_not_replaced(out, tmp_path, capsys, monkeypatch):
    """A model was replaced by its results, with exit code 0."""
    monkeypatch.chdir(tmp_path)
    for name in ("xy.pt", "mine.py", "bert/model.safetensors", "bert/config.json", "data/a/0.png", "w.pt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"read")
    monkeypatch.setattr("sharpness.models.load", None)  # before any work
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of a page of the documentation
    model, data = ("bert", "data") if "/" in out else ("mine:model", "xy.pt")
    run = ["run", model, data, "--checkpoint", "w.pt", "--rho", "0.1", "--quiet", "--out", out]
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert cli.main(run) == 2
    assert f"writing to {out} would " in capsys.readouterr().err
    if data == "data":
        assert cli.main([*run[:-2], "--figures", "data/figures"]) == 2
        assert "writing to data/figures would change data, which is read" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_what_the_command_line_offers_is_named(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(SystemExit):
        cli.main(["symmetries", "tests.spread:model", "tests.spread:batches"])
    said = capsys.readouterr().err
    assert "unrecognized arguments: tests.spread:batches; see sharpness --help" in said

    def unknown(*_, **__):
        raise UnknownAttentionError("encoder", nn.Linear, "softmax")

    monkeypatch.setattr("sharpness.study.run.evaluate", unknown)
    assert cli.main(["run", "tests.spread:model", "tests.spread:batches", "--rho", "0.1", "--quiet"]) == 2
    assert 'or use measure="adaptive", which needs none\n' in capsys.readouterr().err


def test_figures_of_a_run(tmp_path, capsys, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    out, figures = tmp_path / "out.json", tmp_path / "figures"
    arguments = ["run", "tests.spread:model", "tests.spread:batches", "--quiet", "--out", str(out), "--figures"]
    assert cli.main([*arguments, str(figures), "--measure", "geodesic-inv", "gradient-norm"]) == 0
    assert "drawn: " in capsys.readouterr().err
    drawn = {p.name for p in figures.iterdir()}
    assert drawn == {"geodesic-inv-profile.png", "geodesic-inv-layers.png"}
    assert len(json.loads(out.read_text())["results"]) == 2
    # What is wrong is known before any measure takes its time.
    out.unlink()
    assert cli.main([*arguments, str(figures), "--measure", "geodesic-inv", "adaptive", "--rho", "-1"]) == 2
    assert "rho must be one or several positive numbers" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main([*arguments, str(tmp_path / "file")]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*arguments, str(figures)]) == 2
    assert "figures need matplotlib" in capsys.readouterr().err
    assert not out.exists()


def test_figures_that_cannot_be_drawn_lose_nothing(tmp_path, capsys, monkeypatch):
    def too_flat(*_, **__):
        raise ValueError("too flat")

    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr("sharpness.plots.plot_model", too_flat)
    out = tmp_path / "out.json"
    arguments = ["run", "tests.spread:model", "tests.spread:batches", "--quiet", "--out", str(out)]
    assert cli.main([*arguments, "--figures", str(tmp_path / "figures")]) == 0
    assert "no figures of geodesic-inv: too flat" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["results"]) == 1


def test_every_symmetry_and_the_canonical_form(tmp_path, capsys):
    """Counted, verified and folded; the folder that is written loads in transformers, with the same outputs."""
    from transformers import ViTForImageClassification

    torch.set_default_dtype(torch.float32)
    model = whole_networks.build("vit").float()
    model.save_pretrained(tmp_path / "vit", max_shard_size="5KB")
    assert (tmp_path / "vit" / "model.safetensors.index.json").exists()
    assert cli.main(["symmetries", str(tmp_path / "vit"), "--complete", "--verify"]) == 0
    printed = capsys.readouterr().out
    assert ["all", "417"] in [line.split() for line in printed.splitlines()]
    assert "10 kinds certified" in printed
    assert "10 kinds moved" in printed
    assert cli.main(["symmetries", str(tmp_path / "vit"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert {line.split()[1] for line in printed.splitlines()[:4]} == {"qk", "vo"}
    assert "8 pairs certified" in printed
    assert "8 pairs moved" in printed
    (tmp_path / "vit" / "source.spm").touch()  # of a tokenizer
    assert cli.main(["canonicalize", str(tmp_path / "vit"), "--out", str(tmp_path / "folded")]) == 0
    written = {p.name for p in (tmp_path / "folded").iterdir()}
    assert written == {"config.json", "model.safetensors", "source.spm"}  # no old index
    folded = ViTForImageClassification.from_pretrained(tmp_path / "folded").eval()
    batch = {"pixel_values": next(whole_networks.inputs("vit"))["pixel_values"].float()}
    torch.testing.assert_close(folded(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(folded.vit.layernorm.weight, torch.ones(8))
    capsys.readouterr()
    assert cli.main(["canonicalize", str(tmp_path / "vit"), "--out", str(tmp_path / "folded")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_help_of_every_command_has_commands_that_are_read():
    top = cli.parser()
    (commands,) = (a.choices for a in top._actions if isinstance(a.choices, dict))
    for command in (top, *commands.values()):
        shown = [line.split(None, 1)[1] for line in command.epilog.splitlines() if line.startswith("  sharpness ")]
        assert shown, command.prog
        for line in shown:
            top.parse_args(shlex.split(line))
            assert line in command.format_help()  # as it is, not wrapped

import html
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

import reproduction.cli
import sharpness
from quotient_manifolds import lora_command
from quotient_manifolds.symmetries import (
    ALL,
    UnknownAttentionError,
    find,
    from_json,
    model_distance,
    move_,
)
from sharpness import MEASURES, cli, evaluate
from sharpness.errors import painted
from sharpness.models import load
from sharpness.results import REFERENCE
from tests.support import command_line, networks, spread, whole_networks
from tests.support.command_line import commands

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("program", [cli, reproduction.cli], ids=["sharpness", "reproduction"])
def test_every_command_prints_its_help(program, capsys):
    """Two ended in a TypeError, for a default that is a list of numbers."""
    found = [names for names, _ in commands(program.parser())]
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
        "run", "tests.support.spread:model", str(tmp_path / "data.safetensors"),
        "--checkpoint", str(tmp_path / "weights.pt"), "--rho", "0.1", "--batch-size", "4", "--batches", "2",
        "--quiet", "--out", str(out), "--measure", "adaptive", "gradient-norm",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--help"])
    assert caught.value.code == 0
    assert "torchrun" in capsys.readouterr().out
    own = [a if a != str(out) else str(tmp_path / "data.safetensors") for a in arguments[:-1]]
    assert cli.main(own) == 2
    assert "would replace" in capsys.readouterr().err
    assert cli.main(arguments) == 0
    assert re.search(r"^sharpness [\d.]+ ± [\d.]+ nats at ρ = 0.1 \(adaptive\):\n    loss", capsys.readouterr().out)
    written = json.loads(out.read_text(encoding="utf-8"))
    found, local = written["results"]
    assert (found["rhos"], local["rhos"]) == ([0.1], [0.0])  # a gradient norm has no radius
    assert found["quantity"] == "adaptive"
    batches = [(x[:4], y[:4]), (x[4:8], y[4:8])]
    result = evaluate(model, batches, measure="adaptive", rho=0.1)
    assert found["sharpness"]["0.1"] == float(result)
    # What makes the number citable: the command, versions, and digests that follow the contents.
    assert written["command"].startswith("sharpness run tests.support.spread:model")
    assert written["versions"]["torch"] == torch.__version__.partition("+")[0]
    digests = written["model"]["digest"], written["data"]["digest"]
    torch.save({k: v + 1 for k, v in model.state_dict().items()}, tmp_path / "weights.pt")
    assert cli.main([*arguments[:-1]]) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["model"]["digest"], written["data"]["digest"]) != digests
    assert written["data"]["digest"] == digests[1]


def test_the_spread_over_batches_is_said(tmp_path, capsys, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)

    def refuse(*_):
        raise AssertionError("hashed for nothing: --out is not given")

    monkeypatch.setattr("sharpness.study.plan.of_model", refuse)
    arguments = [
        "run",
        "tests.support.spread:model",
        "tests.support.spread:batches",
        "--measure",
        "adaptive",
        "--rho",
        "0.1",
        "--quiet",
    ]
    assert cli.main([*arguments, "--batches", "1"]) == 0
    assert "±" not in capsys.readouterr().out
    assert cli.main(arguments) == 0
    values = [b.value for b in evaluate(spread.model(), spread.batches(), measure="adaptive", rho=0.1).batches]
    expected = (sum((v - sum(values) / 3) ** 2 for v in values) / 2 / 3) ** 0.5
    found = re.match(r"sharpness (\S+) ± (\S+) nats at ρ = 0.1", capsys.readouterr().out)
    assert float(found[1]) == pytest.approx(sum(values) / 3, abs=0.06 * expected)  # as many digits as the error has
    assert float(found[2]) == pytest.approx(expected, rel=0.05)
    assert cli.main([*arguments[:3], "--measure", "gradient-norm", "--quiet"]) == 0
    found = sharpness.gradient_norm(spread.model(), spread.batches(), progress=False)
    values = [b.value for b in found.batches]
    expected = (sum((v - sum(values) / 3) ** 2 for v in values) / 2 / 3) ** 0.5
    form = r"gradient norm (\S+) ± (\S+), mean over 3 batches \(geodesic-inv\)\n"
    printed = re.fullmatch(form, capsys.readouterr().out)
    assert float(printed[1]) == pytest.approx(float(found), abs=0.06 * expected)
    assert float(printed[2]) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("tests.support.spread:nothing", "tests.support.spread:batches", "not an importable module:function"),
        ("tests.support.spread:batches", "tests.support.spread:batches", "returned list, not a torch module"),
        ("tests.support.spread:model", "nowhere.safetensors", "there is no data at nowhere.safetensors"),
        ("no-such-model", "tests.support.spread:batches", "nor module:function"),
        ("test_vit", "tests.support.spread:batches", "names an architecture without weights; give them as checkpoint"),
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
    assert cli.main([*run[:-2], "--report", out]) == 2
    assert f"writing to {out} would " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_what_the_command_line_offers_is_named(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(SystemExit):
        cli.main(["symmetries", "tests.support.spread:model", "tests.support.spread:batches"])
    said = capsys.readouterr().err
    assert "unrecognized arguments: tests.support.spread:batches; see sharpness symmetries --help" in said

    def unknown(*_, **__):
        raise UnknownAttentionError("encoder", nn.Linear, "softmax")

    monkeypatch.setattr("sharpness.study.run.statistic_of", unknown)
    assert (
        cli.main(["run", "tests.support.spread:model", "tests.support.spread:batches", "--rho", "0.1", "--quiet"]) == 2
    )
    assert 'or use measure="adaptive", which needs none\n' in capsys.readouterr().err


def test_the_report_of_a_run(tmp_path, capsys, monkeypatch):
    """One file, with nothing to load from elsewhere: every number, two figures a measure, and how it was made."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    out, report = tmp_path / "out.json", tmp_path / "report.html"
    arguments = [
        "run",
        "tests.support.spread:model",
        "tests.support.spread:batches",
        "--quiet",
        "--out",
        str(out),
        "--report",
    ]
    assert cli.main([*arguments, str(report), "--measure", "geodesic-inv", "adaptive", "gradient-norm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    page = html.unescape(report.read_text(encoding="utf-8"))
    assert page.count('" src="data:image/png;base64,') == 4
    assert "http" not in page
    for said in (
        *lines[:1],
        *lines[-4:-1],
        '"command": "sharpness run tests.support.spread:model',
        "Search(steps=20, ",
    ):
        assert said in page
    assert len(json.loads(out.read_text(encoding="utf-8"))["results"]) == 3
    # What is wrong is known before any measure takes its time.
    out.unlink()
    monkeypatch.setattr("sharpness.models.load", None)
    assert cli.main([*arguments, str(report), "--measure", "geodesic-inv", "adaptive", "--rho", "-1"]) == 2
    assert "rho must be one or several positive numbers" in capsys.readouterr().err
    assert cli.main([*arguments, str(tmp_path)]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*arguments, str(report)]) == 2
    assert "a report needs matplotlib and pandas: install the extra plot" in capsys.readouterr().err
    assert not out.exists()


def test_figures_that_cannot_be_drawn_lose_nothing(tmp_path, monkeypatch):
    def too_flat(*_, **__):
        raise ValueError("too flat")

    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr("sharpness.plots.plot_profile", too_flat)
    out, report = tmp_path / "out.json", tmp_path / "report.html"
    arguments = ["run", "tests.support.spread:model", "tests.support.spread:batches", "--quiet", "--out", str(out)]
    assert cli.main([*arguments, "--report", str(report)]) == 0
    assert "no figures of geodesic-inv: too flat" in report.read_text(encoding="utf-8")
    assert len(json.loads(out.read_text(encoding="utf-8"))["results"]) == 1


def test_several_measures_end_in_one_table(capsys, monkeypatch):
    """A line for each measure and radius, with the shares of the parts; settings are said where they are asked for."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    measures = ["geodesic-inv", "adaptive", "gradient-norm"]
    arguments = ["run", "tests.support.spread:model", "tests.support.spread:batches", "--quiet", "--measure", *measures]
    assert cli.main([*arguments, "--rho", "0.1", "0.2"]) == 0
    printed = capsys.readouterr().out
    head, *rows = printed.splitlines()[-5:]
    assert head.split() == ["measure", "ρ", "sharpness", "converged", "Q–K", "V–O", "MLP", "norms", "head"]
    assert [row.split()[:2] for row in rows] == [[m, rho] for m in measures[:2] for rho in ("0.1", "0.2")]
    model, batches = spread.model(), spread.batches()
    for row in rows:
        name, rho, value, _, error, *_ = row.split()
        result = evaluate(model, batches, measure=name, rho=float(rho), progress=False)
        assert float(value) == pytest.approx(float(result), abs=0.06 * float(error))
        shares = [f"{share:.0%}" for share in result.by_layer().by_part().values()]
        assert row.split()[-5:] == shares
    assert "steps=20" not in printed
    assert cli.main([*arguments[:-1], "--rho", "0.1", "--verbose"]) == 0
    assert capsys.readouterr().out.count("Search(steps=20, ") == 2


class Guesses(nn.Module):
    """Two classes by the sign of a product, certain where its weight is large."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x):
        return torch.stack([self.weight * x, -self.weight * x], 1)


def small_weight():
    return Guesses(0.05)


def tiny_weight():
    return Guesses(0.001)


def signs():
    return [(torch.tensor([1.0, -1.0]), torch.tensor([0, 1]))]


def test_a_ball_that_reaches_models_that_guess(capsys, monkeypatch):
    """Where the largest loss passes log K, the number says how large a broken network's loss is."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    here = "tests.sharpness.test_cli"
    run = ["run", f"{here}:small_weight", f"{here}:signs", "--measure", "euclidean", "--quiet", "--rho"]
    assert cli.main([*run, "0.04", "0.1"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "guess" in line]
    # 0.05 − 0.04 still has the right sign; 0.05 − 0.1 has the loss log(1 + exp(0.1)).
    assert said == [
        "- at ρ = 0.1 the ball reaches models that guess: the largest loss is 0.74, that of guessing among 2 classes "
        "0.69; try a smaller radius"
    ]
    run[1] = f"{here}:tiny_weight"
    assert cli.main([*run, "0.04", "0.1"]) == 0  # where a smaller radius would not help
    said = [line for line in capsys.readouterr().out.splitlines() if "guess" in line]
    assert said == [
        "- the loss at the weights is 0.69, and that of guessing among 2 classes 0.69: this model knows little of "
        "these data; check that it is trained, and what labels mean"
    ]


def test_the_number_stands_beside_reference_values(capsys, monkeypatch):
    """At the radius at which they were recorded, and only there."""
    rows = json.loads((ROOT / "results" / "reference_values.json").read_text(encoding="utf-8"))["rows"]
    for name, ends in REFERENCE.items():
        values = [row["sharpness"] for row in rows if row["measure"] == name]
        assert len(values) == 5
        assert ends == (pytest.approx(min(values), abs=5e-4), pytest.approx(max(values), abs=5e-4))
        assert {row["rho"] for row in rows if row["measure"] == name} == {MEASURES[name].rho}
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(Path(__file__).parent)
    run = [
        "run",
        "tests.support.spread:model",
        "tests.support.spread:batches",
        "--quiet",
        "--measure",
        "adaptive",
        "--rho",
    ]
    assert cli.main([*run, "0.5", "0.2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [i for i, line in enumerate(lines) if "0.02 to 0.29 nats at this radius in five small models" in line] == [2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum"], "(did you mean run?)"),
        (["run", "m", "d", "--meazure", "x"], "run: unrecognized arguments: --meazure x (did you mean --measure?)"),
        (["table", "results", "--target", "gup"], "(did you mean gap?)"),
        (["run", "a", "b", "dev.tsv"], "arguments: dev.tsv (sharpness sweep measures many models)"),
        (["table", "results", "--zzz"], "unrecognized arguments: --zzz; see"),
    ],
)  # fmt: skip
def test_what_was_meant_is_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_measure_that_was_meant_is_named(capsys):
    assert cli.main(["run", "m", "d", "--measure", "geodesic"]) == 2
    assert "unknown measure 'geodesic' (did you mean geodesic-" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
from sharpness import cli
for words in (["--version"], [], ["--help"], ["run", "--help"], ["sweep", "--help"], ["rum"]):
    try:
        assert cli.main(words) == 0
    except SystemExit as ended:
        assert ended.code == (2 if words == ["rum"] else 0)
slow = {"torch", "numpy", "scipy", "geoopt", "msgspec", "tqdm", "quotient_manifolds"}
assert not slow & set(sys.modules), slow & set(sys.modules)
"""


def test_the_parser_does_not_wait_for_torch():
    """Help takes a tenth of a second, not two."""
    command = [sys.executable, "-I", "-c", WITHOUT_TORCH]  # without what a sitecustomize on PYTHONPATH imports
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, encoding="utf-8")
    assert found.returncode == 0, found.stderr
    first, second, *_ = found.stdout.splitlines()
    assert first == f"sharpness {version('quotient-manifolds')}"
    assert second.startswith("usage: sharpness COMMAND")


def test_what_is_needed_comes_first(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: sharpness run MODEL DATA [OPTIONS]\n")
    places = [printed.index(f"\n  {word}") for word in ("MODEL", "DATA", "--text", "--label", "--measure", "--steps")]
    assert places == sorted(places)


def test_the_environment_of_a_report(capsys):
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {version('torch')}\n" in printed
    assert f"quotient-manifolds {version('quotient-manifolds')}\n" in printed


def test_colours_only_where_somebody_sees_them(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert painted("so", "1", Terminal()) == "\033[1mso\033[0m"
    assert painted("so", "1", io.StringIO()) == "so"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("so", "1", Terminal()) == "so"


def test_the_reference_is_that_of_the_parser():
    assert command_line.PAGE.read_text(encoding="utf-8") == "\n".join(command_line.reference()), (
        "python -m tests.support.command_line"
    )
    titles = re.findall("^##+ (.*)$", command_line.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    known = [p.prog for top in (cli.parser(), lora_command._parser()) for _, p in commands(top)][1:]
    assert sorted(titles) == sorted([*known, *command_line.SHARED.values()])


def test_two_models_are_compared(tmp_path, capsys):
    """The distance that model_distance computes; none between equivalent ones."""
    torch.set_default_dtype(torch.float32)
    one, two = whole_networks.build("vit").float(), whole_networks.build("vit").float()
    networks.shake(two, 0.08)
    query = networks.projections(networks.vit_layers(two)[0].attention)[0]
    query.weight.data[:4], query.bias.data[:4] = 0, 0
    one.save_pretrained(tmp_path / "one")
    two.save_pretrained(tmp_path / "two")
    move_(one, condition=3.0)
    one.save_pretrained(tmp_path / "moved")
    for metric in ("inv", "mix"):  # the first pair has no distance, and no row says nan
        assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--metric", metric]) == 0
        first, head, *rows = capsys.readouterr().out.splitlines()
        found = model_distance(*(load(str(tmp_path / name)).model for name in ("one", "two")), metric=metric)
        assert first.split()[:2] == ["distance", f"{found.total:.4g}"]
        squares = [float(v) ** 2 for row in rows if row[0] != "-" for v in row.split()[1:]]
        assert sum(squares) == pytest.approx(sum(p.distance**2 for p in found.pairs if p.distance > 0), rel=1e-2)
        if metric == "inv":
            assert head.split() == ["layer", "qk", "vo"]
            assert sum(squares) > 1
    assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "moved")]) == 0
    assert float(capsys.readouterr().out.split()[1]) < 1e-3


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
    every = len(list(find(model, scope=ALL)))
    assert f"{every} symmetries certified" in printed
    assert f"{every} symmetries moved" in printed
    assert cli.main(["symmetries", str(tmp_path / "vit"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert {line.split()[1] for line in printed.splitlines()[:4]} == {"qk", "vo"}
    assert "8 symmetries certified" in printed
    assert "8 symmetries moved" in printed
    assert cli.main(["symmetries", str(tmp_path / "vit"), "--json"]) == 0
    assert from_json(capsys.readouterr().out) == find(model, scope=ALL)
    assert cli.main(["symmetries", str(tmp_path / "vit"), "--json", "--verify"]) == 2
    assert "--json prints nothing but symmetries; leave out --verify" in capsys.readouterr().err
    (tmp_path / "vit" / "source.spm").touch()  # of a tokenizer
    assert cli.main(["canonicalize", str(tmp_path / "vit"), "--out", str(tmp_path / "folded")]) == 0
    written = {p.name for p in (tmp_path / "folded").iterdir()}
    assert written == {"config.json", "model.safetensors", "source.spm"}  # no old index
    folded = ViTForImageClassification.from_pretrained(tmp_path / "folded").eval()
    batch = {"pixel_values": next(whole_networks.inputs("vit"))["pixel_values"].float()}
    torch.testing.assert_close(folded(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(folded.vit.layernorm.weight, torch.ones(8))
    assert "LoRA adapters of" in capsys.readouterr().out
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

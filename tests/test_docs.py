"""Every block of code in README and docs is run, page by page; what a page says is printed is printed."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from quotient_manifolds import lora_command
from reproduction import cli as laboratory
from sharpness import cli
from sharpness.study import read_config
from tests.support import docs_world
from tests.support.printed import same

ROOT = docs_world.ROOT
README = ROOT / "README.md"
PAGES = [README, *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)\s*$", re.MULTILINE | re.DOTALL)
#: Directives of Sphinx that hold no code.
NO_CODE = {"{toctree}", "{include}", "{csv-table}", "{raw}"}
#: Columns of code that a page shows without scrolling.
WIDEST = 84
#: What makes a command too long for a test, and what is run in its place.
SHORTER = [
    ("--models 24", "--models 4 --epochs 1 1"),
    ("--num-examples 2048", "--num-examples 8"),
    ("--num-examples 512", "--num-examples 32 --batch-size 16"),
]


def blocks(page):
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        language, _, options = found["info"].strip().partition(" ")
        if language not in NO_CODE:
            line = page.read_text(encoding="utf-8")[: found.start()].count("\n") + 2
            yield language, options, found["body"], line


def with_code():
    """Every page that has code, but for README, which tests/test_newcomers.py plays."""
    return [p for p in PAGES if p != README and any(True for _ in blocks(p))]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "world"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        docs_world.build(folder)
    torch.set_default_dtype(before)
    return folder


def shell(body, run):
    """Run a shell block line by line; what cannot be run here is looked at instead."""
    for line in body.replace("\\\n", " ").splitlines():
        words = shlex.split(os.path.expandvars(line), comments=True)
        if not words:
            continue
        for long, short in SHORTER:
            words = shlex.split(shlex.join(words).replace(long, short))
        if words[0] == "sharpness":
            assert run(words[1:]) == 0, line
        elif words[0] == "quotient-lora":
            assert lora_command.main(words[1:]) == 0, line
        elif words[:3] == ["python", "-m", "reproduction"]:
            assert laboratory.main(words[3:]) == 0, line
        elif words[0] == "torchrun":
            assert words[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "sharpness"]
            assert run(words[5:]) == 0, line  # by one process, since test_distributed.py has two
        elif words[:2] == ["python", "examples/lora_rank.py"]:
            example = runpy.run_path(str(ROOT / words[1]))
            example["main"]([*words[2:], "--steps", "3"])  # of 60 for each of four adapters
        elif words[0] == "make":
            subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], check=True, capture_output=True)
        elif words[:3] == ["python3", "-m", "venv"]:
            continue  # the reader has one
        elif words[:3] == ["pip", "install", "torch"]:
            continue
        elif words[:2] == ["pip", "install"]:  # installs nothing: the extras must exist
            extras = re.search(r"\[(.*)\]", words[-1])
            known = re.findall(r"^([a-z]+) =$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
            assert set(extras[1].split(",") if extras else []) <= set(known), line
        else:
            raise AssertionError(f"nobody runs {line!r}")


def json_entries(body, folder):
    (folder / "page.json").write_text(
        json.dumps({"checkpoints": "berts/*", "data": "dev.tsv", **json.loads(body)}), encoding="utf-8"
    )
    read_config(folder / "page.json")


def play(page, namespace, capsys, chosen=lambda line: True):
    """Run the blocks of a page from the current folder, one after the other in one namespace, and compare outputs."""
    torch.set_default_dtype(torch.float32)
    warnings.simplefilter("ignore")
    printed = None
    for language, options, body, line in blocks(page):
        where = f"{page.name}:{line}"
        if not chosen(line):
            continue
        if language == "{code-block}":  # a file
            caption = re.search(r"^:caption: (\S+)\n\n", body, re.MULTILINE)
            Path(caption[1]).write_text(body[caption.end() :], encoding="utf-8")
        elif language == "python":
            capsys.readouterr()
            exec(compile("\n" * (line - 1) + body, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
        elif language in ("sh", "bash"):
            capsys.readouterr()
            shell(body, cli.main)
            printed = capsys.readouterr().out
        elif language == "json":
            json_entries(body, Path.cwd())
        elif language == "text":
            assert printed is not None, f"{where}: output of nothing"
            assert same(body, printed, options), f"{where} shows\n{body}\nbut the code prints\n{printed}"
        else:
            raise AssertionError(f"{where}: a block in {language or 'no language'!r}, which nobody runs {options}")


@pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 9), reason="pages show the layer names of today"
)
@pytest.mark.parametrize("page", with_code(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, world, tmp_path, monkeypatch, capsys):
    name = str(page.relative_to(ROOT))
    folder = tmp_path / "world"
    shutil.copytree(world, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    sys.modules.pop("mine", None)
    warnings.simplefilter("ignore")
    play(page, {"__name__": "page", **docs_world.taken_for_granted(name)}, capsys)


def test_no_code_is_wider_than_its_page():
    wide = [
        f"{page.relative_to(ROOT)}:{line + i}"
        for page in PAGES
        for _, _, body, line in blocks(page)
        for i, text in enumerate(body.splitlines())
        if len(text) > WIDEST
    ]
    assert not wide, f"code wider than {WIDEST} columns is cut: {wide}"


def test_output_is_compared_as_far_as_a_page_promises():
    """Words always, numbers exactly, to a tolerance, or not at all."""
    assert same("loss 0.50\n", "loss   0.50\n")
    assert not same("loss 0.50\n", "loss 0.51\n")
    assert same("loss 0.50\n", "loss 0.51\n", "within 5 %")
    assert not same("loss 0.50\n", "loss 0.60\n", "within 5 %")
    assert not same("loss 0.50\n", "error 0.50\n", "within 5 %")
    assert same("loss 0.5\n", "loss 7.25\n", "words")
    assert not same("loss 0.5\n", "error 0.5\n", "words")
    with pytest.raises(AssertionError, match="text words"):
        same("x", "x", "roughly")


def test_messages_that_are_explained_exist():
    """What the page of troubles quotes is said somewhere, up to names that stand in quotation marks."""
    said = "\n".join(
        "".join(str(getattr(v, "value", "\0")) if isinstance(v, ast.Constant) else "\0" for v in values)
        for room in ("sharpness", "quotient_manifolds")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for values in [node.values if isinstance(node, ast.JoinedStr) else [node]]
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )
    text = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
    errors, remarks = text.split("\n## ")[1:3]
    quoted = re.findall(r"^\| `([^|]*)` \|", errors, re.MULTILINE)
    quoted += re.findall(r"^\| ([^|`]*) \|", remarks, re.MULTILINE)[1:]
    assert len(quoted) > 20
    for message in quoted:
        for part in re.split(r"'[^']*'", message):
            known = "No module named" in message or part.strip() in said
            assert known, f"no code says {part!r}"


def test_every_figure_names_its_command():
    """In the same section as every picture there is the command that draws it."""
    command = re.compile(r"`+(?:sharpness|python -m reproduction|make|python -m (?:benchmarks|studies)\.\w+)\b")
    for page in PAGES:
        for section in re.split(r"^#{1,2} ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            for picture in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", section):
                if picture.startswith("http"):
                    continue
                assert (page.parent / picture).is_file(), f"{page}: {picture} is missing"
                text = section if command.search(section) else page.read_text(encoding="utf-8").partition("\n## ")[0]
                assert command.search(text), f"{page}: what draws {picture}?"


def test_commands_that_pages_name_exist():
    """Scripts, and options of ours, that are named in passing."""
    for page in PAGES:
        for script in re.findall(r"python (examples/\w+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{page} names {script}"
        for folder, name in re.findall(r"python -m (benchmarks|studies)\.(\w+)", page.read_text(encoding="utf-8")):
            assert (ROOT / folder / f"{name}.py").is_file(), f"{page} names {folder}.{name}"
        for target in re.findall(r"`make ([\w-]+)", page.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), (
                f"{page} names make {target}"
            )


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda p: p.stem)
def test_a_page_of_results_answers_first(page):
    """One figure, question, answer and caveat, and how it was done in five points; all else is folded or elsewhere."""
    text = page.read_text(encoding="utf-8")
    if "**Question**" not in text:  # the plans, the details of the study, a table of costs
        assert page.stem in ("preregistration", "second-task-plan", "generalization-details", "benchmarks")
        return
    head, _, rest = text.partition("\n## How it was done\n")
    places = [head.index(part) for part in ("# ", "![", "**Question**: ", "**Answer**: ", "**Caveat**: ")]
    assert places == sorted(places)
    assert head.count("![") == 1
    points = rest.partition("\n:::{dropdown}")[0]
    assert len(re.findall("^(- |##)", points, re.MULTILINE)) == points.count("\n- ") <= 5


def test_links_between_pages():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page} links to {link}"


def test_a_page_that_is_wrong_is_seen(tmp_path, world, monkeypatch, capsys):
    for text in ("```python\n1 / 0\n```\n", "```python\nprint(1)\n```\n\n```text\n2\n```\n", "```\nx\n```\n",
                 "```sh\nsharpness nothing\n```\n", "```sh\nrm x\n```\n"):  # fmt: skip
        page = ROOT / "docs" / "wrong.md"

        class Page(type(page)):
            def read_text(self, encoding=None, text=text):
                return text

        with pytest.raises((AssertionError, ZeroDivisionError, SystemExit)):
            test_the_code_of_a_page_runs(Page(page), world, tmp_path / str(abs(hash(text))), monkeypatch, capsys)


def test_reference_values_are_those_that_were_recorded():
    text = (ROOT / "docs" / "howto" / "choosing.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "results" / "reference_values.json").read_text(encoding="utf-8"))["rows"]
    assert len({row["model"] for row in rows}) == 5
    (measures,) = re.findall(r"\| model, data \| base loss \|(.*)\|\n", text)
    for row in rows:
        (line,) = [v for v in text.splitlines() if v.startswith(f"| {row['model']} |")]
        cells = dict(zip(measures.split("|"), line.split("|")[3:], strict=False))
        assert cells[f" `{row['measure']}` "] == f" {row['sharpness']:.3f} ± {row['std_error']:.3f} ", row


def test_rates_of_the_manifold_examples_are_those_that_were_recorded():
    rows = json.loads((ROOT / "results" / "manifold_rates.json").read_text(encoding="utf-8"))["rows"]
    found = {(r["manifold"], r["optimiser"], r["condition"], r["lr"]): r["relative_error"] for r in rows}
    guide = (ROOT / "docs" / "howto" / "geoopt.md").read_text(encoding="utf-8")
    (rates,) = re.findall(r"\| metric \| optimiser \| κ \|(.*)\|\n", guide)
    for manifold, optimiser in {key[:2] for key in found}:
        plain = manifold == "factors"
        names = ("none, plain factors", optimiser.removeprefix("Riemannian")) if plain else (manifold, optimiser)
        of = {c: {k[3]: e for k, e in found.items() if k[:3] == (manifold, optimiser, c)} for c in (1, 100)}
        best = [min((e, lr) for lr, e in errors.items() if e is not None) for errors in of.values()]
        words = ", ".join(dict.fromkeys(f"{lr:g}" for _, lr in best))
        errors = " | ".join(f"{e:.1g}" for e, _ in best)
        assert f"| {names[0]} | {names[1]} | {words} | {errors} |" in guide
        for condition, errors in of.items():
            shown = (errors[float(lr.removeprefix(" lr "))] for lr in rates.split("|"))
            cells = " | ".join("diverges" if e is None else f"{e:.2g}" for e in shown)
            row = f"| {names[0].removeprefix('none, ')} | {names[1]} | {condition} | {cells} |"
            assert row in guide, row

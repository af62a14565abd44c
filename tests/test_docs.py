"""Every block of code in README and docs is run, page by page; what a page says is printed is printed."""

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from quotient_manifolds.adapters import __main__ as adapters
from reproduction import cli as laboratory
from sharpness import cli
from sharpness.study import read_config

from . import docs_world

ROOT = docs_world.ROOT
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)\s*$", re.MULTILINE | re.DOTALL)
#: Directives of Sphinx that hold no code.
NO_CODE = {"{toctree}", "{include}", "{csv-table}"}
#: What makes a command too long for a test, and what is run in its place.
SHORTER = [
    ("--models 24", "--models 4 --epochs 1 1"),
    ("--num-examples 2048", "--num-examples 8"),
    ("--num-examples 512", "--num-examples 32"),
]
SETTINGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page):
    for found in FENCE.finditer(page.read_text()):
        language, _, options = found["info"].strip().partition(" ")
        if language not in NO_CODE:
            line = page.read_text()[: found.start()].count("\n") + 2
            yield language, options, found["body"], line


def with_code():
    return [p for p in PAGES if any(True for _ in blocks(p))]


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
            assert adapters.main(words[1:]) == 0, line
        elif words[:3] == ["python", "-m", "reproduction"]:
            assert laboratory.main(words[3:]) == 0, line
        elif words[0] == "torchrun":
            assert words[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "sharpness"]
            assert run(words[5:]) == 0, line  # by one process, since test_distributed.py has two
        elif words[0] == "make":
            subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], check=True, capture_output=True)
        elif words[:2] == ["git", "clone"] or words == ["cd", "quotient-manifolds"]:
            continue  # the reader is there already
        elif words[:2] == ["pip", "install"]:  # installs nothing: the extras must exist
            extras = re.search(r"\[(.*)\]", words[2])
            known = re.findall(r"^([a-z]+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
            assert set(extras[1].split(",") if extras else []) <= set(known), line
        else:
            raise AssertionError(f"nobody runs {line!r}")


def json_entries(body, folder):
    (folder / "page.json").write_text(json.dumps({"checkpoints": "berts/*", "data": "dev.tsv", **json.loads(body)}))
    read_config(folder / "page.json")


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
    torch.set_default_dtype(torch.float32)
    warnings.simplefilter("ignore")
    namespace, printed = {"__name__": "page", **docs_world.taken_for_granted(name)}, None
    for language, options, body, line in blocks(page):
        where = f"{name}:{line}"
        if language == "{code-block}":  # a file
            caption = re.search(r"^:caption: (\S+)\n\n", body, re.MULTILINE)
            Path(caption[1]).write_text(body[caption.end() :])
        elif language == "python":
            capsys.readouterr()
            exec(compile("\n" * (line - 1) + body, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
        elif language in ("sh", "bash"):
            capsys.readouterr()
            shell(body, cli.main)
            printed = capsys.readouterr().out
        elif language == "json":
            json_entries(body, folder)
        elif language == "text":
            assert printed is not None, f"{where}: output of nothing"
            shown = doctest.OutputChecker().check_output(body, printed, SETTINGS)
            assert shown, f"{where} shows\n{body}\nbut the code prints\n{printed}"
        else:
            raise AssertionError(f"{where}: a block in {language or 'no language'!r}, which nobody runs {options}")


def test_every_figure_names_its_command():
    """In the same section as every picture there is the command that draws it."""
    command = re.compile(r"`+(?:sharpness|python -m reproduction|make|python benchmarks/\w+\.py)\b")
    for page in PAGES:
        for section in re.split(r"^#{1,2} ", page.read_text(), flags=re.MULTILINE):
            for picture in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", section):
                if picture.startswith("http"):
                    continue
                assert (page.parent / picture).is_file(), f"{page}: {picture} is missing"
                text = section if command.search(section) else page.read_text().partition("\n## ")[0]
                assert command.search(text), f"{page}: what draws {picture}?"


def test_commands_that_pages_name_exist():
    """Scripts, and options of ours, that are named in passing."""
    for page in PAGES:
        for script in re.findall(r"python (benchmarks/\w+\.py|examples/\w+\.py)", page.read_text()):
            assert (ROOT / script).is_file(), f"{page} names {script}"
        for target in re.findall(r"`make ([\w-]+)", page.read_text()):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                f"{page} names make {target}"
            )


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda p: p.stem)
def test_a_page_of_results_answers_first(page):
    """One figure, question, answer and caveat, and how it was done in five points; all else is folded or elsewhere."""
    text = page.read_text()
    if "**Question**" not in text:  # the plan, the details of the study, a table of costs
        assert page.stem in ("preregistration", "generalization-details", "benchmarks")
        return
    head, _, rest = text.partition("\n## How it was done\n")
    places = [head.index(part) for part in ("# ", "![", "**Question**: ", "**Answer**: ", "**Caveat**: ")]
    assert places == sorted(places)
    assert head.count("![") == 1
    points = rest.partition("\n:::{dropdown}")[0]
    assert len(re.findall("^(- |##)", points, re.MULTILINE)) == points.count("\n- ") <= 5


def test_links_between_pages():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page} links to {link}"


def test_badges_are_true():
    readme, setup = (ROOT / "README.md").read_text(), (ROOT / "setup.cfg").read_text()
    python = re.search(r"python_requires = >=(\S+)", setup)[1]
    assert f"![Python {python} or later](https://img.shields.io/badge/python-%E2%89%A5%20{python}-blue)" in readme
    licence = re.search(r"^license = (\S+)", setup, re.MULTILINE)[1]
    assert f"![License {licence}](https://img.shields.io/badge/license-{licence.replace('-', '--')}-blue)" in readme


def test_a_page_that_is_wrong_is_seen(tmp_path, world, monkeypatch, capsys):
    for text in ("```python\n1 / 0\n```\n", "```python\nprint(1)\n```\n\n```text\n2\n```\n", "```\nx\n```\n",
                 "```sh\nsharpness nothing\n```\n", "```sh\nrm x\n```\n"):  # fmt: skip
        page = ROOT / "docs" / "wrong.md"

        class Page(type(page)):
            def read_text(self, text=text):
                return text

        with pytest.raises((AssertionError, ZeroDivisionError, SystemExit)):
            test_the_code_of_a_page_runs(Page(page), world, tmp_path / str(abs(hash(text))), monkeypatch, capsys)


def test_examples_of_the_readme_are_short():
    """Five tasks of a stranger, in fifteen lines each at most."""
    found = [body for language, _, body, _ in blocks(ROOT / "README.md") if language == "python"]
    assert len(found) == 5
    for body in found:
        assert sum(bool(line.strip()) for line in body.splitlines()) <= 15, body


def test_reference_values_are_those_that_were_recorded():
    text = (ROOT / "docs" / "howto" / "choosing.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "reference_values.json").read_text())["rows"]
    assert len({row["model"] for row in rows}) == 5
    (measures,) = re.findall(r"\| model, data \| base loss \|(.*)\|\n", text)
    for row in rows:
        (line,) = [v for v in text.splitlines() if v.startswith(f"| {row['model']} |")]
        cells = dict(zip(measures.split("|"), line.split("|")[3:], strict=False))
        assert cells[f" `{row['measure']}` "] == f" {row['sharpness']:.3f} ± {row['std_error']:.3f} ", row


def test_the_first_table_is_the_demos():
    first, *others = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["rows"]
    head, _, *lines = (ROOT / "README.md").read_text().partition("| times as sharp")[2].splitlines()[: len(others) + 2]
    measures = [name.strip() for name in head.split("|")[1:-1]]
    for row, line in zip(others, lines, strict=True):
        assert line.split("|")[2:-1] == [f" {row[m] / first[m]:.2f} " for m in measures], line


def test_rates_of_the_manifold_examples_are_those_that_were_recorded():
    rows = json.loads((ROOT / "benchmarks" / "results" / "manifold_rates.json").read_text())["rows"]
    found = {(r["manifold"], r["optimiser"], r["condition"], r["lr"]): r["relative_error"] for r in rows}
    readme, guide = ((ROOT / p).read_text() for p in ("README.md", "docs/guides/optim.md"))
    (rates,) = re.findall(r"\| metric \| optimiser \| κ \|(.*)\|\n", guide)
    for manifold, optimiser in {key[:2] for key in found}:
        plain = manifold == "factors"
        names = ("none, plain factors", optimiser.removeprefix("Riemannian")) if plain else (manifold, optimiser)
        of = {c: {k[3]: e for k, e in found.items() if k[:3] == (manifold, optimiser, c)} for c in (1, 100)}
        best = [min((e, lr) for lr, e in errors.items() if e is not None) for errors in of.values()]
        words = ", ".join(dict.fromkeys(f"{lr:g}" for _, lr in best))
        errors = " | ".join(f"{e:.1g}" for e, _ in best)
        assert f"| {names[0]} | {names[1]} | {words} | {errors} |" in readme.replace("`", "")
        for condition, errors in of.items():
            shown = (errors[float(lr.removeprefix(" lr "))] for lr in rates.split("|"))
            cells = " | ".join("diverges" if e is None else f"{e:.2g}" for e in shown)
            row = f"| {names[0].removeprefix('none, ')} | {names[1]} | {condition} | {cells} |"
            assert row in guide, row

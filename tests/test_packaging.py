"""The core stands alone, and what is shipped is what is there."""

import configparser
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import torch

import quotient_manifolds
import sharpness

ROOT = Path(__file__).parent.parent


CORE_ALONE = """
import sys, warnings
warnings.simplefilter("error")
import torch, quotient_manifolds.optim
unused = {"quotient_manifolds." + name for name in ("logarithm", "rescale", "testing")}
assert not unused & set(sys.modules), "optimisers load what they do not use"
warnings.simplefilter("ignore")
sys.argv.append("--pretend")
from tests import core_only
core_only.main()
sys.modules["yaml"] = sys
core_only.check_imports()
"""


def test_the_core_without_extras():
    """Importing it warns of nothing, it works, and an import that is too much is seen (yaml, put there at the end)."""
    command = [sys.executable, "-c", CORE_ALONE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert found.stdout.splitlines()[-1:] == ["the core works by itself"], found.stderr
    assert found.stderr.splitlines()[-1] == "AssertionError: importing the packages imports ['yaml']"


def test_names_that_are_imported_later_are_listed():
    """As completion in a notebook reads them: a package that imports names when they are asked for lists them."""
    later = []
    for top in (quotient_manifolds, sharpness):
        inner = (m.name for m in pkgutil.walk_packages(top.__path__, f"{top.__name__}.") if m.ispkg)
        for name in (top.__name__, *inner):
            package = importlib.import_module(name)
            assert set(getattr(package, "__all__", ())) <= set(dir(package))
            if "__getattr__" in vars(package):
                later.append(name)
                assert "__dir__" in vars(package)  # else only what has been asked for
    assert later == ["quotient_manifolds", "quotient_manifolds.symmetries", "sharpness"]


def test_the_walk_through_one_step_is_the_one_that_runs():
    """The files that CONTRIBUTING names are those that are entered from one loss to the next, in that order."""
    walk = (ROOT / "CONTRIBUTING.md").read_text().partition("## One step of the ascent")[2]
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    entered, losses = [], 0

    def loss(model, x):
        nonlocal losses
        losses += 1
        return (model(x) - x).square().mean()

    def see(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and losses == 4 and ROOT in path.parents:
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("sharpness/", "quotient_manifolds/")) and name not in entered:
                entered.append(name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        sharpness.evaluate(model, [torch.randn(2, 3, 8)], loss, steps=3, relative_tol=0, progress=False)
    finally:
        sys.setprofile(before)
    entered.remove("quotient_manifolds/linalg.py")
    assert named == entered


def required(text):
    """Read names and versions of requirements, without conda's other names."""
    other = {"pytorch": "torch", "msgspec-python": "msgspec"}
    pairs = re.findall(r"^\s*(?:- )?([\w-]+) ?>=([\d.]+)$", text, re.MULTILINE)
    return {other.get(name, name): version for name, version in pairs}


def test_the_conda_recipe_needs_what_the_wheel_needs():
    setup, recipe = (ROOT / "setup.cfg").read_text(), (ROOT / "conda" / "meta.yaml").read_text()
    wheel = required(setup.partition("install_requires =")[2].partition("\n\n")[0])
    conda = required(recipe.partition("  run:\n")[2].partition("\n\n")[0])
    assert conda.pop("python") == re.search(r"python_requires = >=(\S+)", setup)[1]
    assert wheel == conda


def test_the_wheel_has_every_package():
    """And the demo, which lies among the examples."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = [path for name in ("quotient_manifolds", "sharpness") for path in (ROOT / name).rglob("__init__.py")]
    names = [".".join(path.parent.relative_to(ROOT).parts) for path in found]
    assert sorted(setup["options"]["packages"].split()) == sorted([*names, "sharpness.demo"])
    assert setup["options"]["package_dir"].strip() == "sharpness.demo = examples/demo"
    assert (ROOT / "examples" / "demo" / "__init__.py").is_file()


def test_one_version():
    import quotient_manifolds

    assert f"version: {quotient_manifolds.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {quotient_manifolds.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_workflows_and_templates_are_read():
    import yaml

    found = [*(ROOT / ".github").rglob("*.yml")]
    assert len(found) == 4
    for path in found:
        assert yaml.safe_load(path.read_text())["name"], path
    targets = re.search(r"run: make (.*)", (ROOT / ".github/workflows/release.yml").read_text())[1].split()
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target

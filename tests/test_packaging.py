"""The core stands alone, and what is shipped is what is there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*arguments):
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_the_core_without_extras():
    found = run("tests/core_only.py", "--pretend")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "the core works by itself"


def test_an_import_that_is_too_much_is_seen():
    code = "import yaml; import tests.core_only as c; c.check_imports()"
    assert "importing the packages imports ['yaml']" in run("-c", code).stderr


def test_importing_warns_of_nothing():
    command = [sys.executable, "-W", "error", "-c", "import torch; import quotient_manifolds"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert found.returncode == 0, found.stderr


def test_every_module_says_what_is_public():
    for package in ("quotient_manifolds", "sharpness"):
        for path in (ROOT / package).rglob("*.py"):
            handlers = {"language.py", "vision.py"}  # they register, and export nothing
            if path.name not in {"__main__.py", *handlers}:
                assert re.search(r"^__all__ = ", path.read_text(), re.MULTILINE), path


def test_tests_mirror_the_source():
    """Every source file has a test file of its name, at the same place of the tree; and the other way round."""
    sources, tests = set(), set()
    for package in ("quotient_manifolds", "sharpness"):
        sources |= {p.relative_to(ROOT) for p in (ROOT / package).rglob("*.py") if not p.stem.startswith("__")}
        found = (ROOT / "tests" / package).rglob("test_*.py")
        tests |= {p.relative_to(ROOT / "tests").with_name(p.name.removeprefix("test_")) for p in found}
    assert sources == tests, sources ^ tests

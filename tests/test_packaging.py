"""The core stands alone, and what is shipped is what is there."""

import ast
import configparser
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quotient_manifolds
import sharpness

ROOT = Path(__file__).parent.parent


CORE_ALONE = r"""
import re, sys, warnings
warnings.simplefilter("error")
warnings.simplefilter("ignore", EncodingWarning)
import torch, quotient_manifolds, sharpness
ours = lambda: {name for name in sys.modules if name.startswith(("quotient_manifolds", "sharpness"))}
assert ours() == {"quotient_manifolds", "sharpness"}
sharpness.evaluate
assert len(ours()) <= 38, f"evaluate loads more than it needs: {sorted(ours())}"
wings = r"\.(optim|adapters|whole|sam|sharded|study|plots|cli|commands|models|data|sameness|compare|spectra)\b"
assert not [name for name in ours() if re.search(wings, name)], "the core loads a wing"
import quotient_manifolds.optim
unused = {"quotient_manifolds." + name for name in ("logarithm", "rescale", "testing")}
assert not unused & set(sys.modules), "optimisers load what they do not use"
warnings.simplefilter("ignore")
sys.argv.append("--pretend")
from tests.support import core_only
core_only.main()
sys.modules["yaml"] = sys
core_only.check_imports()
"""


def test_the_core_without_extras():
    """Importing it warns of nothing, it works, and an import that is too much is seen (yaml, put there at the end)."""
    command = [sys.executable, "-c", CORE_ALONE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, encoding="utf-8")
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


@pytest.mark.parametrize("folder", ["quotient_manifolds/symmetries", "quotient_manifolds/symmetries/whole"])
def test_every_file_of_the_symmetries_is_explained_where_it_lies(folder):
    words = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    said = words.partition(f"<code>{folder}/</code>")[2].partition("</details>")[0]
    named = {name for name in re.findall(r"`(\w+\.(?:py|csv|ini))`", said) if not name.startswith("__")}
    lie_there = {p.name for p in (ROOT / folder).iterdir() if p.suffix in (".py", ".csv", ".ini")} - {"__init__.py"}
    assert named == lie_there


def test_the_walk_through_one_step_is_the_one_that_runs():
    """The files that CONTRIBUTING names are those that are entered from one loss to the next, in that order."""
    walk = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## One step of the ascent")[2]
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


#: Functions that set something for the whole process.
SETTERS = {
    "fork_rng", "set_rng_state", "set_default_dtype", "set_default_device", "set_num_threads",
    "set_deterministic_debug_mode", "use_deterministic_algorithms", "set_float32_matmul_precision", "set_printoptions",
    "set_fastpath_enabled", "sdpa_kernel", "enable_flash_sdp", "set_stance", "register_module_forward_hook",
    "register_module_forward_pre_hook", "register_module_full_backward_hook", "add_safe_globals",
    "set_detect_anomaly", "catch_warnings", "filterwarnings", "simplefilter", "signal", "field_size_limit",
    "rc_context", "rcParams", "set_verbosity",
    "enable_progress_bar", "disable_progress_bar", "chdir", "umask", "putenv", "setlocale", "setrecursionlimit",
    "settrace", "setprofile", "option_context", "set_option", "errstate", "seterr",
}  # fmt: skip
#: Where that is done, with the reason.
PROCESS_WIDE = {
    # While something in ``Shared`` is used, by any thread: torch and transformers offer no other way.
    ("quotient_manifolds/weights.py", "_leave_shortcuts"): {"set_fastpath_enabled", "_cache_enabled"},
    ("quotient_manifolds/passes.py", "_run_eagerly"): {"set_stance"},
    ("sharpness/curvature.py", "_attend_plainly"): {"sdpa_kernel"},
    ("quotient_manifolds/networks.py", "_silence"): {"enable_progress_bar", "set_verbosity", "disable_progress_bar"},
    # By one thread at a time, and put back: the generators of torch if a pass drew from them, PEFT's DARE, and others.
    ("quotient_manifolds/weights.py", "preserve_model_state.save"): {"set_rng_state"},
    ("quotient_manifolds/passes.py", "drawing_again"): {"fork_rng"},
    ("quotient_manifolds/adapters/merging.py", "_seeded"): {"manual_seed"},
    ("sharpness/plots.py", "figure"): {"rc_context"},
    ("sharpness/files.py", "read_table"): {"field_size_limit"},
    # When a package is imported, and in commands, to which the process belongs.
    ("quotient_manifolds/_geoopt.py", ""): {"catch_warnings", "filterwarnings"},
    ("quotient_manifolds/lora_command.py", "command"): {"formatwarning", "signal"},
    ("sharpness/cli.py", "_run"): {"catch_warnings", "simplefilter"},
    # Functions of the user are found in the current folder.
    ("sharpness/errors.py", "called"): {"sys.path"},
    ("sharpness/study/plan.py", "places"): {"sys.path"},
}


LIBRARIES = ("torch", "parametrize", "warnings", "os", "sys", "np")
#: What may be changed in place, and how.
TABLES, CHANGES = ("sys.path", "sys.modules", "os.environ"), ("insert", "append", "update", "setdefault", "pop")


def process_wide(tree, where=""):
    """Yield function and name of what a module sets for the whole process."""
    for node in ast.iter_child_nodes(tree):
        inner = f"{where}.{node.name}".lstrip(".") if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else where
        yield from process_wide(node, inner)
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, ast.Name) and node.id in SETTERS and not stored:
            yield where, node.id
        if isinstance(node, ast.Subscript) and stored and ast.unparse(node.value) in TABLES:
            yield where, ast.unparse(node.value)
        if isinstance(node, ast.Attribute):
            if node.attr in SETTERS or (
                node.attr == "manual_seed" and not ast.unparse(node.value).startswith("torch.Generator(")
            ):
                yield where, node.attr
            elif node.attr in CHANGES and ast.unparse(node.value) in TABLES:
                yield where, ast.unparse(node.value)
            elif stored and ast.unparse(node.value).partition(".")[0] in LIBRARIES:
                yield where, node.attr


def test_what_is_set_for_the_whole_process():
    """In every file of both packages, and there alone where it stands above with its reason."""
    found = {}
    for path in sorted(p for package in ("quotient_manifolds", "sharpness") for p in (ROOT / package).rglob("*.py")):
        for where, name in process_wide(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault((path.relative_to(ROOT).as_posix(), where), set()).add(name)
    assert found == PROCESS_WIDE
    for wrong in (
        "torch.set_default_dtype(t)",
        "torch.manual_seed(0)",
        "warnings.showwarning = f",
        "os.environ[k] = v",
    ):
        assert list(process_wide(ast.parse(wrong))), wrong


def required(text):
    """Read names and versions of requirements, without conda's other names."""
    other = {"pytorch": "torch", "msgspec-python": "msgspec"}
    pairs = re.findall(r"^\s*(?:- )?([\w-]+) ?>=([\d.]+)$", text, re.MULTILINE)
    return {other.get(name, name): version for name, version in pairs}


def test_the_conda_recipe_needs_what_the_wheel_needs():
    setup, recipe = (
        (ROOT / "setup.cfg").read_text(encoding="utf-8"),
        (ROOT / "conda" / "meta.yaml").read_text(encoding="utf-8"),
    )
    wheel = required(setup.partition("install_requires =")[2].partition("\n\n")[0])
    conda = required(recipe.partition("  run:\n")[2].partition("\n\n")[0])
    assert conda.pop("python") == re.search(r"python_requires = >=(\S+)", setup)[1]
    assert wheel == conda


def test_the_wheel_has_every_package():
    """And the demo, which lies among the examples."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    found = [path for name in ("quotient_manifolds", "sharpness") for path in (ROOT / name).rglob("__init__.py")]
    names = [".".join(path.parent.relative_to(ROOT).parts) for path in found]
    assert sorted(setup["options"]["packages"].split()) == sorted([*names, "sharpness.demo"])
    assert setup["options"]["package_dir"].strip() == "sharpness.demo = examples/demo"
    assert (ROOT / "examples" / "demo" / "__init__.py").is_file()


def test_one_version():
    import quotient_manifolds

    assert f"version: {quotient_manifolds.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {quotient_manifolds.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def unnamed(source):
    """List the calls that read or write text in an encoding that the machine chooses."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        given, f = {k.arg for k in call.keywords}, call.func
        name, of = getattr(f, "attr", getattr(f, "id", "")), getattr(getattr(f, "value", None), "id", "")
        opens = name in ("open", "fdopen") and (name, of) not in [("open", m) for m in ("Image", "gzip", "os")]
        text = isinstance(f, ast.Attribute) and name in ("read_text", "write_text")
        text = text or (of == "subprocess" and "text" in given) or name == "TextIOWrapper"
        if (opens or text) and not given & {"encoding", None}:
            words = ast.unparse(call)
            if not (opens and re.search(r"""['"][rwaxt+]*b[rwaxt+]*['"]""", words)):
                yield words


def test_text_names_its_encoding():
    """Else a merge was lost at the "×" of its README wherever the machine's encoding has none."""
    wrong = ["open(p)", "p.open('w')", "open(p, mode='r')", "p.read_text()", "subprocess.run(p, text=True)"]
    right = ["open(p, 'rb')", "p.open(mode='wb')", "os.open(p, 1)", "Image.open(p)", "p.read_text(encoding='utf-8')"]
    assert [call for source in wrong + right for call in unnamed(source)] == wrong
    own = [p for p in ROOT.iterdir() if not p.name.startswith((".", "build"))]
    paths = [p for top in own for p in (top.rglob("*.py") if top.is_dir() else [top]) if p.suffix == ".py"]
    files = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    assert len(files) > 200
    opening = {path: text for path, text in files.items() if re.search(r"open\(|_text\(|text=True|TextIOW", text)}
    assert {str(path): found for path, text in opening.items() if (found := [*unnamed(text)])} == {}


def made(text):
    """List the targets that a workflow calls."""
    return [target for line in re.findall(r"run: make (.*)", text) for target in line.split()]


def test_workflows_and_templates_are_read():
    import yaml

    found = [*(ROOT / ".github").rglob("*.yml")]
    assert len(found) == 5
    for path in found:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["name"], path
    makefile, workflows = (ROOT / "Makefile").read_text(encoding="utf-8"), ROOT / ".github/workflows"
    called = {p.stem: made(p.read_text(encoding="utf-8")) for p in workflows.glob("*.yml")}
    for target in (t for targets in called.values() for t in targets):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "test-oldest" in called["release"], "a release has been tried with the oldest dependencies"
    asked = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*asked} <= {*called["tests"]}, "a pull request is asked for all that is asked for here"
    named = re.findall(r"pytest .* (\S+) --ignore (\S+)", (workflows / "tests.yml").read_text(encoding="utf-8"))[0]
    assert all((ROOT / name).exists() for name in named)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {hook["entry"].split()[1] for hook in hooks} == {"check", "format"}


@pytest.mark.parametrize("folder", ["benchmarks", "studies", "reproduction"])
def test_the_table_of_a_folder_names_its_scripts_results_and_pages(folder):
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    named = re.findall(rf"python -m {folder}[. ](\w+)", text)
    if folder != "reproduction":
        assert sorted(named) == sorted(p.stem for p in (ROOT / folder).glob("[a-z]*.py"))
    for page in re.findall(r"\]\(\.\./([^)]+)\)", text):
        assert (ROOT / page).is_file(), page


def test_every_recorded_result_has_a_question():
    tables = [(ROOT / f / "README.md").read_text(encoding="utf-8") for f in ("benchmarks", "studies", "reproduction")]
    patterns = [p for text in tables for p in re.findall(r"`([\w*]+\.[\w*]+)`", text)]
    unnamed = [p.name for p in (ROOT / "results").iterdir() if not any(p.match(pattern) for pattern in patterns)]
    assert unnamed == []
    assert not any(Path("unknown.json").match(p) for p in patterns)

"""What must work with the core dependencies alone, and what a missing extra says; run by `make wheel`.

``--pretend`` hides the extras of an environment that has them.
"""

import contextlib
import importlib
import io
import json
import pathlib
import sys
import tempfile

EXTRAS = [
    "transformers", "open_clip", "timm", "peft", "PIL", "yaml", "torchvision", "matplotlib", "pandas",
    "sklearn", "datasets", "accelerate", "bitsandbytes", "pymanopt", "lightning", "pytorch_lightning",
    "curvlinops",
]  # fmt: skip


def check_imports():
    import quotient_manifolds  # noqa: F401
    import sharpness

    assert sharpness.evaluate

    loaded = sorted(name for name in EXTRAS if sys.modules.get(name) is not None)
    assert not loaded, f"importing the packages imports {loaded}"


def check_manifolds():
    import geoopt
    import torch

    from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient
    from quotient_manifolds.testing import check_manifold

    for manifold, shape in ((GLQuotientInv(5, 4), (9, 2)), (GLQuotientMix(5, 4), (9, 2)), (RescaleQuotient(), (2, 6))):
        x = manifold.random(*shape, dtype=torch.float64)
        report = check_manifold(manifold, x)
        assert report.ok, report
        point = geoopt.ManifoldParameter(x, manifold=manifold)
        optimizer = geoopt.optim.RiemannianAdam([point], lr=1e-2)
        manifold.to_matrix(point).square().sum().backward()
        optimizer.step()


def check_evaluate():
    import torch
    from torch import nn

    import sharpness

    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(40, 3))
    batch = torch.randn(12, 5, 8), torch.arange(12) % 3
    for measure in ("geodesic-inv", "geodesic-mix", "adaptive"):
        result = sharpness.evaluate(model, [batch], measure=measure, rho=0.05, progress=False)
        assert float(result) > 0
        assert abs(sum(s.share for s in result.by_layer()) - 1) < 1e-4


def check_missing():
    """Each is one line, on the command line and in Python, and names what to install."""
    import torch

    from sharpness import cli

    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (folder / "bert").mkdir()
        (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
        (folder / "results.jsonl").write_text('{"checkpoint": "a", "kind": "fit", "train_loss": 0.5}', encoding="utf-8")
        (folder / "classes" / "cat").mkdir(parents=True)
        (folder / "classes" / "cat" / "0.png").touch()
        (folder / "rows.csv").write_text("checkpoint,kind\n", encoding="utf-8")
        torch.save({"weight": torch.zeros(1)}, folder / "w.pt")
        (folder / "saved").mkdir()
        (folder / "saved" / "state.json").write_text("{}", encoding="utf-8")
        torch_model = "torch.nn:PReLU"
        for extra, command in (
            ("transformers", ["run", str(folder / "bert"), str(folder / "rows.csv")]),
            ("timm", ["run", "vit_tiny_patch16_224", str(folder / "rows.csv"), "--checkpoint", str(folder / "w.pt")]),
            ("images", ["run", torch_model, str(folder / "classes")]),
            ("datasets", ["run", torch_model, str(folder / "saved")]),
            ("plot", ["table", str(folder / "results.jsonl")]),
            ("plot", ["run", torch_model, str(folder / "saved"), "--report", str(folder / "report.html"), "--quiet"]),
            ("demo", ["demo", "--out", str(folder / "demo.png"), "--quiet"]),
        ):
            said, printed = io.StringIO(), io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
                code = cli.main(command)
            lines = said.getvalue().strip().splitlines()
            assert code == 2, (command, code)
            assert len(lines) == 1, (command, lines)
            assert "pip install" in lines[0], (command, lines)
            assert extra in lines[0].partition("pip install")[2], (command, lines)
            print(lines[0])


def check_operators():
    """Python says what to install where the module is imported, or what needs it is called."""
    import torch

    import sharpness

    model, batch = torch.nn.Linear(3, 2), (torch.randn(4, 3), torch.arange(4) % 2)
    assert len(sharpness.spectrum(model, [batch], measure="adaptive", k=2, progress=False).eigenvalues) == 2
    for extra, use in (
        ("pymanopt", lambda: importlib.import_module("quotient_manifolds.pymanopt")),
        ("lightning", lambda: importlib.import_module("sharpness.lightning")),
        ("transformers", lambda: importlib.import_module("sharpness.transformers")),
        ("curvature", lambda: importlib.import_module("sharpness.curvlinops")),
        ("curvature", lambda: sharpness.spectrum(model, [batch], matrix="ggn", progress=False)),
    ):
        said = ""
        try:
            use()
        except ImportError as error:
            said = str(error)
        assert f"install the extra {extra}, pip install '.[{extra}]'" in said, said
        print(said)


def main():
    if "--pretend" in sys.argv:
        sys.modules.update(dict.fromkeys(EXTRAS))
    check_imports()
    check_manifolds()
    check_evaluate()
    check_missing()
    check_operators()
    print("the core works by itself")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose tests of the packages bear the packages' names
    main()

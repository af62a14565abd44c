import json
from pathlib import Path

import pytest
import torch

from sharpness import cli, evaluate
from sharpness.baselines import critical_sharpness
from sharpness.data import DataChoice
from sharpness.rows import targets
from sharpness.sweep import Sweep, read_config, run_sweep
from sharpness.sweep.measuring import _baselines
from tests.sweeps import rows_of


def test_rows_are_those_of_evaluate(place):
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 0
    rows = rows_of("out")
    assert len(rows) == 4 * (1 + 1 + 2 * 2 + 2 * 1)
    assert [json.loads(line)["job"] for line in Path("out/results.jsonl").read_text().splitlines()] == [
        r["job"] for r in rows
    ]
    row = next(r for r in rows if r.get("measure") == "adaptive" and r["rho"] == 0.3 and not r["ablation"])
    sweep = read_config("sweep.json")
    from sharpness.models import load

    loaded = load("sweepmodel:model", "collection/net0.pt")
    batches = sweep.data.load(loaded)
    expected = evaluate(loaded.model, batches, measure="adaptive", rho=[0.1, 0.3], steps=4, progress=False)
    assert row["checkpoint"] == "net0.pt"
    assert row["sharpness"] == float(expected[0.3])
    assert row["per_batch"] == [b.value for b in expected[0.3].batches]
    assert row["settings"]["steps"] == 4
    assert row["data"]["num_examples"] == 16
    fit = next(r for r in rows if r["kind"] == "fit")
    data = torch.load("test.pt", weights_only=True)
    wrong = (loaded.model(data["x"]).argmax(1) != data["y"]).double().mean()
    assert fit["test_error"] == pytest.approx(float(wrong))
    assert targets(rows)["net0.pt"] == pytest.approx(fit["test_error"] - fit["train_error"])


def test_a_diverged_checkpoint_is_a_failed_row(place, capsys):
    torch.save({k: v * torch.nan for k, v in torch.load("collection/net0.pt").items()}, "collection/net9.pt")
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    assert "net9.pt, fit: train_loss is nan; the model has diverged" in capsys.readouterr().err
    assert cli.main(["table", "out"]) == 0


def test_a_radius_that_is_too_large_loses_no_other(place, capsys):
    config = json.loads(Path("sweep.json").read_text())
    config |= {"rho": {"euclidean": [0.1, 1e300, 0.3]}, "measures": ["euclidean"], "ablations": [{}]}
    Path("sweep.json").write_text(json.dumps(config))
    for _ in range(2):  # said again by the next call, which does nothing again
        assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 4
        assert all("euclidean at rho = 1e+300: " in line and "use a smaller rho" in line for line in err), err
        assert {r["rho"] for r in rows_of("out") if r["kind"] == "sharpness"} == {0.1, 0.3}


def test_baselines_of_a_sweep(place):
    config = json.loads(Path("sweep.json").read_text())
    config |= {"initial": "collection/net0.pt", "measures": ["gradient-norm"], "ablations": [{}]}
    Path("base.json").write_text(json.dumps(config))
    assert run_sweep(read_config("base.json"), "out", progress=False) == []
    found = {r["checkpoint"]: r for r in rows_of("out", "base.json") if r["kind"] == "baselines"}
    assert found["net0.pt"]["distance"] == 0
    assert found["net1.pt"]["distance"] > 1
    assert found["net1.pt"]["geodesic_distance"] is None  # no attention
    assert all(r["relative_flatness"] > 0 and r["weight_norm"] > 0 for r in found.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_baselines_of_a_half_precision_model_are_those_of_its_weights_in_float32(dtype):
    """Near a minimum a critical step is smaller than the spacing of such numbers."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).float()
    x = torch.randn(32, 8).to(dtype).float()
    y = torch.randint(3, (32,))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    narrow = net.to(dtype)
    before = {k: v.clone() for k, v in narrow.state_dict().items()}
    sweep = Sweep((), DataChoice(""), baselines=True)
    found = _baselines(sweep, narrow, lambda _: [(x.to(dtype), y)])
    assert all(torch.equal(v, before[k]) and v.dtype == dtype for k, v in narrow.state_dict().items())
    rounded = critical_sharpness(narrow, (x.to(dtype), y))
    expected = _baselines(sweep, net.float(), lambda _: [(x, y)])
    for name in ("critical_sharpness", "fisher_trace", "margin", "weight_norm", "relative_flatness"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    assert rounded != pytest.approx(expected["critical_sharpness"], rel=1e-3)

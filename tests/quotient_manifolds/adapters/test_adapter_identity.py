"""One adapter of every kind gives itself back, or is refused; docs/tables/adapter_identity.csv says so."""

import csv
from pathlib import Path

import pytest
import torch

from quotient_manifolds.adapters import Adapter, merging
from tests.support.adapter_variants import CASES, VARIANTS, WEIGHTS, error

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about layers, adapters and options that it does not like

TABLE = Path(__file__).parents[3] / "docs/tables/adapter_identity.csv"
OURS = ("folders", "memory")


@pytest.mark.parametrize("tool", OURS)
@pytest.mark.parametrize(("name", "weights"), CASES, ids=lambda value: f"{value}")
def test_one_adapter_gives_itself_back(name, weights, tool):
    found = error(name, weights, tool)
    # A file in half precision is rounded once.
    dtype = VARIANTS[name].dtype
    rounding = torch.finfo(dtype).eps if dtype == torch.bfloat16 and tool == "folders" else 0
    assert found < max(1e-6, rounding)


#: Networks whose outputs are linear in the change, and adapters that are products and biases alone.
LINEAR = ["rsLoRA", "lora_bias", "embedding", "convolution", "convolution, 2 groups", "Conv1D of GPT-2",
          "experts (target_parameters)", "float8"]  # fmt: skip


@pytest.mark.parametrize("weights", [(-1.0,), (1.0, -1.0), (0.7, -0.4)], ids=lambda value: f"{value}")
@pytest.mark.parametrize("name", LINEAR)
def test_weights_may_be_negative(name, weights):
    assert max(error(name, weights, tool) for tool in OURS) < 1e-6


def test_what_is_scaled_or_dropped_is_seen(monkeypatch):
    def by_the_rank(adapter, layer):
        return adapter.config["r"], adapter.config["lora_alpha"] / adapter.config["r"]

    monkeypatch.setattr(merging, "_mean", lambda key, own: torch.zeros_like(own[0][0].tensor(key)))
    monkeypatch.setattr(Adapter, "rank_and_scale", by_the_rank)
    for name in ("rsLoRA", "DoRA", "modules_to_save", "trained tokens, tied head"):
        assert error(name, (1.0,), "folders") > 0.05, name
    assert error("LoRA", (1.0,), "folders") < 1e-6


@pytest.mark.parametrize("tool", OURS)
@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        ("DoRA", (-1.0,), "DoRA divides by the norm of the adapted weight, so that only a mean is defined"),
        ("DoRA", (0.5,), "DoRA divides by the norm"),
        ("DoRA", (1.0, -1.0), "DoRA divides by the norm"),
        ("modules_to_save", (-1.0,), "head.bias is saved as a whole, as a task's head or trained tokens are"),
        ("trained tokens, tied head", (-1.0,), "tokens_delta is saved as a whole"),
    ],
)
def test_weights_that_have_no_meaning_are_refused(name, weights, said, tool):
    assert said in str(error(name, weights, tool))


def test_the_table_is_that_of_the_tests():
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["adapter"], row["weights"]) for row in rows] == [
        (name, ", ".join(f"{w:g}" for w in weights)) for name, weights in CASES
    ]
    for row in rows:
        assert row["in memory"] == "< 1e-6"
        assert row["ours, folders"] == ("0.3 %" if row["adapter"] == "bfloat16" else "< 1e-6")


def test_the_tool_of_peft_that_is_right_is_seen_to_be():
    assert error("LoRA", WEIGHTS[1], "cat") < 1e-6

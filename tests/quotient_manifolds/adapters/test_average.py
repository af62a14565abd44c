"""Running means of adapters, against means of the dense products."""

import copy
import math

import peft
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from quotient_manifolds.adapters import QuotientEMA
from quotient_manifolds.optim import create_quotient_lora_optimizer
from quotient_manifolds.symmetries import adapter_pairs, lora_pairs_by_name, move_

pytestmark = pytest.mark.filterwarnings("ignore:Adapter '")


def adapted(r=2, alpha=5, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 7), nn.Linear(7, 3))
    config = peft.LoraConfig(
        r=r, lora_alpha=alpha, target_modules=["0", "2"], modules_to_save=["3"], init_lora_weights=False, **options
    )
    return peft.get_peft_model(net, config)


def products(model):
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    return [m.get_delta_weight("default").detach().clone() for m in layers]


def head(model):
    return model.base_model.model[3].modules_to_save["default"].weight


def checkpoints(model, count, distinct):
    """Weights after steps: as many as ``distinct`` different adapters, in factors that are always others."""
    states = []
    for seed in range(distinct):
        torch.manual_seed(seed)
        states.append({n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad})
    for i in range(count):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.requires_grad:
                    p.copy_(states[i % distinct][name])
        yield i


def means_of(ema):
    """The means that it keeps, as matrices."""
    return [G @ H.mT for mean in ema.state_dict()["means"] for G, H in zip(*mean, strict=True)]


def relative(found, expected):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("decay", [0.8, None])
def test_the_mean_of_products_is_exact_where_the_rank_allows(decay):
    """Two adapters of rank 2 have a mean of rank 4; what is written is its nearest product of rank 2."""
    model = adapted()
    ema, expected, of_head = QuotientEMA(model, decay), None, None
    for i in checkpoints(model, 7, 2):
        ema.update()
        keep = 0 if i == 0 else 1 - 1 / (i + 1) if decay is None else decay
        now = products(model)
        expected = now if i == 0 else [keep * M + (1 - keep) * X for M, X in zip(expected, now, strict=True)]
        of_head = head(model).detach().clone() if i == 0 else keep * of_head + (1 - keep) * head(model).detach()
    means = means_of(ema)
    assert relative(means, expected) < 1e-8
    nearest = []
    for X in expected:
        U, s, Vh = torch.linalg.svd(X)
        nearest.append(U[:, :2] * s[:2] @ Vh[:2])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ema.averaged():
        assert relative(products(model), nearest) < 1e-8
        assert torch.allclose(head(model), of_head)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(products(model), expected, strict=True)]
    assert list(ema.lost().values()) == pytest.approx(errors, rel=1e-6)
    assert min(errors) > 0.1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    ema.copy_()
    assert relative(products(model), nearest) < 1e-8


def test_what_is_cut_off_is_bounded():
    model = adapted()
    ema, exact = QuotientEMA(model, 0.7, rank=2), QuotientEMA(model, 0.7, rank=7)
    for _ in checkpoints(model, 6, 5):
        ema.update()
        exact.update()
    with ema.averaged():
        found = products(model)
    errors = [float((a - b).norm() / c.norm()) for a, b, c in zip(found, means_of(exact), means_of(ema), strict=True)]
    assert all(0.05 < error <= bound for error, bound in zip(errors, ema.lost().values(), strict=True))
    assert max(exact.lost().values()) > 0  # the adapters' own rank


def test_moves_between_steps_change_nothing_but_a_mean_of_factors():
    found = []
    for moves in (False, True):
        model = adapted()
        ema = QuotientEMA(model, 0.8)
        factors = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for i in checkpoints(model, 6, 2):
            if moves:
                move_(model, adapter_pairs(model), condition=50.0, seed=i)
            ema.update()
            factors.update_parameters(model)
        with ema.averaged():
            found.append((products(model), products(factors.module)))
    (one, of_factors), (two, of_moved) = found
    assert relative(one, two) < 1e-8
    assert relative(of_moved, of_factors) > 0.5


@pytest.mark.parametrize("option", ["use_rslora", "use_dora", "lora_bias"])
def test_variants(option):
    model = adapted(**{option: True})
    ema, expected = QuotientEMA(model, None), 0
    for _ in checkpoints(model, 4, 2):
        ema.update()
        expected = [X / 4 + E for X, E in zip(products(model), expected or [0] * 2, strict=True)]
    means = means_of(ema)
    assert relative(means, expected) < 1e-8
    products_of = ("lora_A.default.weight", "lora_B.default.weight")
    names = [n for n, p in model.named_parameters() if p.requires_grad and not n.endswith(products_of)]
    assert len(names) > 1
    both = [dict(model.named_parameters())[n].detach().clone() for n in names for _ in checkpoints(model, 2, 2)]
    values = ema.values()
    for name, one, two in zip(names, both[::2], both[1::2], strict=True):
        assert torch.allclose(values[name], (one + two) / 2)


def test_a_new_adapter_whose_products_are_zero_can_be_trained_on():
    model = adapted()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(p)
    ema = QuotientEMA(model)
    ema.update()
    values = ema.values()
    assert all(bool(torch.isfinite(v).all()) for v in values.values())
    assert all(bool((v == 0).all()) == ("lora_B" in name) for name, v in values.items())
    assert set(ema.lost().values()) == {0.0}


def train(model, optimizer, ema, steps, generator):
    for _ in range(steps):
        x = torch.randn(16, 9, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()
        ema.update()


def test_a_resumed_mean_is_the_same():
    def begun():
        model = adapted()
        return model, create_quotient_lora_optimizer(model, lr=0.02), QuotientEMA(model, 0.9)

    generator = torch.Generator().manual_seed(0)
    model, optimizer, ema = begun()
    train(model, optimizer, ema, 4, generator)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), ema.state_dict(), generator.get_state()))
    train(model, optimizer, ema, 4, generator)
    again, other, resumed = begun()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    train(again, other, resumed, 4, torch.Generator().set_state(saved[3]))
    assert ema.count == resumed.count == 8
    assert all(torch.equal(value, resumed.values()[name]) for name, value in ema.values().items())
    lone = QuotientEMA(peft.get_peft_model(nn.Sequential(nn.Linear(9, 8)), peft.LoraConfig(r=2, target_modules=["0"])))
    with pytest.raises(ValueError, match="the state is of other adapters"):
        lone.load_state_dict(saved[2])


def test_in_the_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = adapted()

        def forward(self, x, labels):
            return {"loss": (self.net(x) - labels).square().mean()}

    torch.manual_seed(0)
    data = [{"x": x, "labels": x[:3].sin()} for x in torch.randn(32, 9)]

    def run(steps, resume=None):
        torch.manual_seed(1)
        model = Wrapped()
        ema = QuotientEMA(model, 0.9)
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=steps, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="steps", learning_rate=0.05, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[ema.callback()])
        trainer.train(resume_from_checkpoint=resume)
        return ema

    whole = run(6)
    assert whole.count == 6
    resumed = run(6, str(tmp_path / "checkpoint-3"))
    assert resumed.count == 6
    assert all(torch.allclose(v, resumed.values()[name], rtol=1e-5) for name, v in whole.values().items())


def test_layers_that_are_not_of_peft_and_wrong_arguments():
    layer = nn.ModuleDict({"lora_down": nn.Linear(6, 2, bias=False), "lora_up": nn.Linear(2, 4, bias=False)})
    model = nn.Sequential(layer)
    ema = QuotientEMA(model, symmetries=lora_pairs_by_name(model))
    with pytest.raises(ValueError, match=r"there is no mean yet; call update\(\)"):
        ema.values()
    ema.update()
    values = ema.values()
    found = values["0.lora_up.weight"] @ values["0.lora_down.weight"]
    assert torch.allclose(found, layer["lora_up"].weight @ layer["lora_down"].weight)
    before = ema.values()
    layer["lora_up"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the adapters have NaN or infinite entries; the mean stays as it was"):
        ema.update()
    assert all(torch.equal(v, before[name]) for name, v in ema.values().items())
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="decay must be at least 0 and below 1"):
            QuotientEMA(model, decay, symmetries=lora_pairs_by_name(model))
    with pytest.raises(ValueError, match="no trained weight of this Linear belongs to an adapter"):
        QuotientEMA(nn.Linear(2, 2))


def test_a_state_that_is_spoilt_is_refused_and_the_mean_stays():
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(6, 5)), peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    )
    ema = QuotientEMA(model)
    ema.update()
    state, before = ema.state_dict(), ema.values()
    for said, spoilt in (
        ("this is no state", {"count": 1}),
        ("other entries than tensors of finite numbers", {**state, "cut": [state["cut"][0] * math.nan]}),
        ("other entries than tensors of finite numbers", {**state, "others": dict.fromkeys(state["others"], "x")}),
        ("of other adapters", {**state, "cut": []}),
        ("of other adapters", {**state, "others": {}}),
    ):
        with pytest.raises(ValueError, match=said):
            ema.load_state_dict(spoilt)
        assert all(torch.equal(t, before[name]) for name, t in ema.values().items())
    with pytest.raises(TypeError, match=r"symmetries must be Symmetries, .* got int"):
        QuotientEMA(model, symmetries=1)

"""Calls of functions with wrong values."""

import copy
import inspect
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

import quotient_manifolds as qm
import sharpness
from quotient_manifolds import adapters as lora
from quotient_manifolds import optim, symmetries, testing
from sharpness import checkpoints, data, measures, models, plots, study
from sharpness.files import read_table
from tests.support import adapter_variants, networks
from tests.support.fuzzing.spoiling import spoil_tree
from tests.support.fuzzing.values import LORA_CONFIG, ODD_PYTHON, PLACES, Job
from tests.support.fuzzing.world import pick


def in_memory(rng, world):
    """Meet the functions of adapters with spoilt arguments, which they must not change."""
    import peft

    options = {"r": 2, "target_modules": ["layer", "head"], "init_lora_weights": False}
    model = peft.get_peft_model(adapter_variants.two(), peft.LoraConfig(**options))
    model.add_adapter("two", peft.LoraConfig(**{**options, "r": 3, "use_rslora": True}))
    one, two = (lora.Adapter.from_model(model, name) for name in ("default", "two"))
    base, ema = adapter_variants.two(), lora.QuotientEMA(model)
    ema.update()
    state, config = {key: t.clone() for key, t in one.state.items()}, dict(one.config)
    # fmt: off
    targets = [(lora.merge, {"adapters": [one, two], "out": None, "weights": [0.5, 0.5], "rank": 2, "energy": 1.0,
                             "method": "sum", "space": "core", "density": 0.5, "seed": 0})] * 4 + [
        (lora.Adapter.from_state, {"state": state, "config": config, "name": "x"})] * 4 + [
        (lora.resize, {"adapter": one, "out": None, "rank": 2, "energy": 0.9}),
        (lora.balance, {"adapter": one, "out": "out"}), (lora.compare, {"one": one, "other": two}),
        (lora.carry, {"adapter": one, "base": base, "other": copy.deepcopy(base), "out": None}),
        (lora.convert, {"adapter": one, "out": "out", "to": "kohya", "base": None, "model": "unet", "one_rank": False}),
        (lora.extract, {"base": "lora/base.safetensors", "tuned": "lora/tuned.safetensors", "out": "out", "rank": 2,
                        "energy": None, "target_modules": ["layer"], "modules_to_save": []}),
        (lora.Adapter.from_model, {"model": model, "name": "two"}), (one.add_to, {"model": model, "name": "new"}),
        (lora.QuotientEMA, {"model": model, "decay": 0.9, "rank": 2, "symmetries": None}),
        (ema.load_state_dict, {"state": ema.state_dict()}),
    ]
    special = {
        "adapters": [[], [one], [one, "lora/one"], ["lora/one", "lora/kohya.safetensors"], one, "lora/one", [one] * 3],
        "weights": [[1.0], [1, -1], [0, 0], [math.nan, 1], (1e308, 1e308), torch.ones(2), [1e-320, 0], ["a", "b"]],
        "method": ["ties", "dare", "inv", "mix", "SUM"], "space": ["knots"], "rank": [10**30, 2**70, np.int64(2), 1000],
        "seed": [2**70, -(2**70), np.int64(3)], "to": ["peft", "diffusers", "diffsynth"],
        "adapter": [two, "lora/one", Path("lora/dora"), "lora/kohya.safetensors", b"lora/one", model, state],
        "base": [nn.Linear(2, 2), model, base.half(), adapter_variants.linear(), "bert", "lora/base.safetensors"],
        "model": [nn.Linear(2, 2), base, "text_encoder", "x.y", "a b", adapter_variants.two().to("meta")],
        "name": ["default", "two", "new.one", ""], "symmetries": [symmetries.Symmetries(), symmetries.find(tiny())],
        "target_modules": [["nope"], ["head", "layer"], "layer", [""]], "modules_to_save": [["head"], "head", [""]],
    }
    # fmt: on
    special |= {"one": special["adapter"], "other": [*special["adapter"], *special["base"]]}
    function, given = pick(rng, targets)
    name = pick(rng, given)
    pool = special.get(name) or (PLACES if isinstance(given[name], str) else ODD_PYTHON)
    odd = pick(rng, pool if rng.random() < 0.6 else [*ODD_PYTHON, *(PLACES if name == "out" else [])])
    if name == "state":
        odd = copy.deepcopy(given[name]) if rng.random() < 0.8 else odd
        key = pick(rng, odd) if isinstance(odd, dict) and odd else None
        if torch.is_tensor(odd.get(key) if isinstance(odd, dict) else None) and rng.random() < 0.8:
            odd[pick(rng, [key, key, key + "x", 3])] = odd_tensor(rng, odd[key])
        elif isinstance(odd, dict):
            spoil_tree(rng, odd, ODD_PYTHON)
    elif name == "config" and rng.random() < 0.8:
        key = pick(rng, LORA_CONFIG)
        odd = {**config, key: pick(rng, [*LORA_CONFIG[key], *ODD_PYTHON])}
    given = {**given, name: odd}
    if rng.random() < 0.15:  # weights that no training gives
        pick(rng, [p for p in model.parameters() if p.requires_grad]).data.fill_(
            pick(rng, [0.0, math.nan, math.inf, 1e-45, 3e38])
        )
    words = f"{name}={odd!r:.150}" if not isinstance(odd, dict) else f"{name}: {shortened(given[name])}"

    def call():
        held = [model, base, *(v for v in given.values() if isinstance(v, nn.Module))]
        before = [copy.deepcopy(m.state_dict()) for m in held]
        said = copy.deepcopy((config, one.config, two.config))
        found = function(**given)
        if isinstance(found, lora.Adapter) and function == lora.Adapter.from_state:
            found = lora.merge([found])
        if isinstance(found, lora.Adapter) and function != lora.Adapter.from_model:
            keys = [key for parts in found.layers.values() for key in parts.values()]
            bad = [key for key in [*keys, *found.others] if not bool(found.tensor(key).isfinite().all())]
            assert not bad, f"{bad[0]} has NaN"
            json.dumps(dict(found.lost), allow_nan=False)
        elif isinstance(found, dict):
            json.dumps(found, allow_nan=False)
        mean = found if isinstance(found, lora.QuotientEMA) else ema if function == ema.load_state_dict else None
        if mean is not None:
            mean.update()
            mean.values()
            assert all(math.isfinite(v) for v in mean.lost().values()), "lost is NaN"
        if function != one.add_to:
            assert all(
                torch.equal(t.nan_to_num(7), m.state_dict()[key].nan_to_num(7))
                for m, old in zip(held, before, strict=True)
                for key, t in old.items()
                if not t.is_meta
            ), "the model's weights changed"
        assert repr(said) == repr((config, one.config, two.config)), "a config changed"

    outs = [v for v in [given.get("out")] if isinstance(v, str)]
    return Job([getattr(function, "__name__", function), words], call=call, outs=outs, names=[name])


def shortened(tree):
    """Show what a dict holds, without the numbers of tensors."""
    return {k: f"{v.dtype} {tuple(v.shape)}" if torch.is_tensor(v) else repr(v)[:40] for k, v in tree.items()}


def odd_tensor(rng, t):
    # fmt: off
    if t.dim() < 2 or not t.numel():
        return t
    return pick(rng, [t, t[..., :-1, :], t[..., :1], t.mT, t[0], t[0, 0], t * math.nan, 0 * t, t.half(), t.long(),
                      t.double(), t.bool(),
                      t.to(torch.complex64), t[None].expand(2, *t.shape), t[None][:0], t[..., :0], t.numpy(),
                      t.tolist(), None, "x",
                      t * 1e30, t * 1e-30, t * math.inf, t[..., :1].expand(t.shape), t.requires_grad_(True),
                      torch.cat([t, t], -1), 3])
    # fmt: on


def manifolds(rng, world):
    make, shape = pick(rng, [(qm.GLQuotientInv, (7, 2)), (qm.GLQuotientMix, (7, 2)), (qm.RescaleQuotient, (2, 1))])
    if rng.random() < 0.1:
        given = {"n": 4, "m": 3} if shape[1] > 1 else {"metric": "inv"}
        given[key := pick(rng, given)] = pick(rng, ODD_PYTHON)
        return Job([make.__name__, given], call=lambda: repr(make(**given)), names=[key])
    manifold = make(4, 3) if shape[1] > 1 else make()
    x, u, v, A = torch.randn(shape), torch.randn(shape), torch.randn(shape), torch.randn(shape[1], shape[1])
    known = {"x": x, "u": u, "v": v, "y": x + 0.1 * u, "A": A, "L": A, "t": 0.5,
             "points": torch.stack([x, x + 0.1 * v]), "size": shape,
             "tensors": (x[: len(x) // 2 + 1], x[len(x) // 2 + 1 :]), "tensor": x, "G": torch.randn(4, 2),
             "H": torch.randn(3, 2),
             "X": torch.randn(4, 3), "h": 2,
             "manifold": manifold}  # fmt: skip
    own = [
        getattr(manifold, m)
        for m in dir(manifold)
        if m[0] != "_" and m not in dir(nn.Module) and callable(getattr(manifold, m))
    ]
    method = pick(rng, [*own, qm.canonical_gauge, qm.from_matrix, testing.check_manifold])
    wanted = inspect.signature(method).parameters.values()
    names = [p.name for p in wanted if (p.name in known and p.default is p.empty) or p.name == "v"]
    if not names:
        return Job("nothing to give", call=int)
    parts = [(n, v) for n in names for v in (known[n] if n in ("size", "tensors") else [known[n]])]
    at = int(rng.integers(len(parts)))
    name, old = parts[at]
    odd = odd_tensor(rng, old.clone()) if torch.is_tensor(old) and rng.random() < 0.85 else pick(rng, ODD_PYTHON)
    arguments = [odd if i == at else v for i, (_, v) in enumerate(parts)]
    words = (
        f"{odd.dtype} {tuple(odd.shape)} of norm {odd.to(torch.complex64).norm():.2g}"
        if torch.is_tensor(odd)
        else repr(odd)
    )
    return Job(
        [manifold, method.__name__, name, words], call=lambda: method(*arguments), names=["factor", "point", *names]
    )


def tiny():
    torch.manual_seed(0)
    return networks.TinyAttention().float().eval()


def calls(rng, world):
    # fmt: off
    model, (x, y), one, two = tiny(), networks.tokens(6, 4, 3), nn.Linear(4, 2), nn.Linear(2, 4)
    found, batch, weights = symmetries.find(model), (x, y), dict(model.named_parameters())
    how = {"lr": 1e-2, "weight_decay": 0.0, "metric": "mix", "max_grad_norm": None}
    both = nn.Sequential(one, two)
    down, up = symmetries.slot(both, "0.weight", transpose=True), symmetries.slot(both, "1.weight")
    own = symmetries.pair([down], [up], symmetries.GL(2), name="a")
    net, inputs = (lambda m, b: m(b[0]).sum()), {"model": model, "batches": [batch, batch]}
    adam = {"params": list(model.named_parameters()), "symmetries": found, **how}
    measured = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, steps=2, progress=False)
    measuring = {**inputs, "loss_fn": None, "measure": "geodesic-inv", "rho": 0.1, "steps": 2, "relative_tol": 1e-3,
                 "ascent": "power", "restarts": 0,
                 "seed": 0,
                 "micro_batch": None, "symmetries": None,
                 "keep_directions": None, "group": None}
    targets = [(sharpness.evaluate, measuring)] * 12 + [(optim.QuotientAdam, {**adam, "betas": (0.9, 0.99),
                                                                              "eps": 1e-8})] * 3 + [
        (plots.plot_profile, {"model": model, "batch": batch, "direction": measured.direction(0), "loss_fn": None,
                              "points": 3, "micro_batch": None}),
        (measured.__getitem__, {"rho": 0.1}), (measured.direction, {"batch_index": 0}),
        (sharpness.hessian, {**inputs, "loss_fn": None, "measure": "adaptive", "num_matvecs": 3, "seed": 0,
                             "micro_batch": None, "group": None}),
        (sharpness.average, {**inputs, "loss_fn": None, "measure": "adaptive", "rho": 0.1, "num_samples": 2,
                             "seed": 0}),
        (sharpness.spectrum, {**inputs, "loss_fn": None, "measure": "adaptive", "matrix": "hessian", "k": 1, "seed": 0,
                              "micro_batch": None, "progress": False}),
        (sharpness.measured, {**inputs, "quantities": ("gradient-norm", "geodesic-inv"), "loss_fn": None, "steps": 1,
                              "before": None, "other": None}),
        (sharpness.critical_sharpness, {**inputs, "loss_fn": None, "before": None, "passes": 4, "micro_batch": None}),
        (sharpness.gradient_norm, {**inputs, "loss_fn": None, "measure": "geodesic-inv", "symmetries": None}),
        (measured.to_json, {"path": "out"}),
        (optim.QuotientSGD, {**adam, "momentum": 0.9}), (optim.create_quotient_optimizer,
                                                                            {"model": model, **how}),
        (sharpness.GeodesicSAM, {"model": model, "base_optimizer": torch.optim.SGD(model.parameters(), 0.1),
                                 "rho": 0.05,
                                 "measure": "geodesic-inv", "refresh": 2, "symmetries": found}),
        (symmetries.find, {"model": model, "batch": batch}),
        (symmetries.verify, {"model": model, "batch": batch, "seed": 0, "symmetries": found}),
        (symmetries.move_, {"model": model, "symmetries": found, "condition": 10.0, "seed": 0, "kinds": None}),
        (symmetries.slot, {"module": one, "name": "weight", "rows": slice(None), "columns": slice(None),
                           "transpose": False}),
        (symmetries.GL, {"h": 2, "diagonal": False}),
        (symmetries.stacks, {"pairs": found.pairs, "weights": weights}), (found.restricted, {"names": [*weights]}),
        (lambda added: found.adding(added), {"added": own}),
        (symmetries.pair, {"G": [down], "H": [up], "group": symmetries.GL(2), "name": "a"}),
        (symmetries.PairStack, {"pairs": found.pairs[:1]}),
        (models.load, {"name": "mine:model", "checkpoint": "collection/net0.pt"}),
        (checkpoints.load_state_dict, {"path": "xy.pt"}),
        (load_batches, {"source": "xy.pt", "batch_size": 4, "batches": 1, "num_examples": 8, "subset_seed": 0,
                        "device": "cpu"}),
        (read_table, {"path": "dev.tsv", "header": True}),
        (study.read_config, {"path": "sweep.json"}),
        (study.read_results, {"path": "done"}), (symmetries.canonicalize_, {"model": model, "symmetries": found}),
        (study.compare, {"rows": study.read_results("done"), "target": "gap", "given": ("train_loss",)}),
        (sharpness.WeightSpace, {"model": model, "measure": sharpness.MEASURES["geodesic-inv"],
                                 "symmetries": None}),
        (measures.get_measure, {"measure": "geodesic-inv", "geodesic": "exact", "symmetry": "qk"}),
    ]
    special = {
        "batches": [[], [[]], [()], [(x,)], [(x, y, y)], [(x, y.float())], [(x, y + 99)], [(x, y - 9)],
                    [(x[:0], y[:0])], [{}], x, iter([]),
                    [batch, {"x": x}], [(x, y[:2])], [x.numpy()], batch, [(x.double(), y)], [(x.half(), y)],
                    [batch, (x, y + 99)],
                    [batch, None], [(x * math.nan, y)], [(x[..., :2], y)], [(x.long(), y)], [(x[0], y[0])],
                    [batch, (x * math.nan, y)]],
        "loss_fn": [lambda m, b: 3.0, lambda m, b: None, lambda m, b: torch.tensor(1.0), lambda m, b: m(b[0]), net,
                    lambda m, b: net(m, b).long(),
                    lambda m, b: net(m, b).detach(), lambda m, b: net(m, b) * math.nan, lambda m, b: (net(m, b), 1),
                    lambda m: 0,
                    lambda m, b: net(m, b) * 1j, lambda m, b: net(m, b)[None], lambda m, b: {"loss": net(m, b)}],
        "model": [nn.Identity(), tiny().requires_grad_(False), tiny().half(), tiny().to("meta"), tiny().double(),
                  nn.Linear, nn.Sequential(),
                  nn.Linear(4, 3), nn.TransformerEncoderLayer(4, 2, 8), nn.LazyLinear(3)],
        "pairs": [[], symmetries.find(tiny()).pairs, [*found.pairs, *found.pairs], [None], found.pairs[0], found],
        "symmetries": [symmetries.Symmetries(), symmetries.find(tiny()), found.pairs, found.adding(own)],
        "added": [found.pairs[0]],
        "weights": [{}, {name: t[:1] for name, t in weights.items()}, {name: t.half() for name, t in weights.items()}],
        "measure": [*sharpness.MEASURES],
               "G": [[down, down], [up]],
        "before": [{}, {name: t.detach()[:1] for name, t in weights.items()}, weights, {"x": x}],
        "quantities": [["critical"], ["critical-relative"], ["geodesic-inv@0.2"], ["adaptive@x"], ["nope"], []],
        "rho": [[0.1, 0.2], (0.1, 0.1), "0.1", 1e300], "seed": [2**70, -(2**70)],
        "geodesic": ["first-order", "exact", "rk4"],
               "symmetry": ["none"],
        "betas": [(0.9, 1.0), (0.9,), ("a", "b"), (math.nan, 0.9)], "lr": [1e300], "rows": [slice(0, 99), slice(5, 2),
                                                                                            [{}], [{"kind": "fit"}]],
    }
    # fmt: on
    function, given = pick(rng, targets)
    names = [pick(rng, given) for _ in range(int(rng.integers(1, 3)))]
    for name in names:
        pool = special.get(name) or (PLACES if isinstance(given[name], str) else ODD_PYTHON)
        given = {**given, name: pick(rng, pool if rng.random() < 0.5 else ODD_PYTHON)}
    if rng.random() < 0.1:  # weights that no training gives
        pick(rng, list(model.parameters())).data.fill_(pick(rng, [0.0, math.nan, math.inf, 1e-45, 1e38]))
    where, odd = pick(rng, ["group", "state", "setting", "gradient", "plain", "plain"]), pick(rng, ODD_PYTHON)

    def call():
        before = copy.deepcopy(model.state_dict())
        found = function(**given, **({"progress": False} if function is sharpness.evaluate else {}))
        after = model.state_dict()
        assert function in (symmetries.move_, symmetries.canonicalize_) or all(
            before[k].isnan().any() or torch.equal(v, before[k]) for k, v in after.items()
        ), "the model's weights changed"
        if isinstance(found, torch.optim.Optimizer):
            train(rng, model, found, where, names[0], odd)
        elif function is sharpness.evaluate:
            assert str(found), found.to_dict()

    lookup = (KeyError,) if where == "state" or function in (measured.__getitem__, measured.direction) else ()
    what = [getattr(function, "__name__", function), *(f"{k}={given[k]!r:.80}" for k in names), where, f"{odd!r:.60}"]
    return Job(
        what, call=call, outs=[v for v in [given.get("path")] if isinstance(v, str)], names=names, allowed=lookup
    )


def train(rng, model, optimizer, where, name, odd):
    """Take two steps with an optimiser whose settings or state are spoilt on the way."""
    if where == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: odd})
    elif where == "setting":
        optimizer.param_groups[0][name] = odd
    elif where == "state":
        state = copy.deepcopy(optimizer.state_dict())
        spoil_tree(rng, state, ODD_PYTHON)
        optimizer.load_state_dict(state)
    for step in range(2):
        x, y = networks.tokens(4, 4, 3, seed=step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if where == "gradient":
                model.head.weight.grad = None
                model.attention.in_proj_weight.grad *= pick(rng, [0.0, math.nan, math.inf, 1e30])
            return loss

        optimizer.step(closure)


def load_batches(source, device="cpu", **choice):
    return data.DataChoice(source, **choice).load(models.LoadedModel(tiny()), device)

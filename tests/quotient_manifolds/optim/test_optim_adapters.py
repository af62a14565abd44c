"""Optimisers for adapters of every kind, adapters that are replaced later, and their canonical gauge."""

import contextlib
import copy
import functools
import inspect
from dataclasses import replace

import peft
import peft.optimizers  # noqa: F401
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import sharpness
from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientMuon,
    QuotientSGD,
    create_quotient_lora_optimizer,
    create_quotient_optimizer,
)
from quotient_manifolds.passes import Wide
from quotient_manifolds.symmetries import (
    Cause,
    adapter_pairs,
    canonicalize_,
    find,
    lora_pairs_by_name,
    model_distance,
    move_,
    verify,
)
from quotient_manifolds.symmetries.found import certify
from quotient_manifolds.weights import weights_of
from tests.support.networks import shake
from tests.support.training import (
    X,
    Y,
    apart,
    lora,
    loss_of,
    moved,
    optimizer_of,
    point,
    products,
    train,
    trainable,
    trained,
)


class Words(nn.Module):
    """An embedding, a convolution and a linear layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 12)
        self.across = nn.Conv2d(1, 12, (1, 12))
        self.out = nn.Linear(12, 9)

    def forward(self, ids):
        return self.out(self.across(self.words(ids)[:, None]).mean(dim=(2, 3)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"out": 2}, "alpha_pattern": {"out": 3}},
        {"use_dora": True, "targets": ["across", "out"]},
        {"lora_bias": True, "targets": ["across", "out"]},
    ],
    ids=["plain", "rslora", "patterns", "dora", "bias"],
)
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_embeddings_convolutions_and_variants(options, kind):
    """peft starts embeddings with A = 0: the roles of the factors change there."""
    options = {"targets": ["words", "across", "out"], **options}
    targets = options.pop("targets")
    torch.manual_seed(0)
    net = shake(Words())
    one = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=targets, **options)).double()
    ids = torch.randint(11, (20, 5))
    labels = torch.arange(20) % 9
    two = moved(one)
    for model in (one, two):
        losses = []
        optimizer = create_quotient_lora_optimizer(
            model, lr=1e-2 if kind == "adam" else 0.05, optimizer=kind, weight_decay=0.01, max_grad_norm=1.0
        )
        for _ in range(15):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[1] < losses[0]
    assert apart(one, two) < 1e-8


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_fused_and_conv1d_targets():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8)).double()
    one = peft.get_peft_model(
        net, peft.LoraConfig(r=3, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    ).double()
    one.eval()  # without dropout
    two = moved(one)
    ids = torch.randint(20, (4, 8))
    for model in (one, two):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert apart(one, two) < 1e-6  # the library computes this loss in float32


def test_a_quantised_base_stays_as_it_is():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    net = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32), nn.Tanh(), nn.Linear(64, 9))
    net.is_loaded_in_4bit = True
    model = peft.get_peft_model(net.to("cpu"), peft.LoraConfig(r=4, target_modules=["0"]))
    base = model.base_model.model[0].get_base_layer().weight
    before = base.detach().clone()
    assert "bnb" in type(model.base_model.model[0]).__module__
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    x = torch.randn(48, 64)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - Y.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert base.dtype == torch.uint8
    assert torch.equal(base, before)


def test_adapters_switched_and_added_later():
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
    model.double()
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.requires_grad_(True)
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    alone = lora()
    train(alone, optimizer_of(alone, "adam"), 4, schedule=False)
    still = [point(p, model) for p in adapter_pairs(model, ["second"]).pairs]
    train(model, optimizer, 4, schedule=False)
    for p, q in zip(adapter_pairs(model, ["default"]).pairs, adapter_pairs(alone).pairs, strict=True):
        assert torch.allclose(point(p, model), point(q, alone), atol=1e-12)
    for p, before in zip(adapter_pairs(model, ["second"]).pairs, still, strict=True):
        assert torch.equal(point(p, model), before)
    model.set_adapter("second")
    optimizer.zero_grad()
    losses = train(model, optimizer, 4, schedule=False)
    assert losses[-1] < losses[0]
    model.add_adapter("third", peft.LoraConfig(r=2, target_modules=["0"]))
    model.set_adapter("third")
    model.double()
    optimizer.zero_grad()
    new = adapter_pairs(model, ["third"])
    optimizer.add_param_group({"params": [w for w in trained(model) if "third" in w[0]], "lr": 3e-2})
    optimizer.add_pairs(new)
    losses = train(model, optimizer, 6, schedule=False)
    assert losses[-1] < losses[0]


def test_groups_of_the_lora_optimiser():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 9))
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1", "2"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["0"]))
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:  # a second adapter freezes these too before peft 0.21
            p.requires_grad_(True)
    optimizer = create_quotient_lora_optimizer(
        model, lr=1e-3, weight_decay=0.1, other_params_lr=1e-4, adapter_names=["default"]
    )
    pairs, decayed, plain = optimizer.param_groups
    assert [(g["lr"], g["weight_decay"]) for g in (pairs, decayed, plain)] == [(1e-3, 0.1), (1e-4, 0.1), (1e-4, 0.0)]
    assert len(pairs["params"]) == 2
    assert [p.dim() for p in decayed["params"]] == [2]
    assert [p.dim() for p in plain["params"]] == [1, 1, 1]


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["1"]}], ids=str)
def test_of_other_adapters_nothing_is_trained(options):
    """Their magnitudes and biases were."""
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"], **options)
    model = peft.get_peft_model(net, config)
    model.add_adapter("second", config)
    for name, p in model.named_parameters():
        p.requires_grad_("default" in name or "second" in name)
    named = {p: name for name, p in model.named_parameters()}
    for chosen, other in (("default", "second"), ("second", "default")):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2, adapter_names=[chosen])
        names = [named[p] for group in optimizer.param_groups for p in group["params"]]
        own = [n for n, p in model.named_parameters() if p.requires_grad and f".{other}" not in n]
        assert sorted(names) == sorted(own)
        assert len(names) > 2


def test_adapters_that_form_no_pair_are_trained_by_adamw_and_named():
    """One narrow layer stopped the whole model, and grouped convolutions went to AdamW without a word."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 32), nn.Linear(32, 16))
    model = peft.get_peft_model(net, peft.LoraConfig(r=8, target_modules=["0", "2"]))
    with pytest.warns(UserWarning, match=r"AdamW trains 1 of 2 adapters.* a rank below 8 \('base_model.model.0 lora"):
        optimizer = create_quotient_lora_optimizer(model, lr=0.02, optimizer="muon")
    factors = [p for n, p in model.named_parameters() if "0.lora" in n]
    moments = []
    for _ in range(2):
        before = [p.detach().clone() for p in factors]
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moments.append([float((p.detach() - q).abs().max()) for p, q in zip(factors, before, strict=True)])
    assert 0 < max(moments[0]) < 1.1e-3  # the first step of AdamW has the size of its rate
    assert min(moments[1]) > 0


def without_pairs(what):
    """Two layers whose adapters form no pair, and 16 inputs."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(16, 8)
    options = {"r": 10 if what == "rank" else 2}
    if what == "grouped":
        net, x = nn.Sequential(*[nn.Conv2d(8, 8, 1, groups=2) for _ in range(2)]), x[..., None, None]
    elif what in ("mica", "orthogonal"):
        options["init_lora_weights"] = what
    elif what.endswith("Config"):
        more = {"BdLoraConfig": {"nblocks": 2, "target_modules_bd_a": ["0"], "target_modules_bd_b": ["1"]}}
        name = {"BdLoraConfig": "use_bdlora"}.get(what, f"{what.removesuffix('Config').lower()}_config")
        options[name] = getattr(peft, what)(**more.get(what, {"num_groups": 2} if "Velora" in what else {}))
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0", "1"], **options))
    for factors in [m.lora_A for m in model.modules() if hasattr(m, "lora_A")]:
        if what == "parametrised":
            nn.utils.parametrizations.weight_norm(factors["default"])
        if what == "pruned":
            prune.random_unstructured(factors["default"], "weight", 0.3)
    return model, x


@pytest.mark.filterwarnings("ignore:.*groups > 1")
@pytest.mark.parametrize(
    "what",
    ["KasaConfig", "BdLoraConfig", "MontecloraConfig", "VeloraConfig", "mica", "orthogonal", "rank", "grouped",
     "parametrised", "pruned"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_adamw_trains_models_of_which_no_adapter_forms_a_pair(kind, what):
    """They were refused."""
    torch.set_default_dtype(torch.float32)  # as MiCA and MonteCLoRA need it
    try:
        (model, x), (twin, _) = without_pairs(what), without_pairs(what)
    except (AttributeError, TypeError, ValueError) as error:  # newer than the oldest peft
        pytest.skip(str(error))
    with pytest.warns(UserWarning, match=r"AdamW trains 2 of 2 adapters, which form no pair: .*'base_model\.model\.0"):
        optimizer = create_quotient_lora_optimizer(model, lr=0.01 if kind == "adam" else 0.2, optimizer=kind)
    adamw = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    for m, o in ((model, optimizer), (twin, adamw)):
        torch.manual_seed(1)  # MonteCLoRA draws
        for _ in range(3):
            o.zero_grad()
            (m(x) - 1).square().mean().backward()
            o.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6), name
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_factors_above_one_width_train_invariantly(kind):
    """Rank 6 for three outputs, and for one: they were no pairs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, 1))
    config = peft.LoraConfig(r=6, target_modules=["2", "4"], rank_pattern={"4": 3}, init_lora_weights=False)
    one = peft.get_peft_model(net, config).double()
    two = copy.deepcopy(one)
    for p in adapter_pairs(two).pairs:
        assert p.thin
        x, h = point(p, two), p.group.h
        A = torch.randn(h, h, dtype=x.dtype) + 3 * torch.eye(h, dtype=x.dtype)
        p.scatter_(torch.cat([x[: p.n] @ torch.linalg.inv(A), x[p.n :] @ A.mT]), weights_of(two))
    x = torch.randn(16, 12, dtype=torch.float64)
    y = torch.sin(x[:, :1])
    assert torch.allclose(one(x), two(x), atol=1e-10)
    for model in (one, two):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2 if kind == "adam" else 5e-2, optimizer=kind)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert torch.allclose(one(x), two(x), atol=1e-8)


def test_a_run_from_an_orthogonal_start_resumes():
    """By then its factors have full rank, and would be pairs."""

    def start():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9))
        config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights="orthogonal")
        return peft.get_peft_model(net, config).double()

    straight, resumed = start(), start()
    with pytest.warns(UserWarning, match="AdamW trains 2 of 2"):
        optimizer = create_quotient_lora_optimizer(straight, lr=1e-2)
    train(straight, optimizer, 3, schedule=False)
    saved = optimizer.state_dict()
    resumed.load_state_dict(straight.state_dict())
    again = create_quotient_lora_optimizer(resumed, lr=1e-2)
    again.load_state_dict(saved)
    losses = [train(m, o, 5, schedule=False) for m, o in ((straight, optimizer), (resumed, again))]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def of_mixtral(full_rank=True, experts=4):
    """A model with adapters of its experts."""
    transformers = pytest.importorskip("transformers")
    if "target_parameters" not in inspect.signature(peft.LoraConfig).parameters:
        pytest.skip("this peft adapts no experts")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=61, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=experts,
    )  # fmt: skip
    config._experts_implementation = "eager"  # others have no float64
    places = ["experts.gate_up_proj", "experts.down_proj"]
    adapters = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=[], target_parameters=places, init_lora_weights=not full_rank
    )
    return peft.get_peft_model(transformers.MixtralForCausalLM(config), adapters).double()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("full_rank", [True, False], ids=["full-rank", "B=0"])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_experts_are_pairs_that_train_alike_from_equivalent_starts(kind, full_rank):
    """Each has factors of its own; they were refused, and trained by AdamW."""
    one = of_mixtral(full_rank)
    two = moved(one)
    ids = torch.randint(61, (3, 9))
    assert torch.allclose(one(input_ids=ids).logits, two(input_ids=ids).logits, atol=1e-10)
    assert len(adapter_pairs(one).pairs) == 8
    shapes = {
        (p.head, *sorted((p.n, p.m))) for p in adapter_pairs(one).pairs
    }  # rows and columns swapped places in PEFT 0.20
    assert shapes == {(e, *s) for e in range(4) for s in ((12, 16), (16, 24))}
    assert adapter_pairs(one).pairs[1].name.endswith("lora expert 1 default")
    for model in (one, two):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2, optimizer=kind, weight_decay=0.1, max_grad_norm=0.3)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            with Wide():  # the library rounds the weights of experts to float32
                logits = model(input_ids=ids).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
    assert apart(one, two) < 1e-8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_experts_without_tokens_wait_for_their_certificate(kind, monkeypatch):
    model = of_mixtral(experts=8)
    still = [point(p, model) for p in adapter_pairs(model).pairs]
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2, optimizer=kind)
    seen = []
    spy = lambda *args, **options: seen.append(0) or certify(*args, **options)  # noqa: E731
    monkeypatch.setattr("quotient_manifolds.optim.base.certify", spy)
    for _ in range(9):
        optimizer.zero_grad()
        model(input_ids=torch.tensor([[3]])).logits.square().mean().backward()  # two of eight experts
        optimizer.step()
    assert 0 < len(optimizer._uncertified) < 16
    assert len(seen) == 5  # steps 1, 2, 3, 5 and 9
    pairs = adapter_pairs(model).pairs
    moves = [p not in optimizer._uncertified for p in pairs]
    for p, before, moved_ in zip(pairs, still, moves, strict=True):
        G, H = point(p, model).split([p.n, p.m])
        product = before[: p.n] @ before[p.n :].mT
        assert torch.allclose(G @ H.mT, product, atol=1e-12) is not moved_


@pytest.mark.filterwarnings("ignore")
def test_the_sharpness_of_experts_does_not_depend_on_their_factors():
    one, ids = of_mixtral(), torch.randint(61, (3, 9))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(input_ids=batch).logits.flatten(0, 1), batch.flatten())

    found = [sharpness.evaluate(m, [ids], loss, rho=0.05, steps=3) for m in (one, moved(one, 10.0))]
    assert found[0].num_uncertified == 0
    assert 0 < float(found[0]) == pytest.approx(float(found[1]), rel=1e-7)


@pytest.mark.filterwarnings("ignore")
def test_experts_are_balanced_and_compared():
    model, ids = moved(of_mixtral()), torch.randint(61, (3, 9))
    before, other = model(input_ids=ids).logits, copy.deepcopy(model)
    assert len(canonicalize_(model, adapter_pairs(model)).pairs) == 8
    assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-10)
    found = model_distance(model, other)
    assert len(found.pairs) == 8
    assert found.total < 1e-6
    assert verify(model, {"input_ids": ids}).ok


@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.parametrize("layers", [("0",), ("0", "2")], ids=["one", "all"])
def test_the_other_half_of_an_adapter_is_trained_by_adamw(layers, kind):
    """As in LoRA-FA, which freezes A; it was refused."""
    model = lora(full_rank=False)
    for name in layers:
        model.base_model.model[int(name)].lora_A["default"].weight.requires_grad_(False)
    kept = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=rf"AdamW trains {len(layers)} of 2 adapters, .*frozen: .*weight.*'base_model"):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2, optimizer=kind)
    losses = train(model, optimizer, 10, schedule=False)
    assert losses[-1] < losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, kept[name]) is not p.requires_grad, name


def test_the_other_half_of_an_attention_head_is_trained_by_adamw():
    """Values without outputs, which lie in one parameter with the queries and keys."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn.out_proj.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="AdamW trains 2 of 4 parts of the model, which form no pair: frozen"):
        optimizer = create_quotient_optimizer(layer, lr=1e-2)
    assert len(optimizer.state_dict()["pairs"]) == 2
    before = layer.self_attn.in_proj_weight.detach().clone()
    layer(torch.randn(2, 3, 8)).square()[..., 0].sum().backward()
    optimizer.step()
    assert bool((layer.self_attn.in_proj_weight != before).any(1).all())


class Kohya(nn.Module):
    """A layer of other scripts, with the factors as layers or as parameters."""

    def __init__(self, base, r, layers, alpha=6):
        super().__init__()
        n, m = base.weight.shape
        self.base, self.scale, self.layers = base.requires_grad_(False), alpha / r, layers
        if layers:
            self.lora_down, self.lora_up = nn.Linear(m, r, bias=False), nn.Linear(r, n, bias=False)
        else:  # x A B
            self.lora_down, self.lora_up = nn.Parameter(torch.randn(m, r)), nn.Parameter(torch.randn(r, n))

    def forward(self, x):
        added = self.lora_up(self.lora_down(x)) if self.layers else x @ self.lora_down @ self.lora_up
        return self.base(x) + self.scale * added


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_adapters_that_are_not_pefts_train_alike(kind, layers):
    torch.manual_seed(0)
    one = nn.Sequential(Kohya(nn.Linear(12, 12), 4, layers), nn.Tanh(), Kohya(nn.Linear(12, 9), 2, layers)).double()
    two = copy.deepcopy(one)
    pairs = lora_pairs_by_name(one).pairs
    assert [(p.name, p.n, p.m, p.group.h, p.scale) for p in pairs] == [("0", 12, 12, 4, 1.5), ("2", 9, 12, 2, 3.0)]
    assert [p.scale for p in lora_pairs_by_name(one, scale=0.5).pairs] == [0.5, 0.5]
    move_(two, lora_pairs_by_name(two), condition=100.0)
    assert torch.allclose(one(X), two(X), atol=1e-10)
    for model in (one, two):
        optimizer = create_quotient_optimizer(model, lr=1e-2, optimizer=kind, symmetries=lora_pairs_by_name(model))
        losses = train(model, optimizer, 30)
        assert losses[-1] < losses[0]
    assert torch.allclose(one(X), two(X), atol=1e-8)
    with pytest.raises(ValueError, match="no module has factors that are called 'down' and 'lora_up'"):
        lora_pairs_by_name(one, "down")


def test_factors_of_other_scripts_that_form_no_pair():
    """Those of fused layers, as loralib stacks them, and convolutions."""
    conv = nn.ModuleDict({"lora_down": nn.Conv2d(3, 2, 3), "lora_up": nn.Conv2d(2, 5, 1)})
    fused = nn.ModuleDict({"lora_down": nn.Linear(6, 4), "lora_up": nn.Linear(2, 12)})
    found = lora_pairs_by_name(nn.ModuleList([conv, fused]))
    (convolution,), (refused,) = found.pairs, found.refused
    assert (convolution.group.h, convolution.n, convolution.m) == (2, 5, 27)
    assert refused.reason == "lora_up.weight and lora_down.weight have no dimension in common"
    assert lora_pairs_by_name(conv).restricted(["lora_down.weight"]).refused[0].cause is Cause.FROZEN


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_unknown_attention_is_trained_as_its_message_says():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=61, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).float()
    ids = torch.randint(61, (2, 9))
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(ValueError, match=r"\(MixtralAttention\) .*: pass symmetries=") as refused:
        create_quotient_optimizer(model, lr=1e-3)
    advice = str(refused.value).partition("pass symmetries=")[2]
    symmetries = eval(advice, {"find": find, "model": model, "batch": batch})
    optimizer = create_quotient_optimizer(model, lr=1e-2, symmetries=symmetries)
    assert {p.kind for p in symmetries.pairs} == {"qk", "vo"}
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    both = nn.ModuleDict({"known": nn.MultiheadAttention(8, 2), "unknown": model})
    with pytest.warns(UserWarning, match=r"AdamW trains parts of the model: .*\(MixtralAttention\)"):
        create_quotient_optimizer(both, lr=1e-3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    names = create_quotient_optimizer(adapted, lr=1e-3).state_dict()[
        "pairs"
    ]  # of the attention nothing else is trained
    assert len(names) == 2
    assert all("lora" in name for name in names)


def computed_output(attention):
    nn.utils.parametrizations.weight_norm(attention.out_proj)


def computed_inputs(attention):
    nn.utils.parametrizations.orthogonal(attention, "in_proj_weight")


def pruned_inputs(attention):
    prune.random_unstructured(attention, "in_proj_weight", 0.3)


@pytest.mark.parametrize("change", [computed_output, computed_inputs, pruned_inputs])
def test_attention_that_is_parametrised_is_named(change):
    """AdamW trained it without a word."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layers = nn.ModuleList([layer, copy.deepcopy(layer)])
    change(layers[1].self_attn)
    with pytest.warns(UserWarning, match=r"AdamW trains \d of \d parts of the model, which.*'1\.self_attn"):
        create_quotient_optimizer(layers, lr=1e-2)
    with pytest.raises(ValueError, match=r"no pair \(G, H\) is among the parameters \(.*'self_attn"):
        QuotientAdam(layers[1].named_parameters(), replace(find(layers[1]), pairs=()))


def test_factors_without_shape_or_values_are_named():
    def model(**options):
        config = peft.LoraConfig(r=2, target_modules=["0"])
        return peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), config, **options)

    with pytest.raises(
        ValueError, match=r"'base_model\.model\.0 lora default' is on the meta device; load its weights"
    ):
        create_quotient_lora_optimizer(model(low_cpu_mem_usage=True), lr=1e-3)
    broken = model()
    broken.base_model.model[0].lora_A["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"'base_model\.model\.0 lora default' has NaN or infinite entries; load intact"
    ):
        create_quotient_lora_optimizer(broken, lr=1e-3)
    flat = model()
    for factors in (flat.base_model.model[0].lora_A, flat.base_model.model[0].lora_B):
        factors["default"].weight = nn.Parameter(torch.empty(0))  # what a rank of FSDP1 may see
    with pytest.raises(ValueError, match=r"adapter 'default' in Linear are no matrices, as FSDP1.*use DDP"):
        create_quotient_lora_optimizer(flat, lr=1e-3)


@pytest.mark.parametrize(("make", "rate"), [(QuotientAdam, 0.02), (QuotientMuon, 0.001)])
def test_groups_of_a_trainer_train_the_classifier_at_its_own_rate(make, rate):
    """By ``optimizer_cls_and_kwargs``, weights with decay and without form two groups; .02 is a rate of pairs alone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 9))
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1", "2"])).double()
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if (p.dim() > 1) is decays], "weight_decay": 0.0} for decays in (True, False)
    ]
    optimizer = make(groups, symmetries=adapter_pairs(model), within=model, lr=0.02)
    head = model.base_model.model[2].modules_to_save["default"]
    other = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("other", other)], "lr": 0.3})
    before = [p.detach().clone() for p in head.parameters()]
    (train_loss := (model(X) - Y).square().mean()).backward()
    other.grad = torch.ones(2)
    optimizer.step()
    assert train_loss > 0
    for p, q in zip(head.parameters(), before, strict=True):
        assert float((p.detach() - q).abs().max()) == pytest.approx(rate, rel=1e-3)
    assert float(1 - other.detach().min()) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.filterwarnings("ignore:`is_gradient:FutureWarning")
def test_tied_adapters_take_the_steps_of_both_places():
    """peft gives the head a transposed view of the embedding's factors; what was written last replaced the rest."""
    if "ensure_weight_tying" not in inspect.signature(peft.LoraConfig).parameters:
        pytest.skip("this peft does not tie adapters")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True,
                               init_lora_weights=False, task_type="CAUSAL_LM")  # fmt: skip
    x = torch.arange(24).reshape(2, 12)
    steps = []
    for places in (("embed",), ("lm_head",), ("embed", "lm_head")):
        torch.manual_seed(0)
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
        with pytest.warns(UserWarning, match="AdamW trains 2 of 3 adapters.*shared or overlapping memory"):
            optimizer = create_quotient_lora_optimizer(model, lr=1e-2, optimizer="muon")
        factor = next(p for n, p in model.named_parameters() if "lora_embedding_B" in n)
        before = factor.detach().clone()
        model(input_ids=x, labels=x).loss.backward()
        for name, p in model.named_parameters():
            if not any(place in name for place in places):
                p.grad = None
        optimizer.step()
        steps.append(factor.detach() - before)
    assert torch.allclose(steps[2], steps[0] + steps[1], atol=1e-6)
    assert all(float(s.norm()) > 1e-4 for s in steps)


def test_other_adapters_are_named():
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["0"], feedforward_modules=["0"])
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), config)
    with pytest.raises(ValueError, match="its adapters are of the kind IA3, whose weights form no such pair"):
        create_quotient_lora_optimizer(model, lr=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_entries_outside_pairs_have_the_rate_of_other_parameters(optimizer):
    """If V and O alone are pairs, Q and K share a parameter with V: they had the rate of the pairs, and decayed."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    rates = {"lr": 0.02, "other_params_lr": 1e-4}
    values = find(layer).of_kind(["vo"])
    made = create_quotient_optimizer(layer, symmetries=values, optimizer=optimizer, weight_decay=0.5, **rates)
    weight, bias = layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias
    bias.data.fill_(1.0)
    before = weight.detach().clone(), bias.detach().clone(), layer.linear1.weight.detach().clone()
    (layer(torch.randn(4, 5, 8)) * torch.randn(4, 5, 8)).sum().backward()
    key_bias = bias.grad[8:16].clone()
    made.step()
    for old, new in zip(before, (weight, bias, layer.linear1.weight), strict=True):
        moved = (new.detach() - old)[: 8 if new.dim() == 1 else 16].abs()
        assert 0.5e-4 < float(moved.max()) < 1.3e-4
    assert not key_bias.isnan().any()
    assert float((weight.detach() - before[0])[16:].abs().max()) > 1e-3


def test_frozen_adapters_are_called_frozen():
    model = lora()
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="its LoRA adapters are frozen; load them with is_trainable=True"):
        create_quotient_lora_optimizer(model, lr=1e-3)


def test_magnitudes_of_convolutions_do_not_decay():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 1))  # a matrix of one row decays
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"], use_dora=True, modules_to_save=["2"]))
    optimizer = create_quotient_lora_optimizer(model, lr=1e-3, weight_decay=0.1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    trained = {name: (p, decays[id(p)]) for name, p in model.named_parameters() if p.requires_grad}
    (magnitude,) = (name for name in trained if "magnitude" in name)
    assert trained[magnitude][0].shape == (1, 8, 1, 1)
    assert trained[magnitude][1] == 0.0
    assert [decay for name, (p, decay) in trained.items() if "2.modules_to_save" in name and p.dim() == 2] == [0.1]


CONFIG = peft.LoraConfig(r=4, target_modules=["0", "2"])


def added_again(model):
    model.add_adapter("other", CONFIG)
    model.set_adapter("other")
    model.delete_adapter("default")
    model.add_adapter("default", CONFIG)
    model.set_adapter("default")
    return model


def redistributed(model):
    """As EVA does with ranks, in one of two layers."""
    layer = model.base_model.model[2]
    layer.update_layer("default", 2, lora_alpha=8, config=model.peft_config["default"])
    return model


def deleted(model):
    model.delete_adapter("default")
    return model


def head_replaced(model):
    """A module that PEFT trains as a whole."""
    model.base_model.model[4].modules_to_save["default"] = nn.Linear(9, 9)
    return model


CHANGES = {
    "delete_adapter, add_adapter": added_again,
    "ranks": redistributed,
    "delete_adapter": deleted,
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "merge_and_unload, get_peft_model": lambda model: peft.get_peft_model(model.merge_and_unload(), CONFIG),
    "unload, get_peft_model": lambda model: peft.get_peft_model(model.unload(), CONFIG),
    "unload, another name": lambda model: peft.get_peft_model(model.unload(), CONFIG, adapter_name="new"),
    "modules_to_save": head_replaced,
}


def with_head(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 9))
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], modules_to_save=["4"], **options)
    return peft.get_peft_model(net, config).double()


def by_hand(model):
    return QuotientAdam(trained(model), adapter_pairs(model), 1e-2, within=model)


@pytest.mark.parametrize("steps", [0, 2])  # old gradients stay where a new model's zero_grad does not reach
@pytest.mark.parametrize("make", [lambda m: create_quotient_lora_optimizer(m, lr=1e-2), by_hand], ids=["made", "hand"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_have_left_the_model_are_named(change, make, steps):
    """In each of these the step did nothing, or moved what no output depends on."""
    model = with_head()
    optimizer = make(model)
    train(model, optimizer, steps, schedule=False)
    if not steps:
        optimizer.zero_grad()
    model = CHANGES[change](model).double()
    if any(p.requires_grad for p in model.parameters()):
        loss_of(model).backward()
    before = [p.detach().clone() for p in model.parameters()]
    place = "modules_to_save" if change == "modules_to_save" else "lora_[AB]"
    with pytest.raises(ValueError, match=rf"'base_model\.model\..*{place}.* have been replaced or deleted since this"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.skipif(not hasattr(peft, "KasaConfig"), reason="this peft has no KaSA")
def test_adapters_without_a_pair_are_looked_for_too():
    model = with_head(kasa_config=peft.KasaConfig())
    with pytest.warns(UserWarning, match="AdamW trains 2 of 2 adapters"):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    model = peft.get_peft_model(model.unload(), CONFIG).double()
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"lora_A.* have been replaced or deleted"):
        optimizer.step()


def hotswapped(model, folder):
    hotswap = pytest.importorskip("peft.utils.hotswap")
    lora(lora_alpha=40).save_pretrained(folder)
    hotswap.hotswap_adapter(model, folder, adapter_name="default")


def layers_of(model):
    return [m for m in model.modules() if hasattr(m, "set_scale")]


@pytest.mark.parametrize("change", [
    hotswapped,
    lambda model, _: [m.set_scale("default", 3.0) for m in layers_of(model)],
    lambda model, _: layers_of(model)[1].scale_layer(3.0),
], ids=["hotswap_adapter", "set_scale", "scale_layer"])  # fmt: skip
def test_changed_scales_need_a_new_optimiser(change, tmp_path):
    """Steps of the adapted weights were longer by the ratio of the scales."""
    model = lora()
    pairs = adapter_pairs(model)
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    change(model, tmp_path)
    loss_of(model).backward()
    before = [p.detach().clone() for p in model.parameters()]
    for stale in (optimizer, QuotientAdam(trained(model), pairs, 1e-2, within=model)):
        with pytest.raises(ValueError, match=r"adapter 'default' has the scale \S+, but its pair has 2: hotswap"):
            stale.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    by_hand(model).step()
    for m in layers_of(model):
        m.scaling["default"] = 2.0  # it may change between two steps
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_the_state_follows_a_model_to_another_dtype(kind, dtype):
    """Weights in double precision were rounded to single at every step; moments of AdamW ended in an error."""
    model = with_head().float()
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2, optimizer=kind)
    train(model, optimizer, 2, schedule=False)
    twin = copy.deepcopy(model).to(dtype)
    resumed = create_quotient_lora_optimizer(twin, lr=1e-2, optimizer=kind)
    resumed.load_state_dict(optimizer.state_dict())
    model.to(dtype)
    for m, o in ((model, optimizer), (twin, resumed)):
        o.zero_grad()
        train(m, o, 3, schedule=False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert {s["state"]["moment G"].dtype for s in optimizer.state_dict()["stacks"]} == {wanted}
    if dtype == torch.float64:
        assert all(bool((p != p.float()).any()) for p in trainable(model))


def test_a_zero_row_under_dora_is_named():
    """DoRA divides by its norm; the advice was about learning rates and square roots."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 3))
    net[0].weight.data[2] = 0
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "1"], use_dora=True))
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    words = r"; DoRA \(adapter 'default'\) divides by the norm of a row of 'base_model.model.0', and one is 0; leave"
    model(X).square().mean().backward()
    with pytest.raises(ValueError, match=f"NaN or infinite entries; no weight was changed{words}"):
        optimizer.step()
    for measure in ("euclidean", "geodesic-inv"):
        with pytest.raises(ValueError, match=f"loss of batch 0 is nan{words}"):
            sharpness.evaluate(model, [X], lambda m, x: m(x).square().mean(), measure=measure)


def test_clipping_the_gradients_of_factors_breaks_what_that_of_the_optimiser_keeps():
    """As the Trainer does by default, of which the docs warn."""
    far = []
    for outside in (False, True):
        one = lora()
        two = moved(one)
        for model in (one, two):
            optimizer = optimizer_of(model, "sgd", max_grad_norm=None if outside else 0.1)
            for _ in range(4):
                optimizer.zero_grad()
                loss_of(model).backward()
                if outside:
                    nn.utils.clip_grad_norm_(trainable(model), 0.1)
                optimizer.step()
        far.append(apart(one, two))
    assert far[0] < 1e-8 < 1e-4 < far[1]


class Around(nn.Module):
    """What a library may put around a layer, after the optimiser was made."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_parameters_that_stay_may_move_within_the_model():
    one, two = lora(), lora()
    optimizers = [create_quotient_lora_optimizer(m, lr=1e-2) for m in (one, two)]
    inner = two.base_model.model
    inner[0] = Around(inner[0])
    for model, optimizer in zip((one, two), optimizers, strict=True):
        train(model, optimizer, 3, schedule=False)
    assert apart(one, two) == 0
    inner[0] = nn.Linear(12, 20).double()
    with pytest.raises(ValueError, match=r"'base_model\.model\.0\.lora_A.* 1 other parameters of the model have"):
        optimizers[1].step()


def test_an_optimiser_without_its_model_says_nothing_of_it():
    """A copy of the optimiser alone belongs to a copy of the model, and steps as before."""
    model = lora()
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    train(model, optimizer, 2, schedule=False)
    again = copy.deepcopy(optimizer)
    again.step()


def test_a_step_of_merged_adapters_is_refused():
    """It would not reach the outputs, and unmerging would then take away another product than was added."""
    model = lora()
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    loss_of(model).backward()
    outputs = model(X)
    model.merge_adapter()
    with pytest.raises(ValueError, match="adapter 'default' is merged into the base weights"):
        optimizer.step()
    model.unmerge_adapter()
    assert torch.allclose(model(X), outputs)
    optimizer.step()
    assert not torch.allclose(model(X), outputs)


def compiled(model):
    return torch.compile(model, backend="eager")  # importing the default one warns with some versions of torch


@pytest.mark.parametrize("wrap", [lambda m: m, compiled, nn.DataParallel], ids=["plain", "compiled", "wrapped"])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_wrapped_models_are_walked_too(wrap, kind):
    model = lora()
    optimizer = optimizer_of(model, kind, symmetries=adapter_pairs(model), within=wrap(model))
    train(model, optimizer, 2, schedule=False)
    added_again(model)
    with contextlib.suppress(RuntimeError):
        loss_of(model.double()).backward()
    with pytest.raises(ValueError, match="have been replaced"):
        optimizer.step()


def test_balancing_keeps_the_function_and_evens_the_factors():
    model = moved(lora())
    before = model(X)
    assert len(canonicalize_(model, adapter_pairs(model)).pairs) == 2
    assert torch.allclose(model(X), before, atol=1e-10)
    for p in adapter_pairs(model).pairs:
        G, H = point(p, model).split([p.n, p.m])
        M, N = G.T @ G, H.T @ H
        assert torch.allclose(M, N, atol=1e-10)
        assert torch.allclose(M, torch.diag(torch.diag(M)), atol=1e-10)


def test_balancing_leaves_a_fresh_adapter_alone():
    model = lora(full_rank=False)
    before = copy.deepcopy(model.state_dict())
    found = canonicalize_(model, adapter_pairs(model))
    assert not found.pairs
    assert {r.cause for r in found.refused} == {Cause.DEFICIENT}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_adapters_loaded_for_inference_are_balanced():
    model, frozen = moved(lora()), moved(lora())
    frozen.requires_grad_(False)  # as PEFT loads them
    assert canonicalize_(frozen, adapter_pairs(frozen)) == canonicalize_(model, adapter_pairs(model))
    assert all(torch.equal(v, frozen.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("kind", [QuotientAdam, QuotientMuon, QuotientSGD])
@pytest.mark.parametrize("dead", [[3], [0, 3]])
def test_directions_of_zeros_stay_while_the_others_are_trained_as_alone(kind, dead):
    """Scales are 1; the smaller adapter has the other rows of A and columns of B."""
    alive = [i for i in range(4) if i not in dead]
    padded, small = lora(r=4, lora_alpha=4), lora(r=len(alive), lora_alpha=len(alive))
    with torch.no_grad():
        for (_, p), (_, q) in zip(padded.named_parameters(), small.named_parameters(), strict=True):
            if p.shape != q.shape:
                rows = p.shape[0] == 4
                q.copy_(p[alive] if rows else p[:, alive])
                p[dead if rows else slice(None), slice(None) if rows else dead] = 0
    made = functools.partial(kind, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    with pytest.warns(UserWarning, match="2 adapters have directions in which both factors are 0, which stay so"):
        of_padded = made(trained(padded), adapter_pairs(padded))
    of_small = made(trained(small), adapter_pairs(small))
    assert f"2 adapters of rank {len(alive)} on the quotient" in repr(of_padded)
    before = products(small)
    for model, optimizer in ((padded, of_padded), (small, of_small)):
        train_steps(model, optimizer)
    assert apart(padded, small) < 1e-8
    assert min(float((a - b).norm()) for a, b in zip(products(small), before, strict=True)) > 1e-3
    for p in adapter_pairs(padded).pairs:
        assert not point(p, padded)[:, dead].any()
    again = torch.optim.AdamW([p for p in small.parameters() if p.requires_grad], lr=1e-2)
    train_steps(small, again)
    train_steps(padded, of_padded)
    assert apart(padded, small) > 1e-4, "AdamW takes other steps"


def train_steps(model, optimizer, steps=6):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

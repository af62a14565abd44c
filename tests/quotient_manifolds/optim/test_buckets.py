"""Which pairs an optimiser takes, and which it refuses."""

import copy

import peft
import peft.optimizers
import pytest
import torch
from torch import nn

from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientSGD,
    canonicalize_lora_,
    create_quotient_lora_optimizer,
    create_quotient_optimizer,
    stacked,
)
from quotient_manifolds.optim.metric import Metric
from quotient_manifolds.symmetries import (
    adapter_pairs,
    find_symmetric_pairs,
)

from ...networks import bert
from ...training import (
    apart,
    lora,
    loss_of,
    moved,
    optimizer_of,
    train,
    trainable,
)


def test_bad_input():
    model = lora()
    params = trainable(model)
    with pytest.raises(ValueError, match="no pair"):
        QuotientAdam(params, [])
    with pytest.raises(ValueError, match="no LoRA adapter of peft with two trainable factors"):
        create_quotient_lora_optimizer(nn.Linear(2, 2), lr=1e-3)
    with pytest.raises(ValueError, match="no layer has an adapter 'nobody'; there are default"):
        create_quotient_lora_optimizer(model, lr=1e-3, adapter_names=["nobody"])
    with pytest.raises(ValueError, match="split over the parameter groups"):
        QuotientAdam([{"params": params[:1]}, {"params": params[1:]}], find_symmetric_pairs(model))
    with pytest.raises(ValueError, match="is not among the optimiser's parameters"):
        QuotientAdam(params[1:], find_symmetric_pairs(model))
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        QuotientSGD(params, find_symmetric_pairs(model), max_grad_norm=0)
    with torch.no_grad():
        params[0].zero_()
        params[1].zero_()
    with pytest.raises(ValueError, match="both factors lack full column rank"):
        QuotientAdam(params, find_symmetric_pairs(model))
    half = lora()
    trainable(half)[0].requires_grad_(False)
    with pytest.raises(ValueError, match="half frozen"):
        create_quotient_lora_optimizer(half, lr=1e-3)


def test_groups_and_pairs_given_twice():
    model = lora()
    pairs = find_symmetric_pairs(model)
    optimizer = QuotientAdam(trainable(model), [*pairs, *adapter_pairs(model)])
    assert len(optimizer.state_dict()["pairs"]) == len(pairs)
    extra = lora(targets=("0",))
    with pytest.raises(ValueError, match="max_grad_norm clips all groups together"):
        optimizer.add_param_group({"params": trainable(extra), "max_grad_norm": 1.0})
    for _ in range(2):  # a refused group leaves nothing behind
        with pytest.raises(ValueError, match="is not among the optimiser's parameters"):
            optimizer.add_param_group({"params": trainable(extra)[:1], "pairs": find_symmetric_pairs(extra)})
    optimizer.add_param_group({"params": trainable(extra), "pairs": find_symmetric_pairs(extra)})
    assert create_quotient_lora_optimizer(model, lr=1e-3, adapter_names="default") is not None
    wide = lora(r=11)  # more columns than the second layer has outputs
    assert canonicalize_lora_(wide) == [p.name for p in find_symmetric_pairs(wide) if p.n >= 11]


def test_half_a_gradient_is_an_error():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    loss_of(model).backward()
    trainable(model)[0].grad = None
    with pytest.raises(ValueError, match="has no gradient but the rest of the pair has"):
        optimizer.step()


def test_sharded_parameters_are_refused():
    model = lora()
    trainable(model)[0]._is_flat_param = True
    with pytest.raises(ValueError, match="sharded parameter"):
        create_quotient_lora_optimizer(model, lr=1e-3)


def test_weights_replaced_by_ones_of_lower_rank():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    with torch.no_grad():
        for p in adapter_pairs(model):
            p.H[0].tensor.zero_()
    before = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"second factor has lost full rank .*; no weight was changed"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_lora_on_attention():
    """Its factors are rows of a frozen pair of the attention layer; that is no half of a pair."""
    torch.manual_seed(0)
    one = peft.get_peft_model(bert(), peft.LoraConfig(r=3, target_modules=["query", "value"])).double().eval()
    two = moved(one)
    ids, labels = torch.randint(20, (6, 7)), torch.arange(6) % 3
    for model in (one, two):
        optimizer = create_quotient_optimizer(model, lr=1e-2)
        assert len(optimizer.state_dict()["pairs"]) == 4
        QuotientAdam(trainable(model), find_symmetric_pairs(model))
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(input_ids=ids).logits, labels).backward()
            optimizer.step()
    assert apart(one, two) < 1e-8


@pytest.mark.filterwarnings("ignore")
def test_one_factor_for_several_experts_is_no_pair():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 6, 5))

        def forward(self, x):
            return torch.einsum("bi,eoi->bo", x, self.weight)

    net = nn.Sequential(Experts(), nn.Conv2d(4, 6, 1, groups=2))
    try:
        config = peft.LoraConfig(r=4, target_modules=["1"], target_parameters=["0.weight"], init_lora_weights=False)
        model = peft.get_peft_model(net, config)
    except TypeError:
        pytest.skip("this peft has no target_parameters")
    found = adapter_pairs(model)
    assert all(p.group is None for p in found)
    reasons = {"the factors of its experts are stacked in two matrices", "a grouped convolution"}
    assert {p.reason for p in found} <= reasons
    assert any("experts" in p.reason for p in found)


@pytest.mark.parametrize("most", [1, 120, 10**9])
@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_parts_do_not_matter(kind, most, monkeypatch):
    """Pairs may be stepped one by one or joined; what is theirs lies in the same state."""
    ends = []
    for size in (2**16, most):
        monkeypatch.setattr(stacked, "_IN_CACHE", size)
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)], nn.Linear(12, 9))
        model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0", "1", "2"], init_lora_weights=False))
        train(model.double(), optimizer_of(model, kind), 5, schedule=False)
        ends.append(model)
    assert apart(*ends) < 1e-12


def test_numbers_of_a_bucket_lie_on_its_device():
    """Several may hold one model; the answer whether to step lies on the first."""
    model = lora(full_rank=True).to("meta")
    found = [p for p in adapter_pairs(model) if p.group is not None]
    bucket = stacked.Bucket(found[:1], [0], False, 0)
    for p in trainable(model):
        p.grad = torch.empty_like(p)
    gradients = {p: p.grad for p in trainable(model)}
    step = stacked.Step(bucket, [True], gradients, lambda bucket, M, N: Metric(M, N))
    step.clip = torch.tensor(0.5)
    step.restrict(torch.tensor(True, device="meta"))
    for part in step.parts:
        for t in (step.only(step.x(part), step.g(part), part), part.of(step.only(step.metric.inverse_roots, 0))):
            assert t.device.type == "meta"


def test_scales_that_have_become_different_are_refused():
    """Pairs of one scale share a bucket, whose metric depends on it."""

    def optimizer(**options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["0", "2"], init_lora_weights=False, **options)
        return create_quotient_lora_optimizer(peft.get_peft_model(net, config), lr=1e-3)

    saved = optimizer().state_dict()
    optimizer().load_state_dict(saved)
    with pytest.raises(ValueError, match="pairs that had one scale have several now; set lora_alpha"):
        optimizer(alpha_pattern={"2": 160}).load_state_dict(saved)

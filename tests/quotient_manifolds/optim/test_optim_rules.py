"""The rules on one pair, without any optimiser, against their definitions; and what trains parameters outside pairs."""

import copy
import io

import pytest
import torch
from torch import nn

from quotient_manifolds.optim import QuotientAdam, QuotientMuon, QuotientOptimizer, QuotientSGD, rules
from quotient_manifolds.optim.metric import Gradient, StepMetric
from quotient_manifolds.symmetries import adapter_pairs, factor_pair
from tests.quotient_manifolds.optim.test_optim_laws import exact_inverse_root, polar, root
from tests.support.training import lora, loss_of, train, trained

SCALE, LR = 1.7, 0.05
OPTIONS = {"adam": {"betas": (0.8, 0.95), "eps": 1e-3}, "muon": {"momentum": 0.7}, "sgd": {"momentum": 0.6}}
RULES = {"adam": rules.adam, "muon": rules.muon, "sgd": rules.sgd}


def metric_of(kind, M, N):
    """The metric of a rule at one pair, by its Gram matrices."""
    if kind == "muon":
        return rules.muon_metric(M[None], N[None], SCALE, lr=LR, **OPTIONS["muon"])
    return StepMetric(M[None], N[None], SCALE)


def moved(rule, kind, G, H, gradients):
    """The vectors of both factors after several gradients at one point, and the last state."""
    rows = [torch.zeros(1, *X.shape) for X in (G, H)]
    state = rules.adam_state(rows) if kind == "adam" else rules.moments(rows)
    for g in gradients:
        update, state = rule(
            metric_of(kind, G.mT @ G, H.mT @ H), Gradient([x[None].clone() for x in g]).read(), state, **OPTIONS[kind]
        )
    parts = zip(update.rows, update.matrices.unbind(1), strict=True)
    return [update.factor * (d @ A)[0] for d, A in parts], state


def example(seed=0):
    """Factors of 9 and 7 rows, and four gradients of each."""
    torch.manual_seed(seed)
    G, H = torch.randn(9, 3), torch.randn(7, 3)
    return G, H, [(torch.randn(9, 3), torch.randn(7, 3)) for _ in range(4)]


def weights_of_metric(G, H, delta=1.0):
    """W of G and of H, from the definition: the change of the product, with a ridge for H."""
    M, N = G.mT @ G, H.mT @ H
    return SCALE**2 * N, SCALE**2 * M + delta * torch.linalg.inv(N)


def sgd_oracle(G, H, gradients):
    m = [torch.zeros_like(G), torch.zeros_like(H)]
    for g in gradients:
        m = [0.6 * a + b for a, b in zip(m, g, strict=True)]
    return [a @ torch.linalg.inv(W) for a, W in zip(m, weights_of_metric(G, H), strict=True)]


def muon_oracle(G, H, gradients):
    m = [torch.zeros_like(G), torch.zeros_like(H)]
    for g in gradients:
        m = [0.7 * a + 0.3 * b for a, b in zip(m, g, strict=True)]
    u = [0.3 * b + 0.7 * a for a, b in zip(m, gradients[-1], strict=True)]
    M, N = G.mT @ G, H.mT @ H
    delta = (LR / (4 * 0.3)) ** 2 + 1e-6 * SCALE**2 * torch.trace(M @ N)
    W_G, ridge = weights_of_metric(G, H, delta)
    inverse = torch.linalg.inv(ridge)
    W_H = torch.linalg.inv(inverse @ (SCALE**2 * M) @ inverse)  # F Fᴴ is its inverse
    return [0.5 * polar(a @ root(W)) @ root(W) for a, W in ((u[0], W_G), (u[1], W_H))]


def adam_oracle(G, H, gradients):
    found = []
    for k, W in enumerate(weights_of_metric(G, H)):
        K_inv = root(W)
        m, C, r = torch.zeros_like((G, H)[k]), torch.zeros(3, 3), torch.zeros(len((G, H)[k]), 1)
        for t, g in enumerate((g[k] for g in gradients), 1):
            x = g @ K_inv
            m, C = 0.8 * m + 0.2 * x, 0.95 * C + 0.05 * x.mT @ x / len(x)
            R = exact_inverse_root(C / (1 - 0.95**t))
            r = 0.95 * r + 0.05 * (x @ R).square().mean(1, keepdim=True)
        d = (m / (1 - 0.8**t)) @ R / ((r / (1 - 0.95**t)).sqrt() + 1e-3)
        found.append((8 / 3) ** 0.5 * d @ K_inv)
    return found


ORACLES = {"adam": adam_oracle, "muon": muon_oracle, "sgd": sgd_oracle}


def error(found, wanted):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def transposed(metric, g, state, **options):
    """A gradient in the wrong basis, though multiplied by a matrix of the right norm."""
    K_inv = metric.inverse_roots
    return rules.Update(g.rows, K_inv @ K_inv.mH), state


def plain(metric, g, state, **options):
    """A gradient that is taken as it is, as AdamW and SGD do."""
    return rules.Update(g.rows, metric.eye.expand_as(metric.inverse_roots)), state


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_is_its_definition(kind):
    G, H, gradients = example()
    wanted = ORACLES[kind](G, H, gradients)
    assert error(moved(RULES[kind], kind, G, H, gradients)[0], wanted) < 1e-8
    for wrong in (transposed, plain):
        assert error(moved(wrong, kind, G, H, gradients)[0], wanted) > 1e-2


def invariance_error(rule, kind):
    """By how much vectors from G A⁻¹, H Aᵀ differ from those from G, H, which the group moves along."""
    G, H, gradients = example()
    A = torch.randn(3, 3)
    A_inv = torch.linalg.inv(A)
    one, _ = moved(rule, kind, G, H, gradients)
    two, _ = moved(rule, kind, G @ A_inv, H @ A.mT, [(a @ A.mT, b @ A_inv) for a, b in gradients])
    return error(two, (one[0] @ A_inv, one[1] @ A.mT))


@pytest.mark.parametrize("kind", RULES)
def test_a_vector_moves_along_with_its_factors(kind):
    assert invariance_error(RULES[kind], kind) < 1e-8
    for wrong in (transposed, plain):
        assert invariance_error(wrong, kind) > 1e-2


@pytest.mark.parametrize("kind", RULES)
def test_a_point_that_waits_keeps_its_state(kind):
    """Moments are written in place, where only averages may be."""
    G, H, gradients = example()
    _, state = moved(RULES[kind], kind, G, H, gradients)
    before = {k: v.clone() for k, v in state.items()}
    metric, options = metric_of(kind, G.mT @ G, H.mT @ H), OPTIONS[kind]
    g = Gradient([torch.full_like(x, torch.nan)[None] for x in (G, H)]).read()
    g.restrict(torch.tensor([False]))
    _, after = RULES[kind](metric, g, dict(state), **options)
    after = {k: v if v is state[k] else g.only(v, state[k]) for k, v in after.items()}  # as the optimiser does
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)
    g = Gradient([x[None].clone() for x in gradients[0]]).read()
    _, after = RULES[kind](metric, g, dict(state), **options)
    assert not any(torch.equal(after[k], before[k]) for k in before)


class Descent(QuotientOptimizer):
    """Gradient descent that returns new moments instead of writing to them."""

    @staticmethod
    def rule(metric, g, state, *, momentum):
        new = {k: m * momentum + x for (k, m), x in zip(state.items(), g.rows, strict=True)}
        K_inv = metric.inverse_roots
        return rules.Update([*new.values()], K_inv.mH @ K_inv), new

    def __init__(self, params, symmetries=(), lr=1e-3, momentum=0.5, **options):
        super().__init__(params, symmetries, lr, {"momentum": momentum}, **options)

    others, shared = "SGD", ("momentum",)


def test_a_rule_of_ones_own_that_writes_nothing_in_place():
    """All else, such as state and points that wait, is the optimiser's."""
    ends = []
    for make in (Descent, QuotientSGD):
        model = lora(modules_to_save=["2"], targets=("0",))
        optimizer = make(trained(model), adapter_pairs(model), 1e-2, 0.5, weight_decay=0.1, max_grad_norm=0.3)
        train(model, optimizer, 3, schedule=False)
        for p in model.parameters():
            p.grad = None if p.grad is None else torch.zeros_like(p)
        optimizer.step()  # the pair waits
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = make(trained(model), adapter_pairs(model), 1e-2, 0.5, weight_decay=0.1, max_grad_norm=0.3)
        optimizer.load_state_dict(saved)
        train(model, optimizer, 3, schedule=False)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert float((ends[0] - ends[1]).abs().max()) < 1e-10


class Last(Descent):
    """Steps along the gradient, which it returns as its state."""

    @staticmethod
    def rule(metric, g, state, *, momentum):
        new = dict(zip(state, g.rows, strict=True))
        if momentum == 0.1:
            new["more"] = g.sizes
        K_inv = metric.inverse_roots
        return rules.Update(g.rows, K_inv.mH @ K_inv), new


@pytest.mark.parametrize("transports", [True, False])
def test_a_state_may_be_the_gradients_themselves(transports, monkeypatch):
    """They lie where the next gradients are written to."""
    monkeypatch.setattr(Last, "transports", transports)
    model, plain = lora(), lora()
    optimizer, other = Last(trained(model), adapter_pairs(model)), QuotientSGD(trained(plain), adapter_pairs(plain))
    for _ in range(2):
        train(model, optimizer, 1, schedule=False)
        kept = copy.deepcopy(optimizer.state_dict()["stacks"])
        train(plain, other, 1, schedule=False)
        loss_of(model).backward()
        for s in optimizer._stacks:
            with torch.no_grad():
                s.begin(dict(trained(model)), {name: p.grad for name, p in trained(model)})
        for a, b in zip(kept, optimizer.state_dict()["stacks"], strict=True):
            assert all(torch.equal(a["state"][k], b["state"][k]) for k in a["state"])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-12)
    wrong = Last(trained(model), adapter_pairs(model), momentum=0.1)
    with pytest.raises(
        ValueError, match=r"a rule returned \['moment G', 'moment H', 'more'\], but its state has \['mom"
    ):
        wrong.step()


class Signs(torch.optim.Optimizer):
    """What another library might have; counts how often it is built."""

    built = 0

    def __init__(self, params, lr, size=1.0):
        super().__init__(params, {"lr": lr, "size": size})
        Signs.built += 1

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"] * group["size"])


def beside_a_pair(others, kind=QuotientAdam, **options):
    """Two weights that an optimiser of torch trains beside a pair, and the optimiser."""
    torch.manual_seed(0)
    G, H, *mine = (nn.Parameter(torch.randn(size)) for size in ((4, 2), (3, 2), (3, 2), (4, 5)))
    named = [("G", G), ("H", H), *((f"other {i}", p) for i, p in enumerate(mine))]
    optimizer = kind(named, [factor_pair(G, H)], lr=1e-2, others=others, **options)
    optimizer.certify = False
    return mine, optimizer


OTHERS = {
    "AdamW": {"eps": 1e-3, "amsgrad": True},
    "SGD": {"momentum": 0.8, "nesterov": True},
    "RAdam": {},
    "Adagrad": {"initial_accumulator_value": 0.1},  # which has a state before its first step
    "Adafactor": {"d": 1.5},
    f"{__name__}.Signs": {"size": 0.3},
}


@pytest.mark.parametrize("kind", [QuotientAdam, QuotientMuon])
@pytest.mark.parametrize("name", OTHERS)
def test_any_optimiser_of_torch_trains_what_is_in_no_pair(name, kind):
    """With its own options and defaults: those of pairs have other values. It resumes bit for bit, built once a run."""
    own = {"betas": (0.5, 0.6), "eps": 1e-2} if kind is QuotientAdam else {"momentum": 0.5}
    mine, optimizer = beside_a_pair({"name": name, **OTHERS[name]}, kind, **own)
    twins = [nn.Parameter(p.detach().clone()) for p in mine]
    make = Signs if "." in name else getattr(torch.optim, name)
    options = {"lr": 1e-2 * optimizer.rest, **OTHERS[name]}
    if make is not Signs:
        options["weight_decay"] = 0.0
    if kind is QuotientAdam and name == "AdamW":  # one Adam for all
        options["betas"] = own["betas"]
    theirs = make(twins, **options)
    Signs.built = 0
    for step in range(4):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        for p, twin in zip(mine, twins, strict=True):
            twin.grad = p.grad.clone()
        optimizer.step()
        theirs.step()
        if step == 1:
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            optimizer.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    for p, twin in zip(mine, twins, strict=True):
        assert torch.equal(p, twin)
    assert Signs.built == 0


def test_what_trains_the_rest_is_checked():
    for others, words in (
        ("Nothing", "torch.optim has no Nothing; of another library give the module too"),
        (3, 'others must be a name, such as "AdamW", or a dict with a name and options, got 3'),
        ({"momentum": 0.9}, "others must be a name"),
        ({"name": "SGD", "lr": 0.1}, "others takes no lr; give it to the optimiser"),
        ("LBFGS", "LBFGS evaluates the loss within its step"),
    ):
        with pytest.raises(ValueError, match=words):
            beside_a_pair(others)
    with pytest.raises(TypeError, match=r"with others, betas is one of its options: others=\{'name': …, 'betas': …\}"):
        beside_a_pair("AdamW", QuotientMuon, betas=(0.9, 0.99))
    with pytest.raises(TypeError, match="momentum"):
        beside_a_pair({"name": "AdamW", "momentum": 0.9})
    _, one = beside_a_pair("AdamW")
    _, two = beside_a_pair("RAdam")
    with pytest.raises(ValueError, match="in this state AdamW trains what is in no pair; make the optimiser with that"):
        two.load_state_dict(one.state_dict())

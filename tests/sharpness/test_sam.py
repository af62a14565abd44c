"""GeodesicSAM: plain formulas, invariance, and weights that are never left perturbed."""

import copy
import pickle
import warnings

import peft
import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.optim import QuotientAdam, QuotientSGD, create_quotient_optimizer
from quotient_manifolds.symmetries import find, move_
from sharpness import GeodesicSAM
from tests.support.extent import checkered
from tests.support.networks import Encoder, bert, shake, vit

LABELS = torch.arange(6) % 3
MEASURES = ["geodesic-inv", "geodesic-mix", "adaptive", "euclidean"]


def batch_of(make):
    generator = torch.Generator().manual_seed(5)
    if make is vit:
        return torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64)
    if make is bert:
        return torch.randint(20, (6, 7), generator=generator)
    return torch.randn(6, 5, 8, generator=generator, dtype=torch.float64)


def loss_of(model, batch):
    found = model(batch)
    return nn.functional.cross_entropy(found if isinstance(found, torch.Tensor) else found.logits, LABELS)


def closure_of(sam, model, batch):
    def closure():
        sam.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    return closure


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(model, before):
    return all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def small(make=Encoder):
    torch.manual_seed(0)
    return shake(make())


# -- against formulas written out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["euclidean", "adaptive"])
def test_sam_and_asam(measure):
    """ε = ρ g/‖g‖, or ρ T²g/‖Tg‖ with T = |w|."""
    model, batch, rho, lr = small(), batch_of(Encoder), 0.1, 0.05
    twin = copy.deepcopy(model)
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), lr), rho=rho, measure=measure)
    for _ in range(3):
        sam.step(closure_of(sam, model, batch))
        parameters = list(twin.parameters())
        g = torch.autograd.grad(loss_of(twin, batch), parameters)
        T = [p.detach().abs() if measure == "adaptive" else torch.ones_like(p) for p in parameters]
        norm = torch.cat([(t * v).flatten() for t, v in zip(T, g, strict=True)]).norm()
        with torch.no_grad():
            steps = [rho * t * t * v / norm for t, v in zip(T, g, strict=True)]
            for p, e in zip(parameters, steps, strict=True):
                p.add_(e)
        second = torch.autograd.grad(loss_of(twin, batch), parameters)
        with torch.no_grad():
            for p, e, v in zip(parameters, steps, second, strict=True):
                p.sub_(e).sub_(lr * v)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("refresh", [1, 20])
def test_the_perturbation_is_the_gradient_on_the_manifold(metric, refresh):
    """Norm, Riemannian gradient and retraction by the manifold's own methods, and an elementwise metric elsewhere."""
    model, batch, rho = small(), batch_of(Encoder), 0.3
    move_(model, condition=20.0, seed=1)
    sam = GeodesicSAM(
        model, torch.optim.SGD(model.parameters(), 0.05), rho=rho, measure=f"geodesic-{metric}", refresh=refresh
    )
    for _ in range(3):
        sam.zero_grad()
        loss_of(model, batch).backward()
        pairs, weights = find(model).pairs, dict(model.named_parameters())
        points = [p.gather(weights).detach() for p in pairs]
        grads = {name: p.grad for name, p in weights.items()}
        from quotient_manifolds.symmetries import PairStack

        covectors = [PairStack([p]).gather(grads)[0] for p in pairs]
        vectors = [p.manifold(metric).egrad2rgrad(x, e) for p, x, e in zip(pairs, points, covectors, strict=True)]
        squares = sum(p.manifold(metric).inner(x, v, v) for p, x, v in zip(pairs, points, vectors, strict=True))
        attention = {name for p in pairs for name in p.names}
        for name, p in weights.items():
            if name not in attention:
                squares = squares + (p.detach() * p.grad).square().sum()
        norm, grads_before = squares.sqrt(), model.head.weight.grad.clone()
        expected = [p.manifold(metric).retr(x, rho / norm * v) for p, x, v in zip(pairs, points, vectors, strict=True)]
        with sam.perturbed(zero_grad=True):
            for p, x in zip(pairs, expected, strict=True):
                assert torch.allclose(p.gather(weights).detach(), x, atol=1e-9)
            head = model.head.weight.detach().clone()
            loss_of(model, batch).backward()
        w = model.head.weight.detach()
        assert torch.allclose(head - w, rho / norm * w**2 * grads_before, rtol=1e-9)
        sam.step()


@pytest.mark.parametrize("measure", MEASURES[:3])
def test_the_first_ascent_step_is_that_of_the_measure(measure):
    """The rise after the inner step approaches ρ times the gradient's norm in the metric, as ``evaluate`` gives it."""
    model, batch = small(), batch_of(Encoder)
    norm = float(sharpness.gradient_norm(model, [(batch, LABELS)], measure=measure))
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=1e-5, measure=measure)
    base = loss_of(model, batch)
    base.backward()
    with sam.perturbed():
        rise = loss_of(model, batch).detach() - base.detach()
    assert float(rise) == pytest.approx(1e-5 * norm, rel=1e-3)


# -- invariance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "measure", "base"),
    checkered((vit, bert, Encoder), MEASURES[:2], ("QuotientSGD", "QuotientAdam", "AdamW")),
)
def test_equivalent_starts(make, measure, base):
    """The same function after six steps, with a base optimiser that is invariant itself; not with AdamW.

    Of longer runs on the ViT rounding makes others, orbit or not: weights that are changed by 1e-14 at random change
    the outputs by 1e-12 after 14 steps and by 3e-8 after 20 (5e-10 with AdamW).
    """
    one, batch = small(make), batch_of(make)
    two = copy.deepcopy(one)
    move_(two, condition=100.0, seed=4)
    scores = []
    for model in (one, two):
        parameters = list(model.parameters())
        if base == "QuotientSGD":
            optimizer = QuotientSGD(model.named_parameters(), find(model), 1e-2, 0.9)
        elif base == "QuotientAdam":
            # The key bias has no gradient but rounding, which Adam's normalisation must not lift out.
            known = find(model).without_null()
            paired = {name for p in known.pairs for name in p.names}
            rest = torch.optim.SGD([p for name, p in model.named_parameters() if name not in paired], 1e-2)
            inner = QuotientAdam([(name, p) for name, p in model.named_parameters() if name in paired], known, 1e-3)
        else:
            optimizer = torch.optim.AdamW(parameters, 1e-3)
        if base == "QuotientAdam":  # plain SGD elsewhere, which is not perturbed
            sam = GeodesicSAM(model, inner, rho=0.05, measure=measure, symmetries=known)
            for _ in range(6):
                model.zero_grad()
                loss_of(model, batch).backward()
                with sam.perturbed():
                    model.zero_grad()
                    loss_of(model, batch).backward()
                sam.step()
                rest.step()
        else:
            sam = GeodesicSAM(model, optimizer, rho=0.05, measure=measure)
            for _ in range(6):
                sam.step(closure_of(sam, model, batch))
        found = model(batch)
        scores.append((found if isinstance(found, torch.Tensor) else found.logits).detach())
    change = float((scores[0] - scores[1]).abs().max())
    assert change < 1e-9 if base != "AdamW" else change > 1e-5


def test_entries_beside_dropped_ones_take_the_step_of_the_measure():
    """In one bias there are entries of pairs, dropped ones, and, if only Q and K are divided out, some of no pair."""
    model, batch = small(), batch_of(Encoder)
    known = find(model).without_null()
    measure = sharpness.get_measure("geodesic-inv", symmetry="qk")
    before = snapshot(model)
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.05, measure=measure, symmetries=known)
    loss_of(model, batch).backward()
    with sam.perturbed():
        found = snapshot(model)
        output = model(batch).detach()
    space = sharpness.WeightSpace(model, measure, known)
    with space.attached():
        g = space.gradient(loss_of(model, batch))
        space.move_to(0.05 * g / g.norm())  # of Q and K it moves another representative
        torch.testing.assert_close(model(batch).detach(), output, rtol=1e-10, atol=1e-12)
        expected = snapshot(model)
    for name in ("encoder.layers.0.self_attn.in_proj_bias", "encoder.layers.0.self_attn.in_proj_weight"):
        torch.testing.assert_close(found[name][-8:], expected[name][-8:], rtol=1e-10, atol=1e-12)
        assert not torch.equal(found[name][-8:], before[name][-8:])


def test_blocks_that_were_dropped_from_pairs_stay(monkeypatch):
    """A key bias that belongs to no factor moves neither in training nor in a measurement, whatever memory holds."""
    real = torch.empty_like

    def garbage(t, **options):
        return real(t, **options).fill_(torch.nan) if t.is_floating_point() else real(t, **options)

    monkeypatch.setattr(torch, "empty_like", garbage)
    model, batch = small(bert), batch_of(bert)
    known, weights = find(model).without_null(), dict(model.named_parameters())
    dropped = [weights[name] for name in {s.name for p in known.pairs for s in p.dropped}]
    assert dropped
    before = [p.detach().clone() for p in dropped]
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.05, symmetries=known)
    loss_of(model, batch).backward()
    with sam.perturbed():
        assert all(torch.equal(p, b) for p, b in zip(dropped, before, strict=True))
    result = sharpness.evaluate(model, [(batch, LABELS)], rho=0.1, steps=2, symmetries=known)
    with sharpness.perturbed(model, result.direction(0)):
        assert all(torch.equal(p, b) for p, b in zip(dropped, before, strict=True))


def test_sparse_gradients():
    batch, ends = torch.randint(5, (6, 2)), []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
        sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.5, measure="adaptive")
        for _ in range(2):
            sam.step(closure_of(sam, model, batch))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.parametrize("measure", ["adaptive", "euclidean"])
def test_weights_in_channels_last_keep_their_layout(measure):
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 3)).to(memory_format=layout)
        batch = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
        sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.5, measure=measure)
        closure_of(sam, model, batch)()
        before = snapshot(model)
        with sam.perturbed():
            assert model[0].weight.is_contiguous(memory_format=layout)
            assert not same(model, before)
            closure_of(sam, model, batch)()
        sam.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1])


def test_refresh_does_not_change_the_result():
    ends = []
    for refresh in (1, 7, 1000):
        model, batch = small(), batch_of(Encoder)
        sam = GeodesicSAM(model, torch.optim.AdamW(model.parameters(), 1e-2), rho=0.1, refresh=refresh)
        for _ in range(15):
            sam.step(closure_of(sam, model, batch))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(ends[0], ends[1], atol=1e-9)
    assert torch.allclose(ends[0], ends[2], atol=1e-9)


# -- both manners, and what trainers do -----------------------------------------------------------------------


def test_both_manners_agree():
    ends = []
    for manner in ("closure", "with"):
        model, batch = small(), batch_of(Encoder)
        sam = GeodesicSAM(model, torch.optim.AdamW(model.parameters(), 1e-2), rho=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(sam, 0.9)
        for _ in range(4):
            closure = closure_of(sam, model, batch)
            if manner == "closure":
                sam.step(closure)
            else:
                closure()
                with sam.perturbed(zero_grad=True):
                    assert all(p.grad is None for p in model.parameters())
                    closure()
                sam.step()
            schedule.step()
        assert sam.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**4)
        assert sam.base_optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**4)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(ends[0], ends[1])


def test_accumulated_gradients():
    ends = []
    for parts in (1, 3):
        model, batch = small(), batch_of(Encoder)
        sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 1e-2), rho=0.1)

        def backward(model=model, batch=batch, parts=parts):
            for x, y in zip(batch.chunk(parts), LABELS.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(x), y) / parts).backward()

        for _ in range(3):
            sam.zero_grad()
            backward()
            with sam.perturbed(zero_grad=True):
                backward()
            sam.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(ends[0], ends[1], atol=1e-12)


@pytest.mark.parametrize("measure", ["geodesic-inv", "euclidean"])
def test_resuming_is_exact(measure):
    straight, batch = small(), batch_of(Encoder)
    broken = copy.deepcopy(straight)

    def make(model):
        return GeodesicSAM(model, torch.optim.AdamW(model.parameters(), 1e-2), rho=0.1, measure=measure, refresh=1)

    sam, other = make(straight), make(broken)
    for _ in range(6):
        sam.step(closure_of(sam, straight, batch))
    for _ in range(2):
        other.step(closure_of(other, broken, batch))
    saved = copy.deepcopy((broken.state_dict(), other.state_dict()))
    resumed = small()
    resumed.load_state_dict(saved[0])
    again = make(resumed)
    again.load_state_dict(saved[1])
    for _ in range(4):
        again.step(closure_of(again, resumed, batch))
    assert same(resumed, snapshot(straight))


# -- weights are never left perturbed ------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("measure", MEASURES)
def test_exceptions_leave_the_weights(measure):
    model, batch = small(), batch_of(Encoder)
    before = snapshot(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1, measure=measure)
    calls = []

    def closure():
        calls.append(not same(model, before))
        if len(calls) == 2:
            raise Stop
        return closure_of(sam, model, batch)()

    with pytest.raises(Stop):
        sam.step(closure)
    assert calls == [False, True]
    assert same(model, before)

    def fail_inside():
        with sam.perturbed():
            assert not same(model, before)
            raise Stop

    with pytest.raises(Stop):
        fail_inside()
    assert same(model, before)
    with pytest.raises(ValueError, match="needs a closure, or a pass within"):  # the gradients are those at the weights
        sam.step()
    with sam.perturbed():
        torch.no_grad()(model)(batch)  # to log the perturbed loss, say
        assert not same(model, before)
        perturbed = snapshot(model)
    with sam.perturbed():  # the gradient is that at the weights; nor does a second block start from perturbed ones
        assert same(model, perturbed)
    assert same(model, before)
    seen = []
    with pytest.raises(Stop):
        sam.step(lambda: seen.append(same(model, before)) or (_ for _ in ()).throw(Stop))
    assert seen == [True]
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_a_measurement_of_perturbed_weights_does_not_lose_the_others():
    """The measurement puts back what it found, which is the perturbed copy; SAM still knows the weights."""
    model, batch = small(), batch_of(Encoder)
    sam, before = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1), snapshot(model)
    loss_of(model, batch).backward()
    for measured in (
        lambda: sharpness.evaluate(model, [(batch, LABELS)], measure="adaptive", rho=0.1, steps=1),
        lambda: sharpness.gradient_norm(model, [(batch, LABELS)], measure="euclidean"),
    ):
        with sam.perturbed():
            perturbed = snapshot(model)
            measured()
            assert same(model, perturbed)
        assert same(model, before)
    step = max(float((perturbed[n] - v).abs().max()) for n, v in before.items())
    assert 0 < step < 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_gradient_without_direction_perturbs_nothing(value):
    model, batch = small(), batch_of(Encoder)
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1)
    loss_of(model, batch).backward()
    before = snapshot(model)
    for p in model.parameters():
        p.grad.fill_(value)
    with sam.perturbed():
        assert same(model, before)
    assert same(model, before)


def test_nan_losses_with_an_optimiser_that_refuses_them():
    model, batch = small(), batch_of(Encoder)
    before = snapshot(model)
    sam = GeodesicSAM(model, QuotientSGD(model.named_parameters(), find(model), 0.1), rho=0.1)
    with pytest.raises(ValueError, match="NaN or infinite entries"):
        sam.step(closure_of(sam, model, batch * float("nan")))
    assert same(model, before)


def test_a_grad_scaler_unscales_and_skips():
    ends = []
    for scaled in (False, True):
        torch.set_default_dtype(torch.float32)
        model = small()
        batch = batch_of(Encoder).float()
        sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)

        def pass_through(model=model, batch=batch, scaler=scaler, sam=sam):
            sam.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()

        for _ in range(3):
            pass_through()
            with sam.perturbed():
                pass_through()
            scaler.step(sam)
            scaler.update()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*ends, atol=1e-5)
    before = snapshot(model)
    pass_through()
    with sam.perturbed():
        pass_through()
    next(model.parameters()).grad.fill_(float("inf"))
    scaler.step(sam)
    scaler.update()
    assert same(model, before)
    assert scaler.get_scale() == 2.0**7


def test_models_can_be_pickled_and_outlive_the_optimiser():
    model, batch = small(), batch_of(Encoder)
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1)
    loss_of(model, batch).backward()
    before = snapshot(model)
    with sam.perturbed():
        pass
    clone = pickle.loads(pickle.dumps(model))
    assert same(clone, before)
    del sam
    with torch.no_grad():
        assert torch.equal(model(batch), clone(batch))


def test_copies_and_pickles_go_on():
    model, batch = small(), batch_of(Encoder)
    sam = GeodesicSAM(model, torch.optim.AdamW(model.parameters(), 1e-2), rho=0.1)
    torch.optim.lr_scheduler.ExponentialLR(sam, 0.5)
    sam.step(closure_of(sam, model, batch))
    copies = [copy.deepcopy((model, sam)), pickle.loads(pickle.dumps((model, sam))), (model, sam)]
    for other, optimizer in copies:
        assert optimizer.model is other
        for _ in range(2):
            optimizer.step(closure_of(optimizer, other, batch))
        assert same(other, snapshot(copies[0][0]))
    base = sam.base_optimizer
    base.load_state_dict(base.state_dict())
    assert sam.param_groups is base.param_groups


def test_a_scaler_reaches_groups_added_later():
    torch.set_default_dtype(torch.float32)
    model, batch = small(), batch_of(Encoder).float()
    extra = nn.Parameter(torch.ones(3))
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1)
    sam.add_param_group({"params": (p for p in [extra])})  # what was looked at was lost to the base optimiser
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        sam.zero_grad()
        scaler.scale(loss_of(model, batch) + extra.sum()).backward()
        if sam._count == 0:
            with sam.perturbed():
                pass
    scaler.step(sam)
    assert torch.allclose(extra.detach(), torch.full((3,), 0.9))


# -- adapters, dtypes, bad input -----------------------------------------------------------------------------------


def test_fresh_adapters():
    """At B = 0 nothing has a direction in the quotient; later everything has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "2"])).double()
    x = batch_of(Encoder)[:, 0]
    sam = GeodesicSAM(
        model,
        QuotientAdam([(n, p) for n, p in model.named_parameters() if p.requires_grad], find(model), 1e-2),
        rho=0.1,
    )
    losses = [float(sam.step(closure_of(sam, model, x))) for _ in range(15)]
    assert losses[-1] < losses[0]
    before = snapshot(model)
    with sam.perturbed():
        assert not same(model, before)


class Widening(nn.Module):
    """Weights of single precision before those of double."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(3, 4).float(), nn.Linear(4, 2).double()

    def forward(self, x):
        return self.wide(self.narrow(x).double())


def test_weights_of_several_precisions_move_each_in_its_own():
    model, x = small(Widening), torch.randn(5, 3, dtype=torch.float32)
    sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.05, measure="adaptive")
    model(x).square().mean().backward()
    xi = model.wide.weight.square() * model.wide.weight.grad
    length = sum((p * p.grad).double().square().sum() for p in model.parameters()).sqrt()
    end = model.wide.weight + 0.05 * xi / length
    with sam.perturbed():
        torch.testing.assert_close(model.wide.weight, end, rtol=0, atol=1e-9)  # in single precision it is 1e-8


def test_autocast():
    torch.set_default_dtype(torch.float32)
    model, batch = small(), batch_of(Encoder).float()
    sam = GeodesicSAM(model, torch.optim.AdamW(model.parameters(), 1e-2), rho=0.05)

    def closure():
        sam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    losses = [float(sam.step(closure)) for _ in range(15)]
    assert losses[-1] < losses[0]


def test_bad_input():
    model = small()
    base = torch.optim.SGD(model.parameters(), 0.1)
    for rho in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="rho must be positive"):
            GeodesicSAM(model, base, rho=rho)
    with pytest.raises(ValueError, match="refresh must be a whole number of at least 1"):
        GeodesicSAM(model, base, rho=0.1, refresh=0)
    with pytest.raises(ValueError, match="unknown measure 'flat'"):
        GeodesicSAM(model, base, rho=0.1, measure="flat")
    with pytest.raises(ValueError, match="unknown measure 'riemannian-hessian'"):
        GeodesicSAM(model, base, rho=0.1, measure="riemannian-hessian")
    half = small().bfloat16()
    with pytest.raises(ValueError, match="keep the weights in float32"):
        GeodesicSAM(half, torch.optim.SGD(half.parameters(), 0.1), rho=0.1)


def test_certification_outlives_a_gradient_that_overflowed_and_a_copy():
    model, batch = small(), batch_of(Encoder)
    sam = GeodesicSAM(model, QuotientSGD(model.named_parameters(), find(model), 0.1), rho=0.5)
    loss_of(model, batch).backward()
    for p in model.parameters():
        p.grad.fill_(torch.inf)
    with sam.perturbed():
        assert sam.uncertified
    model.zero_grad()
    loss_of(model, batch).backward()
    with sam.perturbed():
        assert not sam.uncertified
    twin = copy.deepcopy(sam)
    assert twin.base_optimizer.certify is False


def test_only_what_the_base_optimiser_trains_is_perturbed():
    """The norm that rho bounds is that of the trained weights alone (as in SAM), whatever else the model has."""
    model, batch = small(), batch_of(Encoder)
    trained = [p for name, p in model.named_parameters() if "linear" in name]
    assert 0 < len(trained) < len(list(model.parameters()))
    before = snapshot(model)
    sam = GeodesicSAM(model, torch.optim.SGD(trained, 0.1), rho=0.1, measure="euclidean")
    loss_of(model, batch).backward()
    with sam.perturbed():
        moved = {n: (p.detach() - before[n]) for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert all("linear" in name for name in moved)
    assert abs(torch.cat([u.flatten() for u in moved.values()]).norm() - 0.1) < 1e-9
    with pytest.raises(ValueError, match="trains no parameter of this"):
        GeodesicSAM(model, torch.optim.SGD(small().parameters(), 0.1), rho=0.1)


class Unknown(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def test_attention_that_only_a_batch_could_tell_is_said_with_what_to_do():
    model, x = shake(nn.Sequential(Unknown(8, 2, batch_first=True))), batch_of(Encoder)
    base = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match=r"symmetries of Unknown, .* pass symmetries=find\(model, b"):
        sam = GeodesicSAM(model, base, rho=0.1)
    assert not sam.uncertified
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sam = GeodesicSAM(model, base, rho=0.1, symmetries=find(model, x))
        GeodesicSAM(model, base, rho=0.1, measure="adaptive")
        known = small()
        GeodesicSAM(known, torch.optim.SGD(known.parameters(), 0.1), rho=0.1)
        model[0].requires_grad_(False)
        model.append(nn.Linear(8, 8))
        GeodesicSAM(model, torch.optim.SGD(model[1].parameters(), 0.1), rho=0.1)
    assert len(sam.uncertified) == 4


@pytest.mark.parametrize("measure", ["geodesic-inv", "euclidean"])
def test_gradients_at_moved_weights_certify_no_pair(measure):
    """They did where the measure knew of no pairs, and refused a true symmetry."""
    model, batch = small(), batch_of(Encoder)
    sam = GeodesicSAM(model, create_quotient_optimizer(model, lr=1e-3), rho=1.0, measure=measure)
    for _ in range(2):
        assert sam.step(closure_of(sam, model, batch)).isfinite()

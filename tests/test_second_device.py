"""What the packages do, they do on a device that is not the CPU, with the same results, and without mixing the two."""

import contextlib

import geoopt
import pytest
import torch

import sharpness
from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient, canonical_gauge, frechet_mean
from quotient_manifolds.optim import (
    create_quotient_lora_optimizer,
    create_quotient_optimizer,
)
from quotient_manifolds.symmetries import (
    ALL,
    adapter_pairs,
    canonicalize_,
    find,
    manifold_parameters_,
    model_distance,
    move_,
    plain_parameters_,
    verify,
)
from quotient_manifolds.symmetries.discovery import PAIRS
from quotient_manifolds.symmetries.whole import independence_test
from reproduction import baselines
from sharpness import devices, plots
from tests.support import networks
from tests.support.architectures import adapted
from tests.support.extent import EXHAUSTIVE
from tests.support.processes import together
from tests.support.second_device import NAME, POSSIBLE, second_device

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="this torch has no devices that are written in Python")


def numbers(seed, *size):
    drawn = torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(torch.get_default_dtype())


def made(build, batch, **options):
    torch.manual_seed(0)
    with torch.device("cpu"):
        return build(**options), [batch()]


#: Of networks: one layer, with two heads, makes every kind of operation.
SMALL = {"layers": 1, "hidden": 8}


def picture_model(device):
    """A network on the device, and a batch that is still on the CPU, as a user's may be."""
    model, batches = made(networks.vit, networks.images, **SMALL)
    return model.to(device), batches


def text_model(device):
    model, batches = made(networks.bert, networks.text, **SMALL)
    return model.to(device), batches


def searched(measure, statistic=sharpness.evaluate, **options):
    options = options or {"steps": 2}

    def call(device):
        model, batches = picture_model(device)
        result = statistic(model, batches, measure=measure, rho=[0.02, 0.05], progress=False, **options)
        return [float(result[rho]) for rho in (0.02, 0.05)]

    return call


def trained(make):
    def call(device):
        model, [batch] = text_model(device)
        optimiser, found = make(model), []
        for _ in range(2):
            loss = model(**{k: v.to(device) for k, v in batch.items()}).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(float(loss.detach()))
        return found

    return call


def moved(manifold, rows):
    def call(device):
        x, u = numbers(0, 3, rows, 2).to(device), numbers(1, 3, rows, 2).to(device) / 50
        u = manifold.proju(x, u)
        y = manifold.expmap(x, u)
        found = [y, manifold.retr(x, u), manifold.dist(x, y), manifold.logmap(x, y), manifold.transp(x, y, u)]
        return torch.cat([*map(torch.flatten, found), manifold.egrad2rgrad(x, u).flatten()])

    return call


def means(device):
    manifold, points = GLQuotientMix(4, 3), (numbers(0, 1, 7, 1) + numbers(1, 2, 7, 1) / 20).to(device)
    weights = torch.tensor([2.0, 1.0], device=device)
    pairs = numbers(2, 3, 2, 4).abs().to(device)
    found = [
        manifold.to_matrix(frechet_mean(manifold, points).point),
        manifold.to_matrix(manifold.mean(points, weights)),
    ]
    return torch.cat([x.flatten() for x in (*found, RescaleQuotient("inv").mean(pairs))])


def distances(device):
    (one, _), (two, _) = (text_model("cpu") for _ in range(2))
    for p in two.parameters():
        p.data *= 1.01
    return model_distance(one.to(device), two.to(device)).total


def turned(device):
    model, [(x, _)] = picture_model(device)
    assert move_(model, find(model, scope=ALL))
    canonicalize_(model)
    moved = next(iter(model.parameters()))
    assert moved.device.type == torch.device(device).type
    return model(x.to(device)).logits


def verified(device):
    model, [(x, _)] = picture_model(device)
    batch = {"pixel_values": x.to(device)}
    found, whole = (verify(model, batch, find(model, scope=scope)) for scope in (PAIRS, ALL))
    assert found.ok
    assert whole.ok
    assert max(found.changes.values()) < 1e-9
    weights = dict(model.named_parameters())
    points = [p.manifold().unpack_tensor(p.gather(weights).detach()) for p in find(model).pairs]
    return torch.stack([canonical_gauge(G, H).sigma for G, H in points])


def at_the_weights(device):
    model, batches = picture_model(device)
    moved = [tuple(t.to(device) for t in b) for b in batches]
    start = {k: v + 0.01 for k, v in model.state_dict().items()}
    return [
        *baselines.norms(model).values(), baselines.distance(model, start), baselines.relative_flatness(model, moved),
        baselines.margin(model, moved), baselines.fisher_trace(model, moved),
        sharpness.critical_sharpness(model, moved[:1]),
    ]  # fmt: skip


def derivatives(measure):
    def call(device):
        model, batches = picture_model(device)
        found = sharpness.hessian(model, batches, measure=measure, num_matvecs=2, progress=False)
        norm = sharpness.gradient_norm(model, batches, measure=measure, progress=False)
        return [float(found), found.trace, float(norm)]

    return call


def along_the_worst(measure):
    def call(device):
        model, batches = picture_model(device)
        result = sharpness.evaluate(model, batches, measure=measure, rho=0.05, steps=2, progress=False)
        drawn = plots.plot_profile(model, batches[0], result.direction(0), points=3)
        with sharpness.perturbed(model, result.direction(0)):
            moved = [float(p.detach().norm()) for p in model.parameters()]
        return [*drawn.axes[0].lines[-1].get_ydata(), *moved]

    return call


def adapters(device):
    model, [batch] = made(
        lambda: adapted(networks.bert(**SMALL), ["query", "value"]).to(torch.get_default_dtype()), networks.text
    )
    canonicalize_(model.to(device), adapter_pairs(model))
    optimiser = create_quotient_lora_optimizer(model, lr=1e-2)
    batch = {k: v.to(device) for k, v in batch.items()}
    for _ in range(2):
        optimiser.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimiser.step()
    return loss


def aligned(device):
    """Distances of models in the same coordinates."""
    one, two = (text_model(device)[0] for _ in range(2))
    for p in two.parameters():
        p.data *= 1.01
    return model_distance(one, two, modulo="all").total


def kinship(device):
    """Neurons that two models share."""
    one, two = (text_model(device)[0] for _ in range(2))
    return float(independence_test(one, two).agreeing)


class Unknown(torch.nn.Module):
    """Attention of one head."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        projected = (p(x) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(torch.nn.functional.scaled_dot_product_attention(*projected))


class OfPoints(torch.nn.Module):
    """Points of manifolds, with numbers that belong to one of them."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.ball = geoopt.PoincareBall(0.8).to(device)
        self.words = self.point(0.3 * numbers(0, 5, 3).tanh(), self.ball)
        self.spd = self.point(torch.eye(3, device="cpu") + 0.1, geoopt.SymmetricPositiveDefinite())
        self.heads = self.point(numbers(1, 2, 7, 2), GLQuotientMix(4, 3))
        self.complex = self.point(torch.complex(numbers(2, 7, 2), numbers(3, 7, 2)), GLQuotientInv(4, 3))

    def point(self, x, manifold):
        return geoopt.ManifoldParameter(x.to(self.device), manifold=manifold)

    def forward(self, data):
        products = [p.manifold.to_matrix(p) for p in (self.heads, self.complex)]
        found = [*products, self.words, self.spd]
        return sum((torch.view_as_real(x) if x.is_complex() else x).tanh().square().sum() for x in found) * data.mean()


def points(device):
    model, batch = OfPoints(device), [torch.ones(2)]
    options = {"progress": False, "loss_fn": lambda model, data: model(data)}
    found = [
        *(
            float(sharpness.evaluate(model, batch, measure=m, steps=2, **options))
            for m in ("geodesic-inv", "geodesic-mix")
        ),
        float(sharpness.average(model, batch, num_samples=2, **options)),
        float(sharpness.gradient_norm(model, batch, **options)),
        float(sharpness.hessian(model, batch, num_matvecs=2, **options)),
    ]
    optimiser = sharpness.GeodesicSAM(model, geoopt.optim.RiemannianSGD(model.parameters(), lr=0.1), rho=0.05)

    def closure():
        optimiser.zero_grad()
        loss = model(batch[0].to(device))
        loss.backward()
        return loss

    return found + [float(optimiser.step(closure).detach()) for _ in range(2)]


def heads_as_points(device):
    model, [batch] = text_model(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    manifold_parameters_(model)
    value = sharpness.evaluate(model, [batch], rho=0.05, steps=2, progress=False)
    plain_parameters_(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return [float(value)]


def examined(device):
    """Attention of unknown classes."""
    model, [(x, _)] = made(lambda: networks.shake(Unknown()), lambda: (numbers(0, 2, 5, 4), None))
    found = find(model.to(device), x.to(device))
    assert [str(p.group) for p in found.pairs] == ["GL(4)", "GL(4)"], found
    return [float(sum(move_(model, found).values()))]


def sharpness_aware(device):
    model, [batch] = text_model(device)
    optimiser = sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.05)

    def closure():
        optimiser.zero_grad()
        loss = model(**{k: v.to(device) for k, v in batch.items()}).loss
        loss.backward()
        return loss

    return [float(optimiser.step(closure).detach()) for _ in range(2)]


CALLS = {
    **{name: searched(name) for name in sharpness.MEASURES},
    "apgd": searched("geodesic-inv", ascent="apgd", steps=3),
    "micro-batches": searched("geodesic-inv", micro_batch=5, steps=2),
    "means": means,
    "average": searched("geodesic-inv", sharpness.average, num_samples=2),
    "at the weights": at_the_weights,
    "derivatives": derivatives("geodesic-inv"),
    "derivatives of the whole": derivatives("complete-mix"),
    "along the worst": along_the_worst("geodesic-inv"),
    "along the worst of the whole": along_the_worst("complete-mix"),
    "adapters": adapters,
    "aligned": aligned,
    "kinship": kinship,
    "points": points,
    "heads as points": heads_as_points,
    "examined": examined,
    "sharpness-aware": sharpness_aware,
    "distances": distances,
    "turned": turned,
    "verified": verified,
    "inv": moved(GLQuotientInv(6, 5), 11),
    "mix": moved(GLQuotientMix(6, 5), 11),
    "rescale": moved(RescaleQuotient("mix"), 2),
    "adam": trained(lambda model: create_quotient_optimizer(model, lr=1e-2)),
    "muon": trained(lambda model: create_quotient_optimizer(model, lr=1e-2, optimizer="muon")),
}


#: Calls that are made with the device as torch's default.
BY_DEFAULT = (
    "geodesic-inv",
    "complete-mix",
    "aligned",
    "kinship",
    "turned",
    "verified",
    "distances",
    "adapters",
    "sharpness-aware",
)

#: Calls that move between devices only where one of them has no double precision.
RARE = (
    "average", "points", "heads as points", "examined", "along the worst of the whole", "derivatives of the whole",
)  # fmt: skip

#: Calls that are much like others.
ALIKE = {"euclidean", "adaptive", "complete-inv"}

#: Calls that every run makes with the CPU as the default: one of those that are alike, and none that the others make.
SOME = tuple(sorted(CALLS.keys() - {*BY_DEFAULT, *ALIKE, "means", "mix", "rescale", "derivatives", *RARE}))

#: What is made without double precision: all but the baselines of the studies; in every run, what it may matter to.
NARROW = CALLS.keys() - {*BY_DEFAULT, "at the weights"}
if not EXHAUSTIVE:
    NARROW = NARROW - {*ALIKE, "apgd", "micro-batches", "along the worst", "derivatives of the whole"}
NARROW = tuple(sorted(NARROW))
NARROW_BY_DEFAULT = (
    BY_DEFAULT if EXHAUSTIVE else tuple(name for name in BY_DEFAULT if name not in {"aligned", "kinship"})
)


def same_numbers(names, by_default, double=True):
    """Compare calls on the CPU and on the device, in a process whose autograd engine has not started."""
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    rtol, atol = (1e-5, 1e-8) if double else (1e-4, 1e-5)
    with second_device(double) as device, device if by_default else contextlib.nullcontext():
        found = {name: _numbers(CALLS[name](device)) for name in names}
    for name in names:
        expected = _numbers(CALLS[name](torch.device("cpu")))
        torch.testing.assert_close(found[name], expected, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def _numbers(found):
    return found.detach().cpu() if isinstance(found, torch.Tensor) else torch.tensor(found, device="cpu")


def ended_well(found):
    assert found.codes == [0], found.output[0]


def test_results_are_those_of_the_cpu(tmp_path):
    ended_well(together(1, same_numbers, tuple(CALLS) if EXHAUSTIVE else SOME, False, folder=tmp_path))


def test_results_are_those_of_the_cpu_where_another_device_is_the_default(tmp_path):
    """torch.set_default_device made verify and move_ ask a generator of the CPU for its numbers."""
    ended_well(together(1, same_numbers, BY_DEFAULT, True, folder=tmp_path))


@pytest.mark.skipif(NAME == "cuda", reason="that device has double precision")
@pytest.mark.parametrize("by_default", [False, True], ids=["", "by-default"])
def test_a_device_without_double_precision_is_not_asked_for_it(by_default, tmp_path):
    """As Apple's; the numbers are those that single precision has on the CPU."""
    names = NARROW_BY_DEFAULT if by_default else NARROW
    ended_well(together(1, same_numbers, names, by_default, False, folder=tmp_path))


def mixed():
    with second_device() as device:
        x = torch.ones(2, 2, device=device)
        assert float((x @ x.cpu().to(device)).sum()) == 8
        with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
            x @ torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
            x.add_(torch.ones(2, 2))
        if NAME == "cuda":  # which keeps the parameters
            return
        with second_device(double=False):
            with pytest.raises(TypeError, match="float64, which the device"):
                x.double()
            for wide in (torch.nn.Linear(2, 2).double(), {"x": torch.ones(2, 2).double()}):
                with pytest.raises(ValueError, match=f"not everything can be moved to {NAME}: .*float64"):
                    devices.move(wide, NAME)
        layer = torch.nn.Linear(2, 2)
        before = list(layer.parameters())
        assert not any(p is q for p, q in zip(layer.to(device).parameters(), before, strict=True))
        layer(x).sum().backward()
        assert layer.weight.grad.device == device


def test_the_device_refuses_tensors_of_the_cpu(tmp_path):
    ended_well(together(1, mixed, folder=tmp_path))

import copy

import geoopt
import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.symmetries import find_symmetric_pairs
from sharpness.study.run import distance
from sharpness.weights import named_weights, trainable
from tests import networks


def test_bad_models_are_named():
    model, batch = networks.vit(), networks.images()
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        sharpness.evaluate(frozen, [batch], rho=0.1)
    with pytest.raises(ValueError, match="lie on the meta device"):
        sharpness.evaluate(copy.deepcopy(model).to("meta"), [batch], rho=0.1)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter 'classifier\.bias' has NaN"):
        sharpness.evaluate(model, [batch], rho=0.1)


def test_weights_that_cannot_be_differentiated_are_named():
    with torch.inference_mode():
        model = torch.nn.Linear(4, 3)
    batch = (torch.randn(5, 4), torch.arange(5) % 3)
    with pytest.raises(
        ValueError, match=r"'weight' was made under torch.inference_mode, where .*; make the model outside"
    ):
        sharpness.evaluate(model, [batch], measure="adaptive")
    model = torch.nn.Linear(4, 3)
    model.weight = torch.nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"'weight' has dtype torch.float8_e4m3fn; only real"):
        sharpness.evaluate(model, [batch], measure="adaptive")


def test_shards_that_cannot_be_measured_are_refused():
    """ZeRO-3's and FSDP1's parameters have marks; FSDP2's are measured, see test_sharded."""
    model = networks.vit()
    model.classifier.weight.ds_id = 1
    with pytest.raises(ValueError, match=r"'classifier\.weight' is a shard of one \(FSDP, DTensor or ZeRO-3\)"):
        sharpness.evaluate(model, [networks.images()], rho=0.1)


def test_names_are_without_the_prefixes_of_wrappers_alone():
    """A layer called module had lost its name in pairs, but not in parameters."""
    net = torch.nn.ModuleDict({"module": networks.vit(), "head": torch.nn.Linear(2, 2)})
    names = set(named_weights(net))
    assert all(name.startswith(("module.", "head.")) for name in names)
    assert all(p.module.startswith("module.vit") for p in find_symmetric_pairs(net))
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": networks.vit()})})
    assert set(named_weights(wrapped)) == {name for name, _ in networks.vit().named_parameters()}
    assert all(p.module.startswith("vit") for p in find_symmetric_pairs(wrapped))


def tied(how):
    """A small language model whose tables are one tensor, tied as people tie them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11, bias=False))
    if how == "one Parameter":
        net[3].weight = net[0].weight
    elif how == ".data":
        net[3].weight.data = net[0].weight.data
    elif how == "nn.Parameter(w)":
        net[3].weight = nn.Parameter(net[0].weight)
    elif how == "half frozen":
        net[3].weight = nn.Parameter(net[0].weight, requires_grad=False)
    elif how == "expanded":
        net[3].weight = nn.Parameter(torch.randn(1, 6).expand(11, 6))
    elif how == "cache":
        net.register_buffer("table", net[0].weight.data.mT)
    elif how == "overlapping":
        both = torch.randn(17, 6)
        net[0].weight, net[3].weight = nn.Parameter(both[:11]), nn.Parameter(both[6:])
    return net


@pytest.mark.parametrize("how", [".data", "nn.Parameter(w)", "half frozen", "expanded", "cache", "overlapping"])
def test_parameters_that_share_memory_are_refused(how):
    """Copies of two Parameters move apart, where the network has one number: a value of another network."""
    batch = torch.arange(11), 3 * torch.arange(11) % 11
    model = tied(how)
    for measured in (
        lambda: sharpness.evaluate(model, [batch], measure="euclidean", rho=0.3),
        lambda: sharpness.gradient_norm(model, [batch], measure="adaptive"),
        lambda: sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.3, measure="euclidean"),
        lambda: distance(model, {}),
    ):
        with pytest.raises(ValueError, match=r"share memory but are two tensors|is expanded"):
            measured()


def test_tied_parameters_and_disjoint_views_are_measured():
    assert len(trainable(tied("one Parameter"))) == 3
    columns, views = torch.randn(6, 12), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    views[0].weight, views[1].weight = nn.Parameter(columns[:, ::2]), nn.Parameter(columns[:, 1::2])
    assert len(trainable(views)) == 4
    assert len(trainable(nn.LSTM(4, 4, 2))) == 8


def test_points_of_a_manifold_are_not_measured_as_flat_weights():
    net = nn.Linear(3, 4)
    net.weight = geoopt.ManifoldParameter(torch.eye(4, 3), manifold=geoopt.Stiefel())
    batch = torch.randn(5, 3), torch.arange(5) % 4
    with pytest.raises(ValueError, match=r"'weight' is a point of the manifold Stiefel.*only="):
        sharpness.evaluate(net, [batch], measure="euclidean", rho=0.1)
    with pytest.raises(ValueError, match=r"'weight' is a point of the manifold Stiefel"):
        sharpness.GeodesicSAM(net, torch.optim.SGD(net.parameters(), 0.1), rho=0.1, measure="euclidean")
    assert float(sharpness.evaluate(net, [batch], measure="euclidean", rho=0.1, only="bias")) > 0

import torch

from quotient_manifolds.batches import tree_map
from quotient_manifolds.symmetries.whole import register_wiring, verify_whole, wiring_of
from tests.whole_networks import build, forward, inputs


def test_every_kind_is_certified_and_moved():
    for family in ("dinov2", "bert", "qwen3", "t5"):
        report = verify_whole(build(family), next(inputs(family)), forward=forward)
        assert report.ok, report
        assert set(report.residuals) <= set(report.changes)
        assert max(report.changes.values()) < 1e-10


def test_a_wrong_wiring_is_found_by_gradient_and_by_move():
    """A norm in the stack of BERT is read by the residual too."""

    class Wrong(type(build("bert"))):
        pass

    @register_wiring(Wrong)
    def wrong(model):
        model.__class__ = Wrong.__base__
        wiring = wiring_of(model)
        model.__class__ = Wrong
        first = wiring.sites[0]
        wiring.sites[0] = type(first)(first.name, first.norm, first.readers)
        return wiring

    model = build("bert")
    model.__class__ = Wrong
    report = verify_whole(model, next(inputs("bert")), forward=forward)
    assert {"gain", "shift"} <= set(report.failures)
    assert min(report.residuals["gain"], report.changes["gain"]) > 1e-3
    assert "NOT A SYMMETRY" in str(report)


def test_the_model_stays():
    model = build("vit").float().train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    batch = {key: value.float() for key, value in next(inputs("vit")).items()}
    assert verify_whole(model, batch, forward=forward, classes=True).ok
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert model.training


def test_losses_and_hidden_states_are_not_what_is_compared():
    """With labels the first output is a loss, and T5 returns its encoder's states, which gains change."""
    for family, classes in (("bert", True), ("t5", False)):
        model, batch = build(family), next(inputs(family))
        report = verify_whole(model, batch, classes=classes)
        assert report.ok, report
        assert {"qk", "vo"} <= set(report.residuals)
    model, batch = build("bert"), next(inputs("bert"))
    labels = torch.zeros(len(batch["input_ids"]), dtype=torch.long)
    assert max(verify_whole(model, batch | {"labels": labels}, classes=True).changes.values()) > 0


def test_a_gradient_that_is_not_a_number_certifies_nothing():
    """Python's max passed over NaN, and the kind had a residual of 0."""

    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("torch-pre")

        def forward(self, x):
            y = self.inner(x)
            return (y - y).abs().sqrt() + y

    @register_wiring(Root)
    def wiring(model):
        return wiring_of(model.inner)

    report = verify_whole(Root(), next(inputs("torch-pre")))
    assert any(residual != residual for residual in report.residuals.values())
    assert not report.ok


def test_gradients_are_on_whatever_the_caller_switched_off():
    model, batch = build("bert"), next(inputs("bert"))
    expected = verify_whole(model, batch, forward=forward)
    with torch.no_grad():
        assert verify_whole(model, batch, forward=forward) == expected
    with torch.inference_mode():
        assert verify_whole(model, tree_map(torch.clone, batch), forward=forward) == expected

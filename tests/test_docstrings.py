"""Everything public says what it is, what goes in and out, and shows it in an example that runs (by doctest)."""

import importlib
import inspect

import pytest

#: What a user may import; the API reference lists the same.
PUBLIC = [
    "reproduction.finetune",
    "reproduction.recipes",
    "reproduction.collection",
    "quotient_manifolds",
    "quotient_manifolds.adapters",
    "quotient_manifolds.optim",
    "quotient_manifolds.optim.rules",
    "quotient_manifolds.pymanopt",
    "quotient_manifolds.symmetries",
    "quotient_manifolds.symmetries.whole",
    "quotient_manifolds.testing",
    "sharpness",
    "sharpness.ascent",
    "sharpness.curvlinops",
    "sharpness.data",
    "sharpness.lightning",
    "sharpness.losses",
    "sharpness.models",
    "sharpness.plots",
    "sharpness.study",
    "sharpness.transformers",
]


def members():
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            found = getattr(importlib.import_module(module), name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield pytest.param(found, id=f"{module}.{name}")


@pytest.mark.parametrize("found", list(members()))
def test_a_summary_parameters_and_an_example(found):
    text = inspect.getdoc(found) or ""
    assert ">>>" in text.partition("Examples\n--------")[2], "no example that runs"
    if inspect.isclass(found):
        fields = [name for name in getattr(found, "__dataclass_fields__", ()) if not name.startswith("_")]
        assert not fields or "Attributes\n----------" in text
        for name in fields:
            assert name in text, f"the field {name} is not explained"
        return
    parameters = [n for n, p in inspect.signature(found).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert not parameters or "Parameters\n----------" in text
    for name in parameters:
        assert name in text, f"the parameter {name} is not explained"
    returns = inspect.signature(found).return_annotation
    assert returns in (None, "None") or "Returns\n-------" in text or "Yields\n------" in text


def test_the_checks_see_a_bare_docstring():
    def bare(x):
        """Do something."""

    with pytest.raises(AssertionError, match="no example"):
        test_a_summary_parameters_and_an_example(bare)

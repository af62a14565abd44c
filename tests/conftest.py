"""Float64 by default, fixed seeds, and small networks."""

import os

import hypothesis
import pytest
from _pytest.doctest import DoctestModule

hypothesis.settings.register_profile("project", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("project")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Seek no examples in tests, and leave what helps them to whom it helps: sooner, it is imported in vain."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.fixture(autouse=True, scope="session")
def _seed_what_is_there():
    """Let ``torch.manual_seed`` not keep the call and its stack for devices that are missing: up to 1.4 ms a call."""
    import torch

    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        if hasattr(module, "_lazy_call") and not getattr(torch, module.__name__.split(".")[1]).is_available():
            module._lazy_call = lambda function, **_: None


@pytest.fixture(autouse=True)
def _float64_and_seed(_as_a_user):
    import torch

    torch.set_default_dtype(torch.float64)  # the fixture of the folder above puts back what was, and seeds

"""Examples in docstrings run as a user's do: in single precision, whatever ran before; seeded."""

import gc

import pytest


def pytest_collection_finish():
    """Exempt imported modules from garbage collection, which would otherwise traverse them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Let libraries clean up."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _as_a_user():
    import torch  # not by the process that only hands out tests to others

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)

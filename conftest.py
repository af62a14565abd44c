"""Examples in docstrings run as a user's do: in single precision, whatever ran before; seeded."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_a_user():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)

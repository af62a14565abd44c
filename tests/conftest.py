"""Float64 by default, fixed seeds, and small networks.

``SEEDS_MOVED_BY=N`` moves every seed that a test sets: what passes by the luck of a seed fails there.
"""

import os

import hypothesis
import pytest

hypothesis.settings.register_profile("project", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("project")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_MOVED_BY = int(os.environ.get("SEEDS_MOVED_BY", "0"))


@pytest.fixture(autouse=True)
def _float64_and_seed(_as_a_user, monkeypatch):
    import torch

    if _MOVED_BY:
        seed = torch.random.manual_seed
        monkeypatch.setattr(torch, "manual_seed", lambda number: seed(int(number) + _MOVED_BY))

    torch.set_default_dtype(torch.float64)  # the fixture of the folder above puts back what was
    torch.manual_seed(0)

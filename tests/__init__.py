"""Tests. ``MOVE_SEEDS=N`` moves every seed that a test sets, in its processes too: what passes by luck fails there."""

import os

if os.environ.get("MOVE_SEEDS"):
    import torch

    _seed, _by = torch.manual_seed, int(os.environ["MOVE_SEEDS"])
    torch.manual_seed = torch.random.manual_seed = lambda seed: _seed(int(seed) + _by)

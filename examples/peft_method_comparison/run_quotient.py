"""The quotient optimisers in PEFT's method comparison, whose ``run.py`` takes optimisers by name.

Run it in ``method_comparison/MetaMathQA`` of a checkout of peft, with the experiments beside this file copied there:
``python run_quotient.py -v experiments/lora/llama-3.2-3B-rank32-quotient-muon``. ``"optimizer_type"`` in an
experiment's ``training_params.json`` is then ``"QuotientMuon"`` or ``"QuotientAdam"``, and ``"optimizer_kwargs"`` goes
to :func:`quotient_manifolds.optim.create_quotient_lora_optimizer`.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch

from quotient_manifolds.optim import create_quotient_lora_optimizer

NAMES = {"QuotientMuon": "muon", "QuotientAdam": "adam"}


def install(utils: Any) -> None:
    """Teach the comparison's module ``utils`` these names; others it looks up in ``torch.optim``."""
    original = utils.get_optimizer_and_scheduler

    def with_model(model: torch.nn.Module, *, optimizer_type: str, **options: Any) -> Any:
        for name, kind in NAMES.items():
            setattr(
                torch.optim,
                name,
                lambda _, kind=kind, **kwargs: create_quotient_lora_optimizer(model, optimizer=kind, **kwargs),
            )
        return original(model, optimizer_type=optimizer_type, **options)

    for name in NAMES:
        setattr(torch.optim, name, None)  # known when the configuration is read
    utils.get_optimizer_and_scheduler = with_model


if __name__ == "__main__":
    sys.path.insert(0, "")
    import utils  # of the comparison

    install(utils)
    runpy.run_path("run.py", run_name="__main__")

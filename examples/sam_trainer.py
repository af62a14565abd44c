"""GeodesicSAM inside transformers' ``Trainer``: a training step of two passes.

A small BERT is trained on a toy task, see ``lora_trainer.py``. Runs offline in under a minute:
``pip install '.[transformers]' accelerate``.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from toy_sentences import accuracy, sentences
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from quotient_manifolds.optim import create_quotient_optimizer
from sharpness import GeodesicSAM


class SAMTrainer(Trainer):
    """Trainer whose optimiser is a GeodesicSAM; for gradient accumulation see ``GeodesicSAM.perturbed``."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *rest: Any) -> Tensor:
        """Take the gradients at the weights, then those at the perturbed weights."""
        loss = super().training_step(model, inputs, *rest)
        with self.optimizer.optimizer.perturbed(zero_grad=True):  # accelerate wraps the optimiser
            super().training_step(model, inputs, *rest)
        return loss


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run the example; give what ``Trainer.evaluate`` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rho", type=float, default=0.05)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=2
    )
    model = BertForSequenceClassification(config)
    sam = GeodesicSAM(model, create_quotient_optimizer(model, lr=options.lr), rho=options.rho)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SAMTrainer(
            model,
            TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=32,
                max_grad_norm=0,
                lr_scheduler_type="cosine",
                warmup_steps=10,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=sentences(2048, 0),
            eval_dataset=sentences(512, 1),
            compute_metrics=accuracy,
            optimizers=(sam, None),
        )
        trainer.train()
        found: dict[str, float] = trainer.evaluate()
    print(f"accuracy {found['eval_accuracy']:.1%}")
    return found


if __name__ == "__main__":
    main()

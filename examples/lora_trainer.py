"""LoRA on the quotient inside transformers' ``Trainer``: one line.

A small BERT learns whether a sentence of made-up words holds more words of one kind than of the other. Runs offline in
under a minute: ``pip install '.[transformers,lora]'``.
"""

from __future__ import annotations

import argparse
import tempfile

import peft
import torch
from toy_sentences import accuracy, sentences
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from quotient_manifolds.optim import create_quotient_lora_optimizer


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run the example; give what ``Trainer.evaluate`` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--optimizer", choices=["adam", "muon"], default="adam")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=2,
        initializer_range=0.1,
    )
    model = peft.get_peft_model(
        BertForSequenceClassification(config),
        peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules="all-linear"),
    )
    optimizer = create_quotient_lora_optimizer(model, lr=options.lr, optimizer=options.optimizer, max_grad_norm=1.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=32,
                max_grad_norm=0,  # Euclidean clipping would depend on the representative; the optimiser clips
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
            optimizers=(optimizer, None),
        )
        trainer.train()
        found: dict[str, float] = trainer.evaluate()
    print(f"accuracy {found['eval_accuracy']:.1%}")
    return found


if __name__ == "__main__":
    main()

"""What the code in README and docs expects to find: the files it names, and the names it takes for granted."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from tests.support.networks import bert, shake

ROOT = Path(__file__).parents[2]
#: Words of one class, of the other, and of none.
WORDS = ["good", "fine", "great", "bad", "poor", "weak", "film", "plot", "a", "the", "was", "is"]


def _rows(count, seed=0):
    """Draw sentences of six words, labelled by which class has more of them."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(WORDS), size=(count, 6))
    votes = (drawn < 3).sum(1) - ((drawn >= 3) & (drawn < 6)).sum(1)
    labels = np.where(votes == 0, rng.integers(2, size=count), votes > 0)
    return [(" ".join(WORDS[i] for i in row), int(label)) for row, label in zip(drawn, labels, strict=True)]


def table(path, count, header="sentence\tlabel\n", seed=0):
    path.write_text(header + "".join(f"{text}\t{label}\n" for text, label in _rows(count, seed)), encoding="utf-8")


def small_bert(folder):
    from transformers import BertConfig, BertForSequenceClassification

    from tests.support.texts import wordpiece

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=60,
        max_position_embeddings=32, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    shake(BertForSequenceClassification(config)).save_pretrained(folder)
    wordpiece([text for text, _ in _rows(200)], 60, length=32).save_pretrained(folder)


def _vit(folder):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8,
                       patch_size=4, num_labels=2)  # fmt: skip
    shake(ViTForImageClassification(config)).save_pretrained(folder)
    settings = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _images(folder, count=6):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")


def adapter(folder, base, seed):
    import peft
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(folder)


#: A user's module, with attention that no handler knows.
MINE = """
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self, width=4, heads=2):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x).mean(1))

def model():
    torch.manual_seed(0)
    return Model()

def batches():
    return [(torch.randn(8, 4, 4), torch.randint(3, (8,)))]
"""


def build(folder):
    """Make every file that a page names."""
    (folder / "path" / "to").mkdir(parents=True)
    small_bert(folder / "path/to/bert")
    _vit(folder / "path/to/vit")
    table(folder / "data.tsv", 12, header="")
    table(folder / "dev.tsv", 256)
    table(folder / "train.tsv", 60)
    rows = "".join(f"{text}\t{text}\t{('entailment', 'neutral')[label]}\n" for text, label in _rows(20))
    (folder / "pairs.tsv").write_text("premise\thypothesis\tgold\n" + rows, encoding="utf-8")
    _images(folder / "images/train")
    for name in ("soups/model_0.pt", "train/cat/0.png", "test/cat/0.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    shutil.copy(ROOT / "tests" / "support" / "networks.py", folder / "networks.py")
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    for seed, name in enumerate(("adapter_a", "adapter_b")):
        adapter(folder / name, folder / "path/to/bert", seed)
    for name in ("one", "two", "three"):
        shutil.copytree(folder / "path/to/bert", folder / "berts" / name)
    data = {"source": "dev.tsv", "text": "sentence", "batch_size": 32, "num_examples": 32}
    sweep = {"checkpoints": "berts/*", "data": data, "test": data, "measures": ["adaptive"], "rho": [0.1, 0.2],
             "steps": 2}  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(sweep), encoding="utf-8")


def taken_for_granted(page):
    """Names that a page uses without a definition, because its reader has them."""
    if page == "docs/howto/lora.md":
        import peft

        base = bert()
        lora = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query"]))
        return {"model": lora, "base": base, "peft": peft}
    if page.startswith("docs/guides") or page in ("docs/howto/sam.md", "docs/results/pretraining.md"):
        from tests.support import networks

        class MyAttention(torch.nn.Module):
            """Named by the page."""

        model, batch = networks.vit(), networks.images()
        known = {"model": model, "batch": batch, "batches": [batch], "loader": [batch], "torch": torch}
        known["loss_fn"] = lambda m, b: torch.nn.functional.cross_entropy(m(b[0]).logits, b[1])
        return {**known, "MyAttention": MyAttention}
    if page == "docs/howto/training.md":
        return _trainings()
    return {}


def _trainings():
    """A Trainer, Lightning's module with its settings, and a loop."""
    import lightning.pytorch as lightning
    from transformers import Trainer, TrainingArguments

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = bert(layers=1)

        def forward(self, **batch):
            return self.net(**batch)

        def training_step(self, batch, index):
            return self(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    ids = torch.randint(20, (64, 6), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": int(row.sum()) % 3} for row in ids]
    arguments = TrainingArguments("trained", max_steps=50, report_to=[], use_cpu=True, save_strategy="no")
    model = bert(layers=1)
    settings = {"max_steps": 50, "accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False,
                "enable_model_summary": False}  # fmt: skip
    known = {"trainer": Trainer(bert(layers=1), arguments, train_dataset=dataset), "dataset": dataset, "model": model}
    known |= {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "lightning": lightning, "module": Module()}
    batch = {"input_ids": ids, "labels": torch.tensor([row["labels"] for row in dataset])}
    known["loader"] = torch.utils.data.DataLoader([batch], batch_size=None)
    known["settings"] = settings | {"logger": lightning.loggers.CSVLogger("logged")}
    return known | {"loss_fn": lambda model, batch: model(**batch).loss}

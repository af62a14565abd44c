"""Callbacks of transformers' Trainer and of Lightning: what stands in logs, and trainings that do not notice."""

import csv
import json
import warnings

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import sharpness
import sharpness.lightning
import sharpness.transformers
from tests.support.networks import Encoder, bert, tokens

QUANTITIES = ["geodesic-inv", "gradient-norm", "euclidean-hessian", "critical", "critical-relative"]
STEPS = 6


@pytest.fixture(autouse=True)
def _as_users_train(monkeypatch):
    torch.set_default_dtype(torch.float32)
    warnings.simplefilter("ignore")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)


def events(folder):
    """Scalars of the event file by tag."""
    (file,) = [p for p in folder.rglob("events.out*") if "args" not in p.name]
    found = EventAccumulator(str(file.parent))
    found.Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def generators():
    return torch.get_rng_state().tolist()


# -- transformers ------------------------------------------------------------------------------------------------------


def sentences(count=36):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(20, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum()) % 3} for row in rows]


def as_batch(rows):
    return {
        "input_ids": torch.stack([r["input_ids"] for r in rows]),
        "labels": torch.tensor([r["labels"] for r in rows]),
    }


BATCHES, OTHER = [as_batch(sentences()[:12]), as_batch(sentences()[12:24])], [as_batch(sentences()[24:36])]


def trainer(folder, **options):
    torch.manual_seed(0)
    model = bert(layers=1, hidden_dropout_prob=0.2).train()
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=6, gradient_accumulation_steps=2, learning_rate=1e-3,
        logging_steps=2, save_steps=1, save_only_model=True, report_to=["tensorboard"], use_cpu=True,
        disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=sentences()[:24], eval_dataset=sentences(8))


def run(folder, add=lambda trainer: None, **options):
    """Train; what is the same in two trainings that are the same."""
    made = trainer(folder, **options)
    add(made)
    made.train()
    own = [{k: v for k, v in e.items() if not k.endswith(("_runtime", "_second"))} for e in made.state.log_history]
    own = [e for e in own if not any(k.startswith("sharpness/") for k in e)]
    return made, ([p.tolist() for p in made.model.state_dict().values()], own, generators())


def monitored(made, **options):
    options = {"quantities": QUANTITIES, "other": OTHER, "steps": 2, "every": 3, **options}
    made.add_callback(sharpness.transformers.SharpnessCallback(made, BATCHES, **options))


class Drawing(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            torch.rand(1)


def stored(folder, step, made):
    """The model of a checkpoint."""
    return type(made.model).from_pretrained(folder / f"checkpoint-{step}")


def expected(model, before):
    """What the functions say of a model and of its last step."""
    before = before.state_dict()
    return {
        "geodesic-inv@0.1": float(sharpness.evaluate(model, BATCHES, steps=2, progress=False)),
        "gradient-norm": float(sharpness.gradient_norm(model, BATCHES, progress=False)),
        "euclidean-hessian": float(sharpness.hessian(model, BATCHES, measure="euclidean", progress=False)),
        "critical": sharpness.critical_sharpness(model, BATCHES, before=before),
        "critical-relative": sharpness.critical_sharpness(model, OTHER, before=before),
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    return run(tmp_path_factory.mktemp("plain"))[1]


def test_a_trainer_trains_as_without_it_and_logs_what_the_functions_say(plain, tmp_path, capsys):
    """Bit for bit, with dropout and accumulation; and the trainer's own log is whole."""
    made, found = run(tmp_path, monitored)
    assert found == plain
    logged = [e for e in made.state.log_history if any(k.startswith("sharpness/") for k in e)]
    assert [e["step"] for e in logged] == [3, 6]
    scalars = events(tmp_path)
    (last,) = tmp_path.glob(f"checkpoint-{STEPS}/trainer_state.json")
    saved = json.loads(last.read_text(encoding="utf-8"))["log_history"]
    assert [e for e in saved if "sharpness/gradient-norm" in e] == logged
    for entry in logged:
        step = entry["step"]
        values = {
            f"sharpness/{name}": value
            for name, value in expected(*(stored(tmp_path, s, made) for s in (step, step - 1))).items()
            if value is not None
        }
        assert len(values) >= 4
        assert {k: v for k, v in entry.items() if k not in ("step", "epoch")} == pytest.approx(values, rel=1e-6)
        assert {k: scalars[f"train/{k}"][step] for k in values} == pytest.approx(values, rel=1e-6)


def test_a_callback_that_draws_a_number_is_noticed(plain, tmp_path, capsys):
    assert run(tmp_path, lambda made: made.add_callback(Drawing()))[1] != plain


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_at_evaluations(strategy, tmp_path, capsys):
    """Of two data sets once; the step before an evaluation is that of the critical sharpness."""
    options = {"eval_strategy": strategy, "eval_steps": 3}
    quantities = {"every": None, "quantities": ["geodesic-inv", "critical"], "other": None}
    _, plain = run(tmp_path / "plain", **options)
    made, found = run(tmp_path / "measured", lambda made: monitored(made, **quantities), **options)
    assert found == plain
    logged = [e for e in made.state.log_history if "sharpness/geodesic-inv@0.1" in e]
    assert [e["step"] for e in logged] == ([3, 6] if strategy == "steps" else [2, 4, 6])
    step = logged[0]["step"]
    after, before = (stored(tmp_path / "measured", s, made) for s in (step, step - 1))
    value = sharpness.critical_sharpness(after, BATCHES, before=before.state_dict())
    assert logged[0]["sharpness/critical"] == pytest.approx(value, rel=1e-6)
    made.evaluate({"a": sentences(4), "b": sentences(8)})
    again = [e for e in made.state.log_history if "sharpness/geodesic-inv@0.1" in e][len(logged) :]
    assert [("sharpness/critical" in e, e["step"]) for e in again] == [(False, STEPS)]  # no step led there


def test_under_autocast(tmp_path, capsys):
    """Measured as it is trained, and trained as if it were not measured."""
    quantities = ["adaptive", "gradient-norm"]
    _, plain = run(tmp_path / "plain", bf16=True)
    made, found = run(
        tmp_path / "measured", lambda m: monitored(m, quantities=quantities, other=None, every=4), bf16=True
    )
    assert found == plain

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    model = stored(tmp_path / "measured", 4, made)
    value = float(sharpness.gradient_norm(model, BATCHES, loss_fn, progress=False))
    (logged,) = [
        e["sharpness/gradient-norm"]
        for e in made.state.log_history
        if "sharpness/gradient-norm" in e and e["step"] == 4
    ]
    assert logged == pytest.approx(value, rel=0.05)  # both are in half precision, rounded at other places


def test_a_callback_belongs_to_one_trainer(tmp_path):
    one, two = trainer(tmp_path / "one"), trainer(tmp_path / "two")
    callback = sharpness.transformers.SharpnessCallback(one, BATCHES)
    two.add_callback(callback)
    with pytest.raises(ValueError, match="logs to another Trainer than the one that runs; make one for each"):
        two.train()
    with pytest.raises(TypeError, match=r"trainer must be the transformers\.Trainer that logs, got BertForSeq"):
        sharpness.transformers.SharpnessCallback(one.model, BATCHES)
    with pytest.raises(ValueError, match="unknown quantity 'flatness'"):
        sharpness.transformers.SharpnessCallback(one, BATCHES, quantities=["flatness"])


@pytest.mark.parametrize(("every", "why"), [(None, "there was no evaluation"), (9, "it ended before 9 steps")])
def test_a_training_that_measured_nothing_says_so(every, why, tmp_path):
    made = trainer(tmp_path)
    monitored(made, every=every)
    with pytest.warns(UserWarning, match=f"nothing was measured in this training: {why}"):
        made.train()
    with pytest.warns(UserWarning, match=f"nothing was measured in this training: {why}"):
        fit(tmp_path, in_lightning(every=every))


def test_a_trainer_stops_early_and_keeps_the_best_by_what_is_measured(tmp_path, capsys):
    options = {"metric_for_best_model": "sharpness/geodesic-inv@0.1", "greater_is_better": False}
    made = trainer(tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, **options)
    monitored(made, every=None, quantities=["geodesic-inv"], other=None)
    made.add_callback(EarlyStoppingCallback(2, early_stopping_threshold=1e9))  # so large that nothing is better
    made.train()
    logged = [e["sharpness/geodesic-inv@0.1"] for e in made.state.log_history if "sharpness/geodesic-inv@0.1" in e]
    assert len(logged) == made.state.global_step == 3 < STEPS
    assert made.state.best_metric == min(logged)
    assert made.evaluate()["eval_sharpness/geodesic-inv@0.1"] == pytest.approx(min(logged), rel=1e-6)


@pytest.fixture
def shown(monkeypatch):
    """Whether measurements show their progress, one after the other."""
    asked, bar = list[bool](), sharpness.evaluation.progress_bar

    def recorded(*arguments, progress):
        asked.append(progress)
        return bar(*arguments, progress=progress)

    monkeypatch.setattr(sharpness.evaluation, "progress_bar", recorded)
    return asked


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_where_the_trainer_shows_its_own(progress, shown, tmp_path, capsys):
    made = trainer(tmp_path)
    monitored(made, quantities=["adaptive"], other=None)
    made.args.disable_tqdm = not progress
    made.train()
    assert shown == [progress] * 2
    shown.clear()
    bar = [TQDMProgressBar()] if progress else []
    fit(tmp_path, in_lightning(quantities=["adaptive"], other=None), *bar, enable_progress_bar=progress)
    assert shown == [progress] * 2


# -- Lightning ---------------------------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Encoder(dropout=0.2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("tested", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Keep(lightning.Callback):
    """Keep the weights after every step."""

    def __init__(self):
        self.weights = {}

    def on_train_batch_end(self, trainer, module, *_):
        self.weights[trainer.global_step] = {k: v.clone() for k, v in module.state_dict().items()}


class DrawingToo(lightning.Callback):
    def on_train_batch_end(self, *_):
        torch.rand(1)


PAIRS, OTHERS = (
    [tuple(t.float() if t.is_floating_point() else t for t in tokens(8, seed=s)) for s in (1, 2)],
    [tuple(t.float() if t.is_floating_point() else t for t in tokens(8, seed=3))],
)


def fit(folder, *callbacks, validate=False, **options):
    module, keep = Module(), Keep()
    x, y = (torch.cat(parts) for parts in zip(*PAIRS, strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="board")]
    own = {"max_steps": STEPS, "logger": loggers, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
    made = lightning.Trainer(
        **{**own, "enable_progress_bar": False, **options}, accelerator="cpu", devices=1, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[keep, *callbacks],
    )  # fmt: skip
    made.fit(module, loader, DataLoader(TensorDataset(x, y), batch_size=16) if validate else None)
    return made, keep.weights, ([p.tolist() for p in module.state_dict().values()], generators())


def in_lightning(**options):
    options = {"quantities": QUANTITIES, "other": OTHERS, "steps": 2, "every": 3, **options}
    return sharpness.lightning.SharpnessMonitor(PAIRS, **options)


def rows(folder):
    (file,) = folder.rglob("metrics.csv")
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trains_as_without_it_and_logs_what_the_functions_say(precision, tmp_path, capsys):
    _, _, plain = fit(tmp_path / "plain", precision=precision)
    _, weights, found = fit(tmp_path / "measured", in_lightning(), precision=precision)
    assert found == plain
    assert fit(tmp_path / "drawn", DrawingToo(), precision=precision)[2] != plain
    own = [
        [{k: v for k, v in r.items() if "sharpness/" not in k} for r in rows(tmp_path / n)]
        for n in ("plain", "measured")
    ]
    assert [r for r in own[1] if r["loss"]] == own[0]
    logged = {int(r["step"]): r for r in rows(tmp_path / "measured") if r["sharpness/geodesic-inv@0.1"]}
    assert list(logged) == [3, 6]
    scalars, model = events(tmp_path / "measured"), Module()
    for step, row in logged.items():
        model.load_state_dict(weights[step])
        before = weights[step - 1]
        values = {
            "geodesic-inv@0.1": float(sharpness.evaluate(model, PAIRS, steps=2, progress=False)),
            "gradient-norm": float(sharpness.gradient_norm(model, PAIRS, progress=False)),
            "euclidean-hessian": float(sharpness.hessian(model, PAIRS, measure="euclidean", progress=False)),
            "critical": sharpness.critical_sharpness(model, PAIRS, before=before),
            "critical-relative": sharpness.critical_sharpness(model, OTHERS, before=before),
        }
        values = {f"sharpness/{k}": v for k, v in values.items() if v is not None}
        assert len(values) >= 4
        assert {k: float(v) for k, v in row.items() if k in values} == pytest.approx(values, rel=1e-6)
        assert {k: scalars[k][step] for k in values} == pytest.approx(values, rel=1e-6)


def test_lightning_at_validations(tmp_path, capsys):
    """Not in the check before the training."""
    options = {"validate": True, "val_check_interval": 2}
    _, _, plain = fit(tmp_path / "plain", **options)
    _, weights, found = fit(tmp_path / "measured", in_lightning(every=None), **options)
    assert found == plain
    logged = [r for r in rows(tmp_path / "measured") if r["sharpness/gradient-norm"]]
    assert [int(r["step"]) for r in logged] == [1, 2, 3, 4, 5, 6]
    model = Module()
    model.load_state_dict(weights[4])
    value = sharpness.critical_sharpness(model, PAIRS, before=weights[3])
    assert float(logged[3]["sharpness/critical"]) == pytest.approx(value, rel=1e-6)


def test_lightning_stops_early_by_what_is_measured(tmp_path, capsys):
    stopping = EarlyStopping("sharpness/geodesic-inv@0.1", patience=2, min_delta=1e9)
    monitor = in_lightning(every=None, quantities=["geodesic-inv"], other=None)
    made, *_ = fit(tmp_path, monitor, stopping, validate=True, val_check_interval=2)
    logged = [float(r["sharpness/geodesic-inv@0.1"]) for r in rows(tmp_path) if r["sharpness/geodesic-inv@0.1"]]
    assert len(logged) == made.global_step == 3 < STEPS
    assert float(stopping.best_score) == pytest.approx(logged[0], rel=1e-6)


def test_lightning_without_a_logger(tmp_path):
    with pytest.raises(ValueError, match="the trainer has no logger for the sharpness; pass one"):
        fit(tmp_path, in_lightning(), logger=False)

"""What the packages say of every architecture: right, refused with a reason, wrong, or a crash.

``python -m tests.support.verdicts FILE`` judges every model in a process of its own, writes one JSON line each, and
goes on where an earlier call ended; ``--table`` writes the counts of FILE into docs/tables/verdicts.csv.
"""

import argparse
import collections
import csv
import json
import os
import re
import resource
import sys
import traceback
import warnings
from pathlib import Path

import torch

import sharpness
from quotient_manifolds.passes import Wide, default_forward, floats
from quotient_manifolds.symmetries import Cause, UnknownAttentionError, check_coverage, find, stacks
from quotient_manifolds.symmetries.orbits import move_stacks_
from quotient_manifolds.weights import weights_of
from tests.support import tiny

TABLE = Path(__file__).parents[2] / "docs/tables/verdicts.csv"
MEASURES = ("geodesic-inv", "complete-inv")
#: Seconds of processor time for one model.
LIMIT = 120
#: What the table says for a part of a sentence; the first part that a sentence has decides.
REASONS = {
    Cause.UNNAMED.value: "names of weights say too little", Cause.UNREACHED.value: "not reached by the batch",
    Cause.UNCERTIFIED.value: "the gradient is zero", "no symmetry was found": "no symmetry with a quotient",
    "computes attention": "attention of an unknown class", "has no trainable parameter": "nothing to train",
    "in the canonical form of": "its canonical form has another loss",
}  # fmt: skip


@torch.no_grad()
def moved_(pairs, weights):
    """Move all pairs at the condition number of the guide, 10."""
    move_stacks_(stacks(pairs, weights), weights, 10.0, 1)


def forward(model, batch):
    """Run a model in float64 throughout, with the same random numbers every time."""
    torch.manual_seed(0)
    with Wide():
        return default_forward(model, batch)


def loss(model, batch):
    """Compare all outputs with random targets."""
    outputs = [t[t.isfinite()] for t in floats(forward(model, batch)) if t.requires_grad or not torch.is_grad_enabled()]
    generator = torch.Generator().manual_seed(5)
    return sum((t - torch.randn(t.shape, generator=generator, dtype=t.dtype)).square().mean() for t in outputs)


def change(before, after):
    """Give the largest change of a finite output, in units of the largest one."""
    pairs = [(b[b.isfinite()], a[b.isfinite()]) for b, a in zip(before, after, strict=True)]
    scale = max(float(b.abs().max()) for b, _ in pairs if b.numel())
    return float(torch.stack([(a - b).abs().max() for b, a in pairs if b.numel()]).max()) / scale


def refusal(error):
    """Give the sentence of an error of the packages; None for a crash."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    own = re.search(r"/(quotient_manifolds|sharpness)/", last)
    return f"{type(error).__name__}: {error}".splitlines()[0] if own and isinstance(error, ValueError) else None


def crash(error):
    """Describe what no user should see."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"crash: {type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})".replace(
        "\n", " "
    )


def judge_pairs(model, batch):
    """Find the pairs of a model with a batch; say what they are worth, the reasons of others, and the pairs."""
    try:
        found = find(model, batch).of_full_rank()
    except Exception as error:
        said = refusal(error)
        return (f"refused: {said}" if said else crash(error)), [], []
    pairs, reasons, weights = found.pairs, sorted({r.reason for r in found.refused}), weights_of(model)
    if not pairs:
        try:
            check_coverage(model, lambda: forward(model, batch), found)
        except UnknownAttentionError as error:
            return ("none, with a reason" if reasons else f"wrong: no pair and no reason: {error}"), reasons, []
        except Exception as error:
            return crash(error), reasons, []
        return ("none, with a reason" if reasons else "no attention"), reasons, []
    with torch.no_grad():
        before = floats(forward(model, batch))
        kept = {weights[name]: weights[name].clone() for p in pairs for name in p.names}
        moved_(pairs, weights)
        far = change(before, floats(forward(model, batch)))
        way = max(float((t - old).abs().max()) for t, old in kept.items())
        for t, old in kept.items():
            t.copy_(old)
    if not far <= 1e-9 or not way > 0.01:
        return f"wrong: moves of {way:.1g} change the outputs by {far:.1e}", reasons, pairs
    return "right", reasons, pairs


def judge_measure(model, batch, pairs, measure):
    """Measure a model here and where its own symmetries move it."""
    kept, weights = [(p, p.detach().clone()) for p in model.parameters()], weights_of(model)
    values = []
    try:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = sharpness.evaluate(model, [batch], loss, measure=measure, rho=0.05, steps=2, progress=False)
            values.append(float(result[0.05]))
            moved_(pairs, weights)
    except Exception as error:
        said = refusal(error)
        return f"refused: {said}" if said else crash(error)
    finally:
        with torch.no_grad():
            for p, old in kept:
                p.copy_(old)
    one, two = values
    far = abs(one - two) / abs(one) if one else abs(two)
    return "right" if far <= 1e-8 and one > 0 else f"wrong: {one:.12g}, and {two:.12g} after moves"


def judge(library, name, measures=MEASURES):
    """Build a model, and say what the packages make of it."""
    torch.set_default_dtype(torch.float32)
    row = {"library": library, "model": name}
    try:
        model, batch = tiny.MODELS[library](name)
        with torch.no_grad():
            forward(model, batch)
    except Exception as error:
        return row | {"left out": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    row["pairs"], row["reasons"], pairs = judge_pairs(model, batch)
    return row | {measure: judge_measure(model, batch, pairs, measure) for measure in measures}


def apart(work, *args):
    """Call a function in a process of its own, which may die."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        try:
            row = work(*args)
        except Exception as error:
            row = {"library": args[0], "model": args[1], "pairs": crash(error)}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"library": args[0], "model": args[1], "pairs": "crash: killed"}


def word(verdict):
    """Give the first words of a verdict."""
    return verdict.split(":")[0]


def answer(row, question):
    """Give a verdict in a few words, with its reason, without names and numbers."""
    verdict = row.get(question, "crash")
    if question == "pairs" and word(verdict) == "none, with a reason":
        return "no pair: " + " or ".join(sorted({short(reason) for reason in row["reasons"]}))
    if word(verdict) != "refused":
        return word(verdict)
    return "refused: " + short(verdict)


def short(sentence):
    """Give the reason in a sentence, in a few words."""
    return next((words for part, words in REASONS.items() if part in sentence), sentence)


def counts(rows):
    """Count the models of every library by answer, a column for every question, right ones first."""
    questions = ("pairs", *MEASURES)
    for library in tiny.NAMES:
        judged = [r for r in rows if r["library"] == library and "pairs" in r]
        found = {q: collections.Counter(answer(r, q) for r in judged) for q in questions}
        answers = sum(found.values(), collections.Counter())
        order = sorted(answers, key=lambda a: (word(a) != "right", word(a), -answers[a]))
        yield from ([library, a, *(found[q][a] or "" for q in questions)] for a in order)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="library:model; by default all")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th model from the I-th, to share the work")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    rows = (
        [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
        if options.file.exists()
        else []
    )
    if options.table:
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["library", "answer", "pairs", *MEASURES])
            writer.writerows(counts(rows))
        return
    wanted = [tuple(n.split(":")) for n in options.names] or [(lib, n) for lib in tiny.NAMES for n in tiny.NAMES[lib]()]
    first, step = map(int, options.part.split("/"))
    known = {(r["library"], r["model"]) for r in rows} if not options.names else set()
    tiny.warm()
    for key in wanted[first::step]:
        if key not in known:
            row = apart(judge, *key)
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if options.names:
                json.dump(row, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

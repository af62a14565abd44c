"""One case: what it runs, and what was promised of its end."""

import contextlib
import gc
import hashlib
import io
import itertools
import os
import shutil
import signal
import tempfile
import traceback
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from quotient_manifolds import adapters as lora
from quotient_manifolds.errors import is_mendable
from sharpness import models
from tests.support.fuzzing.calls import calls, in_memory, manifolds
from tests.support.fuzzing.commands import adapters, commands, datasets, folders, results, sweeps
from tests.support.fuzzing.values import HangError, main_of
from tests.support.fuzzing.world import read_tensors, within

PACKAGES = {"quotient_manifolds", "sharpness"}
LIMIT = 60.0
#: With their shares of a thousand cases.
SURFACES = {
    folders: 180,
    datasets: 180,
    sweeps: 150,
    results: 110,
    commands: 170,
    manifolds: 70,
    calls: 140,
    adapters: 120,
    in_memory: 80,
}
BY_NAME = {f.__name__: f for f in SURFACES}


@dataclass(frozen=True)
class Failure:
    surface: str
    number: int
    kind: str
    place: str
    words: str
    what: str

    def __str__(self):
        return f"{self.surface} {self.number}: {self.kind} at {self.place}: {self.words}\n    {self.what[:300]}"


def snapshot(root):
    """Hash every file below a folder; folders count too."""
    found = {}
    for place, inner, files in os.walk(root):
        found |= {os.path.join(place, name): "folder" for name in inner}
        found |= {p: hashlib.blake2b(Path(p).read_bytes()).digest() for f in files if (p := os.path.join(place, f))}
    return found


def disturbed(before, after, world, job):
    """Tell what a case changed without leave: all but the file it was told to write and new files in such a folder."""
    outs = [os.path.normpath(os.path.join(world, p)) for p in job.outs if p]
    goes_on = job.argv is not None and job.argv[0] == "sweep" and "done" in job.argv  # and rewrites its own results
    read = [os.path.normpath(os.path.join(world, p)) for p in (job.argv or ())[1:3]]  # with all that lies in it
    mine = [p for p in outs if not any(p == r or p.startswith(r + os.sep) for r in read)]
    bad = [
        p
        for p, d in before.items()
        if after.get(p) != d and (d == "folder" or p not in mine) and not (goes_on and "/done/" in p)
    ]
    for path in after.keys() - before.keys():
        inside = any(path == o or path.startswith(o + os.sep) for o in outs)
        on_the_way = after[path] == "folder" and any(o.startswith(path + os.sep) for o in outs)
        bad += [] if inside or on_the_way else [path]
    return [os.path.relpath(p, world)[:60] for p in sorted(bad)]


def not_the_users(loaded, folder):
    """Name a parameter of a measured model that is no tensor of the folder's file."""
    if not (folder / "model.safetensors").is_file():
        return "there is no file of weights"
    found = [(t.shape, t) for t in read_tensors(folder / "model.safetensors").values()]
    for name, p in loaded.model.named_parameters():
        if not any(
            s == p.shape and torch.equal(t.to(p.dtype).nan_to_num(7), p.detach().nan_to_num(7)) for s, t in found
        ):
            return f"{name} is not in the file"
    return ""


def place_of(error):
    """Give the last line inside the packages, else the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}tests{os.sep}" not in f.filename and "site-packages" not in f.filename]
    own = [f for f in own if PACKAGES & set(Path(f.filename).parts)] or frames
    parts = Path(own[-1].filename).parts
    first = max((i for i, part in enumerate(parts) if part in PACKAGES), default=len(parts) - 3)
    return "/".join(parts[first:]) + f":{own[-1].lineno}"


def proper(error, job, surface):
    """Tell whether a function may raise this."""
    if surface == "in_memory":
        return isinstance(error, TypeError) or is_mendable(error)
    if isinstance(error, TypeError):  # Python's own word for a value of another type than the function says
        return True
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    if "geoopt" in frames[-1] or any("torch/nn/modules" in f for f in frames):  # its methods; the user's own model
        return True
    own = isinstance(error, ArithmeticError) and type(error).__module__.startswith(("quotient_manifolds", "sharpness"))
    return own or isinstance(error, (ValueError, OSError, ImportError, *job.allowed))


def ring(*_):
    raise HangError(f"more than {LIMIT:g} s")


def never(*_, **__):
    raise OSError("the demo came as far as its training")


def run_case(surface, number, base):
    """Run one case; gives its failures, and a word on how it ended."""
    rng, loads, code, error = np.random.default_rng([zlib.crc32(surface.encode()), number]), [], None, None
    out, err = io.StringIO(), io.StringIO()

    def load(*arguments, _load=models.load, **options):
        loads.append(_load(*arguments, **options))
        return loads[-1]

    with tempfile.TemporaryDirectory() as above, contextlib.ExitStack() as stack:
        above = Path(above).resolve()
        world = above / "world"
        shutil.copytree(base, world)
        (above / "beside").mkdir()
        for place in (above, above / "beside"):
            (place / "keep.txt").write_text("a neighbour's", encoding="utf-8")
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(number)
        for patch in (
            warnings.catch_warnings(), within(world), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
            mock.patch("sharpness.models.load", load), mock.patch("sharpness.demo.train", never),
            mock.patch("sharpness.study.correlation._RESAMPLES", 30),  # these take the time of a table
            mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"),
        ):  # fmt: skip
            stack.enter_context(patch)
        warnings.simplefilter("ignore")
        job = BY_NAME[surface](rng, world)
        before, ringing = snapshot(above), signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            code = (job.main or main_of(job.argv))(job.argv) if job.argv is not None else (job.call(), 0)[1]
        except SystemExit as left:
            code = left.code
        except (Exception, HangError) as caught:
            error = caught
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, ringing)
        if surface in ("adapters", "in_memory") and (code or error):
            job = replace(job, outs=())  # a folder appears when it is complete
        found = list(judge(surface, job, code, error, out.getvalue(), err.getvalue(), loads, world))
        found += [
            ("world", "-", f"{len(bad)} changed or left: {bad[0]}")
            for bad in [disturbed(before, snapshot(above), world, job)]
            if bad
        ]
    what = f"{job.what} {job.argv or ''}"
    return [Failure(surface, number, k, p, w.replace(str(above), "…"), what) for k, p, w in found], type(
        error
    ).__name__ if error else code


def judge(surface, job, code, error, out, err, loads, world):
    """Hold the end of a case against what was promised."""
    if isinstance(error, HangError):
        yield "hang", place_of(error), str(error)
    elif error is not None and (job.argv is not None or not proper(error, job, surface)):
        yield "traceback", place_of(error), f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if job.argv is None or error is not None:
        return
    lines = err.rstrip("\n").split("\n")
    if code not in (0, 1, 2) or (
        code == 2 and not lines[-1].startswith(("sharpness", "reproduction", "quotient-lora"))
    ):
        yield "refusal", "-", f"exit code {code}, stderr ends in {lines[-1][:100]!r}"
    if "Traceback" in err or (code == 2 and len(err) > 4000):
        yield "refusal", "-", f"{len(err)} characters, a traceback among them: {'Traceback' in err}"
    if surface == "adapters":
        yield from holes(job, code, out, lines, world)
        return
    if "as far as its training" in err:
        given = dict(itertools.pairwise(job.argv))
        if not (world / given.get("--out", "")).parent.is_dir():
            yield "late", "-", "the demo trains before it refuses"
    if code == 0 and job.argv[0] == "run":
        if "nan" in out.split():
            yield "nan", "-", next(v for v in out.splitlines() if "nan" in v)[:100]
        model = next(a for a in job.argv[1:] if not a.startswith("-"))
        for words in [not_the_users(m, world / model) for m in loads if m.folder]:
            if words:
                yield "not the user's", "-", words


def holes(job, code, out, lines, world):
    """Find more than one line of a refusal, NaN in what quotient-lora printed or wrote, or what it does not read."""
    if code == 2 and len(lines) > 1 and not lines[0].startswith("usage"):
        yield "refusal", "-", f"{len(lines)} lines, the last {lines[-1][:200]!r}"
    if code != 0:
        return
    if {"nan", "NaN", "inf", "Infinity", "nan,", "NaN,", "Infinity,"} & set(out.split()):
        yield "nan", "-", next(v for v in out.splitlines() if "nan" in v.lower() or "inf" in v.lower())[:100]
    for place in (world / o for o in job.outs):
        for file in place.rglob("*.safetensors"):
            bad = [key for key, t in read_tensors(file).items() if not bool(t.isfinite().all())]
            if bad:
                yield "nan", "-", f"{bad[0]} in {file.name}"
            try:
                lora.compare(file, file)
            except Exception as error:
                yield "not read", "-", f"{type(error).__name__}: {error}"[:200]
        for file in place.rglob("*.json"):
            if {"NaN", "Infinity", "-Infinity"} & set(file.read_text(encoding="utf-8").replace(",", " ").split()):
                yield "nan", "-", file.name


def chunks(cases, count=20):
    """Divide the cases by surface into about so many parts of equal size."""
    total = sum(SURFACES.values())
    for surface, share in SURFACES.items():
        parts = max(1, round(count * share / total))
        for part in range(parts):
            yield surface.__name__, range(max(1, round(cases * share / total)))[part::parts]


def run(surface, numbers, base):
    """Run cases; gives their failures and ends."""
    failures, ends = [], []
    for number in numbers:
        found, end = run_case(surface, number, base)
        failures += found
        ends.append((surface, number, str(end), [(f.kind, f.place) for f in found]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what was left open says so here, not in a later test
    return failures, ends

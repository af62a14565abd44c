"""On a terminal a bar, in a log a line a minute, nothing if nobody asks."""

import io
import re
import sys

import torch

from sharpness import evaluation, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, *, minutes=0, progress_on=True):
    clock = iter(range(0, 10_000, 60 if minutes else 1))
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.bar(5, "measuring", "step", progress=progress_on) as bar:
        bar._time = lambda: next(clock)
        bar.start_t = bar.last_print_t = 0
        for _ in range(5):
            bar.update()
    return stream.getvalue()


def test_a_log_gets_a_line_a_minute(monkeypatch):
    lines = shown(monkeypatch, io.StringIO(), minutes=5).splitlines()
    assert 2 <= len(lines) <= 5
    assert all(line.startswith("measuring: ") and " of 5 steps in " in line for line in lines)
    assert all(re.search(r"in \d\d:\d\d, \d\d:\d\d left", line) for line in lines)
    assert not any("\r" in line for line in lines)


def test_short_work_leaves_no_line(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""


def test_a_terminal_gets_a_bar_and_the_quiet_nothing(monkeypatch):
    assert "\r" in shown(monkeypatch, Terminal())
    assert shown(monkeypatch, Terminal(), progress_on=False) == ""
    assert shown(monkeypatch, io.StringIO(), progress_on=False, minutes=5) == ""


def test_steps_are_counted_and_starts_are_not(monkeypatch):
    """From the weights and from two random points: what is announced is what is done."""
    bars = []
    monkeypatch.setattr(evaluation, "progress_bar", lambda *a, **k: bars.append(progress.bar(*a, **k)) or bars[-1])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    batch = torch.eye(2), torch.arange(2)
    evaluation.evaluate(torch.nn.Linear(2, 2), [batch], measure="euclidean", rho=0.1, steps=3, restarts=2)
    assert bars[0].n == bars[0].total == 9

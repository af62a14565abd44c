"""What notebooks show: well-formed tables, in which nothing that a user named is read as HTML."""

import math
from html.parser import HTMLParser

import torch
from torch import nn

import sharpness
from quotient_manifolds.notebook import Bar, html_table
from quotient_manifolds.symmetries import ALL, GL, Symmetries, find, pair, slot, verify
from tests.support import networks


class Cells(HTMLParser):
    """The texts of cells, row by row; tags that do not fit each other are an error."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.bars, self._open = [], [], []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        assert tag in {"table", "thead", "tbody", "tr", "th", "td", "p"}
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.bars.append("gradient" in dict(attrs).get("style", ""))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_numbers_have_bars_of_their_size_and_text_is_text():
    page = html_table(
        ["<b>", "n"], [["<script>", Bar(2.0)], ["x", Bar(-1.0)], ["y", Bar(math.nan)], ["z", None]], ["&"]
    )
    assert Cells(page).rows == [["<b>", "n"], ["<script>", "2"], ["x", "-1"], ["y", "nan"], ["z", ""]]
    assert ("100%" in page, "50%" in page, page.count("gradient")) == (True, True, 2)
    assert page.endswith("<p>&amp;</p>")
    assert "<script>" not in page


def test_results_show_their_numbers():
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=[0.1, 0.2], steps=2, progress=False)
    head, *rows = Cells(result._repr_html_()).rows
    assert head[2] == "sharpness"
    assert [[float(row[1]), float(row[2])] for row in rows] == [
        [rho, float(f"{float(result[rho]):.4g}")] for rho in (0.1, 0.2)
    ]
    shares = result[0.2].by_layer()
    head, *rows = Cells(shares._repr_html_()).rows
    assert [name.removesuffix(", %") for name in head[1:]] == list(shares.by_part())
    assert (
        sum(float(cell) for row in rows for cell in row[1:] if cell) == torch.tensor(100.0).item()
        or abs(sum(float(cell) for row in rows for cell in row[1:] if cell) - 100) < 0.1
    )  # rounded
    found = sharpness.spectrum(model, [batch], k=3, progress=False)
    assert [float(row[1]) for row in Cells(found._repr_html_()).rows[1:]] == [
        float(f"{value:.4g}") for value in found.eigenvalues
    ]
    norm = sharpness.gradient_norm(model, [batch], progress=False)
    assert Cells(norm._repr_html_()).rows[1][1] == ""


def test_symmetries_and_certificates_show_what_holds():
    model, batch = networks.vit(), networks.images()
    found = find(model, scope=ALL)
    rows = Cells(found._repr_html_()).rows
    shown = {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[0] != "kind"}
    assert shown == {kind: float(f"{size:.4g}") for kind, size in found.dimensions.items()}
    bottle = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4))
    wrong = pair([slot(bottle, "0.weight", transpose=True)], [slot(bottle, "2.weight")], GL(3), name="<wrong>")
    _, row = Cells(verify(bottle, torch.randn(6, 5), Symmetries((wrong,)))._repr_html_()).rows
    assert (row[0], row[3]) == ("<wrong>", "no symmetry")
    good = verify(model, batch, find(model))
    assert {row[3] for row in Cells(good._repr_html_()).rows[1:]} == {"symmetry"}

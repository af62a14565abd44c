"""The built documentation in a real browser without a network; skipped without Chromium, or if nothing is built."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "_build"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def shown(page, tmp_path):
    """Give the page as it stands when its scripts have run, with every address but its own files unreachable."""
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom",
        "--virtual-time-budget=8000", "--host-resolver-rules=MAP * ~NOTFOUND", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, encoding="utf-8").stdout


def raw(dom):
    """Give the formulas that are shown as TeX, and those that MathJax could not read."""
    left = re.findall(r'<(?:span|div) class="math[^"]*">\s*\\[(\[].{0,60}', dom)
    return left + re.findall(r"<mjx-merror[^>]*>", dom)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.skipif(not PAGES.is_dir(), reason="the documentation is not built; make docs builds it")
def test_no_page_shows_raw_tex(tmp_path):
    dom = shown(PAGES / "math" / "measures.html", tmp_path)
    assert dom.count("<mjx-container") > 40
    assert raw(dom) == []
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css)', dom)  # nothing is fetched


def test_raw_tex_is_seen():
    assert raw(r'<span class="math notranslate nohighlight">\(x^2\)</span>')
    assert raw('<mjx-merror data-mjx-error="Undefined control sequence">')
    assert not raw('<span class="math notranslate nohighlight"><mjx-container>…</mjx-container></span>')


def test_everything_that_pages_need_is_shipped_with_them():
    conf = {}
    exec((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"), conf)
    assert "://" not in conf["mathjax_path"]
    shipped = {Path(p).name for p in conf["html_static_path"]}
    assert conf["mathjax_path"] in shipped
    for name in conf["html_css_files"]:
        assert (ROOT / "docs" / "static" / name).is_file()
    assert "tables" in conf["exclude_patterns"]  # a search finds the page that shows a table

"""Sphinx configuration. Nothing that a page needs is fetched when it is read."""

import re
import shutil
from importlib.metadata import files
from pathlib import Path
from typing import Any

import quotient_manifolds

project = "quotient-manifolds"
author = "The quotient-manifolds authors"
project_copyright = f"2026, {author}, Apache-2.0"
version = release = quotient_manifolds.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": (),
    "abort_on_example_error": True,
    "write_computation_times": False,
}
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 2
#: MathJax in one file, fonts included. Used as an extension, the package would copy 24 MB of files.
mathjax = next(f for f in files("sphinx-mathjax-offline") or () if f.name == "tex-svg.js")
mathjax_path = mathjax.name
html_static_path = ["static", str(mathjax.locate())]
html_css_files = ["pages.css"]
#: Names of attributes, which napoleon takes for references, and of which several classes have one.
suppress_warnings = ["ref.python"]
html_theme = "furo"
html_title = f"quotient-manifolds {release}"
#: Tables are parts of pages, not pages, so that a search finds the page.
exclude_patterns = ["_build", "tables", "templates"]
templates_path = ["templates"]
autosummary_imported_members = True
autosummary_ignore_module_all = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 84
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True


def one_attribute_a_line(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Write ``a, b : type`` of a section on attributes as two, which napoleon does for parameters only."""
    section = ""
    found: list[str] = []
    for i, line in enumerate(lines):
        if i + 1 < len(lines) and re.fullmatch("-{3,}", lines[i + 1]):
            section = line
        names, colon, kind = line.partition(" : ")
        several = section == "Attributes" and colon and re.fullmatch(r"\w+(, \w+)+", names)
        if not several:
            found.append(line)
            continue
        words = []
        for later in lines[i + 1 :]:
            if later and not later.startswith(" "):
                break
            words.append(later)
        *others, last = names.split(", ")
        for other in others:
            found += [f"{other} : {kind}", *words]
        found.append(f"{last} : {kind}")
    lines[:] = found


def setup(app: Any) -> None:
    """Begin with no page of a name that is gone; run before napoleon."""
    shutil.rmtree(Path(app.srcdir) / "api" / "generated", ignore_errors=True)
    app.connect("autodoc-process-docstring", one_attribute_a_line, priority=400)

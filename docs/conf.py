"""Sphinx configuration. Nothing that a page needs is fetched when it is read."""

from importlib.metadata import files

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
]
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
#: MathJax in one file, fonts included. Used as an extension, the package would copy 24 MB of files.
mathjax = next(f for f in files("sphinx-mathjax-offline") or () if f.name == "tex-svg.js")
mathjax_path = mathjax.name
html_static_path = ["static", str(mathjax.locate())]
html_css_files = ["pages.css"]
html_theme = "furo"
html_title = f"quotient-manifolds {release}"
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True

"""Sphinx configuration."""

project = "quotient-manifolds"
author = "The quotient-manifolds authors"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "myst_parser",
]
myst_enable_extensions = ["amsmath", "dollarmath"]
html_theme = "furo"
html_title = "quotient-manifolds"
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True

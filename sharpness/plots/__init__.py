"""Figures. Needs the extra ``plot``."""

from .demo import plot_symmetry_demo
from .look import check_figure, style
from .many_models import plot_sweep
from .one_model import plot_layers, plot_model, plot_profile, plot_spectra

__all__ = [
    "check_figure",
    "plot_layers",
    "plot_model",
    "plot_profile",
    "plot_spectra",
    "plot_sweep",
    "plot_symmetry_demo",
    "style",
]

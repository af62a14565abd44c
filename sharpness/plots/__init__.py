"""Figures. Needs the extra ``plot``."""

from .many_models import plot_sweep
from .one_model import plot_layers, plot_model, plot_profile, plot_spectra
from .two_models import plot_distances

__all__ = ["plot_distances", "plot_layers", "plot_model", "plot_profile", "plot_spectra", "plot_sweep"]

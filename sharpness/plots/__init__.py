"""Figures. Needs the extra ``plot``."""

from .many_models import plot_sweep
from .one_model import plot_layers, plot_model, plot_profile, plot_spectra

__all__ = ["plot_layers", "plot_model", "plot_profile", "plot_spectra", "plot_sweep"]

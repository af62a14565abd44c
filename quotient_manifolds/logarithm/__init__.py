"""Logarithm and distance on the GL(h) quotients: paths between two orbits, their minimisation, and the search."""

from .search import distance, logmap

__all__ = ["distance", "logmap"]

"""A correct manifold to be spoilt."""

from quotient_manifolds import GLQuotientInv


class Base(GLQuotientInv):
    """To be spoiled; geoopt reads the scaling rules of every class."""

    __scaling__ = GLQuotientInv.__scaling__.copy()

r"""The GL(h) quotient: pairs (G, H) that a network sees only through :math:`G H^H`.

Notation, as in the paper: :math:`x = (G, H)` with :math:`G \in K^{n \times h}`, :math:`H \in K^{m \times h}` of full
column rank, K the reals or the complex numbers; Gram matrices :math:`M = G^H G`, :math:`N = H^H H`; the group acts by
:math:`ψ(A, (G, H)) = (G A^{-1}, H A^H)`; vertical vectors are :math:`(GΛ, -HΛ^H)`.

All formulas are evaluated at the canonical representative of the point's orbit, where :math:`M = N = Σ` is diagonal:
vectors are transformed there by the (constant) group element, and the result is transformed back. By equivariance this
is exact, and no inverse depends on the condition number of the representative.
"""

from .gauge import Gauge, canonical_gauge, from_matrix
from .geodesic import GeodesicExitError
from .manifold import GLQuotientInv, GLQuotientMix
from .tangent import GLTangentSpace

__all__ = [
    "GLQuotientInv",
    "GLQuotientMix",
    "GLTangentSpace",
    "Gauge",
    "GeodesicExitError",
    "canonical_gauge",
    "from_matrix",
]

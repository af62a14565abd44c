"""What is used of geoopt, which compiles its linear algebra with torch.jit; newer versions of torch deprecate that."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script", category=FutureWarning)
    warnings.filterwarnings("ignore", "`torch.jit.script", category=DeprecationWarning)
    import geoopt
    from geoopt import ManifoldParameter
    from geoopt.manifolds.base import ScalingInfo

__all__ = ["ManifoldParameter", "ScalingInfo", "geoopt"]

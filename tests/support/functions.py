"""Functions whose maximum in a ball is sought."""

import torch


def problem(seed, dim=20):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(dim, dim, generator=generator)
    A, b = A @ A.T / dim - 0.5 * torch.eye(dim), torch.randn(dim, generator=generator)

    def f(x, wanted):
        return float(0.5 * x @ A @ x + torch.cos(b @ x)), A @ x - torch.sin(b @ x) * b if wanted else None

    return f


def shifted(seed):
    """A problem whose gradient at the origin is not zero."""
    f, centre = problem(seed), 0.3 * torch.randn(20, generator=torch.Generator().manual_seed(seed + 100))
    return lambda x, wanted: f(x + centre, wanted)


def into(f):
    """The same function, with its gradient written to memory of the caller's, as the ascents ask for it."""

    def written(x, out):
        value, gradient = f(x, out is not None)
        if out is not None:
            out.copy_(gradient)
        return value

    return written

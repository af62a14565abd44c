"""Test whether two networks were trained independently, by hidden neurons that they share in whatever order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...linalg import finite
from ...weights import check_whole, weights_of
from ..actions import State
from ..discovery import ALL, find
from ..folding import canonical_form
from ..wiring import Wiring
from .fits import assigned

#: Singular values that are smaller, relative to the largest, are rounding of float32.
_RANK = 1e-6


@dataclass(frozen=True)
class Independence:
    """What :func:`independence_test` has found.

    Attributes
    ----------
    p_value : float
        How often independent networks agree on so many neurons.
    agreeing, neurons : int
        Neurons that both halves of their weights match alike, and all that were matched.
    layers : int
        Layers of neurons; so many agree by chance, on average.

    Examples
    --------
    >>> from quotient_manifolds.symmetries.whole import Independence
    >>> Independence(0.26, 3, 24, 2).p_value < 0.001
    False
    """

    p_value: float
    agreeing: int
    neurons: int
    layers: int


class _Neurons(NamedTuple):
    """A layer of neurons in canonical form, each with a row: what they read, a gate first, and what they write."""

    gate: Tensor
    up: Tensor
    down: Tensor


@torch.no_grad()
def independence_test(one: nn.Module, other: nn.Module) -> Independence:
    r"""Test the hypothesis that two networks of one architecture were trained independently; neither is changed.

    The neurons of every layer are matched twice: by the weights into them, and by the weights out of them. In related
    networks the two matchings :math:`σ, τ` agree at most neurons. The test counts those neurons,

    .. math:: T = \sum_{\text{layers}} \#\{i : σ(i) = τ(i)\}, \qquad p = P(T' \ge T), \quad T' \sim \text{Poisson}(L)

    Why this is a p-value: the neurons of a fresh layer are independent and identically distributed, and so are the
    weights into and out of them. So in an independent network those out of them may be exchanged between neurons, with
    those into them left in place, without a change of distribution. Then :math:`σ^{-1} τ` is a uniformly random
    permutation, and its fixed points are Poisson distributed with mean 1, but for an error below
    :math:`2^m / m!` with m neurons. No draws are needed.

    Training couples both sides of a neuron, in all networks of a task alike. So of the weights out of the neurons only
    that part is matched that no linear map makes of the weights into them, and both are compared by squared cosines.
    What is left of the coupling is not covered by the argument; networks trained apart on the same data are the check
    (``studies/fingerprints.py``).

    No matching of heads or rotation of the stream comes before, which would fit both sides at once. The streams'
    coordinates are compared by rows whose index is known, embeddings X and Y of tokens, positions and pixels: as
    :math:`u^T U V^T v` with the singular vectors of :math:`X^T Y = U S V^T` for S > 0. A stream that cannot be rotated
    is compared as it is.

    Parameters
    ----------
    one, other : nn.Module
        Networks with the same layers, see :func:`register_wiring`; their heads for classes may differ.

    Returns
    -------
    Independence

    Raises
    ------
    ValueError
        Weights are not finite, no wiring is known of a network, the layers differ, or no layer has more neurons than
        the stream is wide.

    Notes
    -----
    Matching neurons by one side and testing by another is the idea of Zhu, Ahmed, Kuditipudi and Liang, *Independence
    Tests for Language Models* (ICML 2025), who compare gates and up-projections by Spearman's correlation.

    Examples
    --------
    >>> import copy, torch
    >>> from quotient_manifolds.symmetries.whole import independence_test
    >>> def network():
    ...     layer = torch.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
    ...     return torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    >>> one = network()
    >>> other = copy.deepcopy(one)
    >>> for p in other.parameters():
    ...     _ = p.data.add_(0.01 * torch.randn_like(p))
    >>> independence_test(one, other).p_value < 0.001, independence_test(one, network()).p_value < 0.001
    (True, False)
    """
    from scipy.stats import poisson  # slow to import

    with torch.device("cpu"):  # whatever the default device: matchings and draws are made there
        (layers, known), (others, theirs) = _read(one), _read(other)
        if [x.down.shape for x in layers] != [x.down.shape for x in others] or known.shape != theirs.shape:
            raise ValueError("the networks differ in their layers or embeddings; compare networks of one architecture")
        U, S, Vh = torch.linalg.svd(known.mT @ theirs)
        U, V = U[:, 1e-9 * S[0] < S], Vh.mH[:, 1e-9 * S[0] < S]
        agreeing, generator = 0, torch.Generator().manual_seed(0)
        for x, y in zip(layers, others, strict=True):
            by_input = _matching(x.gate @ U, y.gate @ V, generator)
            agreeing += int((by_input == _matching(_unexplained(x) @ U, _unexplained(y) @ V, generator)).sum())
    neurons = sum(len(x.down) for x in layers)
    return Independence(float(poisson.sf(agreeing - 1, len(layers))), agreeing, neurons, len(layers))


def _read(model: nn.Module) -> tuple[list[_Neurons], Tensor]:
    """Return the layers of neurons, and the rows in the stream whose index is known, all in canonical form."""
    check_whole(model)
    if wrong := next((name for name, p in model.named_parameters() if not finite(p)), None):
        raise ValueError(f"{wrong} of a {type(model).__name__} has NaN or infinite entries")
    weights, symmetries = weights_of(model), find(model, scope=ALL)
    state, w = State(weights), symmetries.wiring or Wiring()
    canonical_form(weights, symmetries, state=state)  # what is folded in float64 is exactly orthogonal to 1
    found = [[b for b in blocks if b.size == blocks[-1].size] for _, blocks in w.hidden]
    layers = [_Neurons(*(b.read(state).mT.cpu() for b in (bs[0], bs[-2], bs[-1]))) for bs in found if len(bs) > 1]
    layers = [x for x in layers if len(x.down) > x.down.shape[1] + 1]
    if not layers:
        raise ValueError(f"no layers of more neurons than the stream is wide are known of a {type(model).__name__}")
    width = layers[0].down.shape[1]
    if not w.closed:
        return layers, torch.eye(width, dtype=torch.float64)
    inner = {s.name for _, slots in w.hidden for s in slots} | {name for p in symmetries.pairs for name in p.names}
    rows = [s for _, s in w.tables] + [s for _, a in w.writers for s in a.written if s.name not in inner]
    return layers, torch.cat([b.read(state).cpu() for b in rows])


def _unexplained(x: _Neurons) -> Tensor:
    """Return of the rows of ``down`` what no linear map makes of those of ``up``, all of length 1; signs are kept."""
    up, down = (nn.functional.normalize(rows, dim=1) for rows in (x.up, x.down))
    return down - up @ torch.linalg.lstsq(up, down, rcond=_RANK).solution


def _matching(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Assign rows to rows by the largest sum of squared cosines; rows that are equal, such as 0, at random."""
    x, y = (nn.functional.normalize(rows, dim=1) for rows in (x, y))
    order = torch.randperm(len(y), generator=generator)
    return order[assigned((x @ y[order].mT).square())]

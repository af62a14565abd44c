"""The floor under the metric."""

import torch
from torch import nn

from quotient_manifolds.optim import (
    QuotientAdam,
)
from quotient_manifolds.symmetries import (
    GL,
    block,
    pair,
)


def test_the_floor_bounds_the_term_of_second_order():
    """ξ_G ξ_Hᴴ is of order η² even where the product is nearly zero; without the floor it would be η²/σ.

    Rows of the first d have norm √h, ‖K_G⁻¹ K_H⁻ᴴ‖₂ ≤ 1, and steps are multiplied by √(8/h): ‖ξ_G ξ_Hᴴ‖ ≤ 8 η² √(nm).
    """
    torch.manual_seed(0)
    up, down = nn.Linear(3, 9, bias=False), nn.Linear(7, 3, bias=False)
    with torch.no_grad():
        up.weight.copy_(torch.randn(9, 3) @ torch.diag(torch.tensor([1.0, 1e-3, 1e-9])))
    p = pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(3))
    lr = 1e-2
    optimizer = QuotientAdam([up.weight, down.weight], [p], lr)
    before = p.gather().detach()
    (up.weight @ down.weight - torch.randn(9, 7)).square().sum().backward()
    optimizer.step()
    (dG, dH), H = (p.gather().detach() - before).split([9, 7]), before[9:]
    assert (dG @ dH.T).norm() <= 8 * lr**2 * (9 * 7) ** 0.5
    assert (dG @ H.T).norm() > lr

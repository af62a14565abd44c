"""LoRA-RITE and LoRA-Muon, written from their papers: rivals that are the same for equivalent factors.

Both take the factors of every adapter by their names, as peft has them; A is (r, n) and B (m, r). Kept plain: one pair
after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Pairs = list[tuple[nn.Parameter, nn.Parameter]]


def factors(model: nn.Module) -> Pairs:
    """Trainable (B, A) of every adapter."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return [(named[n.replace("lora_A", "lora_B")], p) for n, p in named.items() if "lora_A" in n]


class _PairOptimizer(torch.optim.Optimizer):
    """Steps pairs by :meth:`step_pair`."""

    def __init__(self, model: nn.Module, lr: float, **options: Any) -> None:
        self.pairs = factors(model)
        super().__init__([{"params": [p for pair in self.pairs for p in pair]}], {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for B, A in self.pairs:
            self.step_pair(self.param_groups[0], B, A)

    def step_pair(self, group: dict[str, Any], B: nn.Parameter, A: nn.Parameter) -> None:
        raise NotImplementedError


def inverse_root(S: Tensor, least: float) -> Tensor:
    """S^(-1/2), eigenvalues not below ``least`` of the largest; 0 for S = 0."""
    values, vectors = torch.linalg.eigh(S.double())
    top = values[-1]
    powers = torch.where(top > 0, values.clamp_min(least * top).clamp_min(1e-300) ** -0.5, 0)
    return (vectors @ torch.diag(powers) @ vectors.mT).to(S.dtype)


def msign(X: Tensor) -> Tensor:
    """U Vᵀ of X = U Σ Vᵀ, singular values that are rounding left out."""
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * (s > 1e-6 * s[0]).to(s.dtype)) @ Vh if bool(s[0] > 0) else torch.zeros_like(X)


class LoRAMuon(_PairOptimizer):
    """LoRA-Muon (Cesista, Crowson, Simal, Biderman 2026, arXiv 2606.12921).

    m ← βm + (1 - β)∇ for both factors, S = BᵀB and AAᵀ, ΔB = -(η/2) msign(m_B S_A^(-1/2)) S_A^(-1/2) and ΔA alike,
    s = √(1 - λη), B ← sB + ΔB/s. The polar factor is exact here (an SVD). What we could not find in the paper: how
    S_B^(-1/2) is bounded near B = 0; eigenvalues are floored at 1e-6 of the largest, and A rests while B = 0.
    """

    def step_pair(self, group: dict[str, Any], B: nn.Parameter, A: nn.Parameter) -> None:
        beta, lr = group["beta"], group["lr"]
        state = self.state[A]
        if not state:
            state["A"], state["B"] = torch.zeros_like(A), torch.zeros_like(B)
        m_A, m_B = state["A"].lerp_(A.grad, 1 - beta), state["B"].lerp_(B.grad, 1 - beta)
        R_A, R_B = inverse_root(A @ A.mT, 1e-6), inverse_root(B.mT @ B, 1e-6)
        step_B, step_A = msign(m_B @ R_A) @ R_A, R_B @ msign(R_B @ m_A)
        s = (1 - lr * group["weight_decay"]) ** 0.5
        B.mul_(s).sub_(step_B, alpha=lr / 2 / s)
        A.mul_(s).sub_(step_A, alpha=lr / 2 / s)


class LoRARITE(_PairOptimizer):
    """LoRA-RITE (Yen et al., ICLR 2025, arXiv 2410.20625), its Algorithm 1.

    With the other factor's polar decomposition U R, the unmagnified gradient is ḡ = ∇ R⁻¹; in the basis U, carried
    along by P = Uᵀ U_old: V ← P V Pᵀ + ḡᵀ ḡ with ρ for the eigenvalues that the projection loses,
    S = ḡ (V + ρI)^(-1/2), M ← β₁ M Pᵀ + (1 - β₁) S, step -η M R⁻ᵀ. V is a moving average with β₂, its bias corrected,
    as in the authors' own implementation; ρ ages with it. Theirs has ρ switched off by default, clips the norm of all ḡ
    to 1, and skips steps of an RMS above 1; with ρ on and without the last two, the steps are the same from any B ≠ 0.
    At B = 0 the basis of B does not exist, and A rests; theirs counts that step in A's bias correction, after which the
    products differ by 21 % in the second step and 6 % after twelve.
    """

    def step_pair(self, group: dict[str, Any], B: nn.Parameter, A: nn.Parameter) -> None:
        state = self.state[A]
        steps = []
        for name, X, other in (("B", B, A.mT), ("A", A.mT, B)):
            own = state.setdefault(name, {})
            gradient = X.grad if name == "B" else A.grad.mT
            steps.append(self._direction(own, group, gradient, other))
        B.sub_(steps[0], alpha=group["lr"])
        A.sub_(steps[1].mT, alpha=group["lr"])

    def _direction(self, own: dict[str, Any], group: dict[str, Any], gradient: Tensor, other: Tensor) -> Tensor:
        (beta1, beta2), eps, r = group["betas"], group["eps"], other.shape[1]
        values, vectors = torch.linalg.eigh((other.mT @ other).double())
        if not bool(values[-1] > 0):
            return torch.zeros_like(gradient)
        roots = values.clamp_min(1e-12 * values[-1]).sqrt()
        R_inv = (vectors @ torch.diag(1 / roots) @ vectors.mT).to(gradient.dtype)
        U, g = other @ R_inv, gradient @ R_inv
        if not own:
            own.update(U=U, V=g.new_zeros(r, r), M=torch.zeros_like(g), rho=g.new_zeros(()), step=0)
        P = U.mT @ own["U"]
        carried = P @ own["V"] @ P.mT
        lost = torch.linalg.eigvalsh(own["V"]) - torch.linalg.eigvalsh(carried)
        own["step"] += 1
        own["rho"] = beta2 * (own["rho"] + lost.max().clamp_min(0))
        own["V"] = beta2 * carried + (1 - beta2) * g.mT @ g / len(g)
        V = (own["V"] + own["rho"] * torch.eye(r, dtype=g.dtype)) / (1 - beta2 ** own["step"])
        values, vectors = torch.linalg.eigh(V.double())
        root = (vectors @ torch.diag(1 / (values.clamp_min(0).sqrt() + eps)) @ vectors.mT).to(g.dtype)
        own["M"] = beta1 * own["M"] @ P.mT + (1 - beta1) * g @ root
        own["U"] = U
        return own["M"] @ R_inv / (1 - beta1 ** own["step"])


def lora_muon(model: nn.Module, lr: float) -> LoRAMuon:
    """LoRA-Muon with β = .9, as our Muon."""
    return LoRAMuon(model, lr, beta=0.9, weight_decay=0.0)


def lora_rite(model: nn.Module, lr: float) -> LoRARITE:
    """LoRA-RITE with Adam's β₁ and β₂, and the ε of the authors' implementation."""
    return LoRARITE(model, lr, betas=(0.9, 0.999), eps=1e-6)

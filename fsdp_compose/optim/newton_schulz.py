"""The mathematics of ``Muon``: Newton-Schulz iterations on plain tensors, with the bits of ``torch.optim.Muon``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Matrices whose shorter side is in this range are computed together, one product for all: from 256 on that takes longer
# on the CPU, and below 8 other bits may result.
SMALL = range(8, 256)


def orthogonalize(matrices: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """Newton-Schulz iterations on each of some matrices, (count, rows, cols), in their dtype. Their memory may be
    overwritten. A quintic with the coefficients of Keller Jordan's Muon
    (https://kellerjordan.github.io/posts/muon/); in bfloat16 the bits of ``torch.optim.Muon``."""
    if len(matrices) > 1 and min(matrices.shape[1:]) not in SMALL:
        return torch.stack([_orthogonalize(matrix, coefficients, steps, eps) for matrix in matrices])
    if len(matrices) == 1:
        return _orthogonalize(matrices[0], coefficients, steps, eps)[None]
    a, b, c = coefficients
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _orthogonalize(x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    a, b, c = coefficients
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        x = x.mT
    x.div_(x.norm().clamp(min=eps))  # the spectral norm is at most this one
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x

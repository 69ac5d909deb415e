"""Rotary positions: pairs of entries are turned by angles that grow with the position, so that products are relative.

Shapes: positions (...), x (..., D); the first D // 2 pairs are turned, an odd last entry stays.
"""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (..., D / 2) of every frequency, in the precision of `like`."""
    pairs = width // 2
    frequencies = theta ** -(torch.arange(pairs, device=positions.device, dtype=torch.float64) / max(pairs, 1))
    turned = positions[..., None].to(torch.float64) * frequencies  # far along a stream float32 has no angles left
    return turned.cos().to(like.dtype), turned.sin().to(like.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    pairs = x.shape[-1] // 2
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)

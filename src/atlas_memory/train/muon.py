"""Muon, of PyTorch, with the products of many matrices at once and in their own precision where bfloat16 is slow.

`torch.optim.Muon` takes one matrix after the other, in bfloat16: a fifth of a training step on processors that do not
multiply such numbers in hardware. Arguments and state are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from atlas_memory.ops.newton_schulz import newton_schulz

# Entries of the matrices that are moved at once: more cost memory and save no time.
_ENTRIES = 1 << 25


class Muon(torch.optim.Muon):
    """Steps of one root mean square for matrices of any shape, the same as AdamW's (`match_rms_adamw`)."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrices in _alike(group["params"]):
                self._move(matrices, group)
        return loss

    def _move(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        ahead = torch.stack([self._ahead(matrix, group["momentum"]) for matrix in matrices])
        polynomials = [group["ns_coefficients"]] * group["ns_steps"]
        steps = newton_schulz(ahead.to(_product_type(ahead)), floor=group["eps"], polynomials=polynomials)
        scale = -0.2 * group["lr"] * max(ahead.shape[-2:]) ** 0.5
        for matrix, step in zip(matrices, steps.to(ahead.dtype), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=scale)

    def _ahead(self, matrix: nn.Parameter, decay: float) -> Tensor:
        """Nesterov's look ahead, after the gradient has joined the momentum."""
        state, gradient = self.state[matrix], cast(Tensor, matrix.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        ahead: Tensor = gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - decay), decay)
        return ahead


def _alike(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those with gradients, put together that fit into one tensor of bounded size."""
    sorts: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            sorts.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(matrix)
    for sort in sorts.values():
        count = max(1, _ENTRIES // sort[0].numel())
        yield from (sort[begin : begin + count] for begin in range(0, len(sort), count))


def _product_type(matrix: Tensor) -> torch.dtype:
    """bfloat16 where accelerators multiply it many times as fast; singular values near 1 are all that is asked for."""
    return matrix.dtype if matrix.device.type == "cpu" else torch.bfloat16

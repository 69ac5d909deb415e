"""One rank's share of a global batch. Shapes: R rows of this rank, T tokens of a row, N sequences."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
_FOR_DEVICES = ("input_ids", "targets", "background")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of token ids, and what a model may do with them.

    mask and starts decide shapes and schedules: they stay on the host when the batch goes to a device.

    targets are the tokens to predict, already shifted: targets[r, t] is what follows input_ids[r, t], also where that
    is the first token of the next row or segment; IGNORED where nothing may be asked.
    """

    input_ids: Tensor  # (R, T) int64
    targets: Tensor  # (R, T) int64
    background: Tensor  # (R, T) bool: known to be worth nothing to a memory
    mask: Tensor  # (R, T) bool: real tokens; padding is on the right
    starts: Tensor  # (R, T) bool: the memory starts empty before this token
    packed: bool  # starts may lie inside of rows
    index: int  # of the global batch, from 0
    target_count: int  # targets of the global batch, over all ranks: what a mean loss divides by
    token_count: int  # real tokens of the global batch, over all ranks

    @property
    def fresh(self) -> Tensor:
        """(R,) whether a row starts empty, or goes on from the state after its last segment."""
        return self.starts[:, 0]

    @property
    def lengths(self) -> Tensor:
        """(R,) real tokens of each row."""
        return self.mask.sum(1)

    @property
    def labels(self) -> Tensor:
        """(R, T) for models that shift by themselves; they cannot ask for the token after the last of a row."""
        first = torch.full_like(self.targets[:, :1], IGNORED)
        return torch.cat([first, self.targets[:, :-1]], dim=1)

    @property
    def cu_seqlens(self) -> Tensor:
        """(N + 1,) bounds of the sequences when all rows are laid end to end: a row never goes on in the next."""
        bounded = self.starts.clone()
        bounded[:, 0] = True
        ends = torch.tensor([bounded.numel()], device=bounded.device)
        return torch.cat([bounded.flatten().nonzero().flatten(), ends]).to(torch.int32)

    def model_inputs(self) -> dict[str, Any]:
        """Arguments of a causal language model of transformers.

        Packed rows become one row (1, R·T) with `cu_seqlens`; other rows stay (R, T) and have a mask if they need one.
        `shift_labels` is what the loss uses; `labels` asks for one. Masks and bounds are on the host.
        """
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "labels": self.labels, "shift_labels": self.targets}
        if self.packed:
            return {name: x.reshape(1, -1) for name, x in inputs.items()} | {"cu_seqlens": self.cu_seqlens}
        return inputs if bool(self.mask.all()) else inputs | {"attention_mask": self.mask}

    def never_empty(self) -> Batch:
        """With one padding token to read where no row has any left: every process takes part in every pass."""
        if bool(self.mask.any()):
            return self
        mask = self.mask.clone()
        mask[0, 0] = True
        return dataclasses.replace(self, mask=mask)

    def split(self, rows: int) -> Iterator[Batch]:
        """Micro-batches of at most `rows` rows."""
        for begin in range(0, len(self.input_ids), rows):
            cut = slice(begin, begin + rows)
            yield self._each((*_FOR_DEVICES, "mask", "starts"), operator.itemgetter(cut))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._each(_FOR_DEVICES, lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._each(_FOR_DEVICES, lambda x: x.pin_memory())

    def _each(self, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return dataclasses.replace(self, **changed)

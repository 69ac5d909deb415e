"""What a caller may pass to a model, checked and brought into one form. Shapes: B batch, T tokens, N sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atlas_memory.layers import Block
from atlas_memory.models.cache import AtlasCache

Bounds = Tensor | Sequence[int] | None


def check_token_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise on ids outside of the vocabulary; on the CPU only, since a GPU would have to be waited for."""
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "input_ids must be whole numbers (int32 or int64) of shape (batch, tokens), "
            f"got {input_ids.dtype} {tuple(input_ids.shape)}."
        )
    if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or not input_ids.numel():
        return
    least, most = (int(n) for n in torch.aminmax(input_ids))
    if least < 0 or most >= vocab_size:
        raise ValueError(
            f"input_ids between {least} and {most} must lie between 0 and vocab_size - 1 = {vocab_size - 1}."
        )


def check_cache(cache: Any, blocks: Sequence[Block]) -> AtlasCache:
    """The cache, if the blocks of a model can go on from it."""
    if not isinstance(cache, AtlasCache):
        raise ValueError(f"past_key_values must be an AtlasCache, as the model returns it, got {type(cache).__name__}.")
    if len(cache.layers) != len(blocks):
        raise ValueError(f"past_key_values has {len(cache.layers)} layers, but this model has {len(blocks)}.")
    for place, (layer, block) in enumerate(zip(cache.layers, blocks, strict=True)):
        try:
            block.check_state(layer.state)
        except ValueError as error:
            raise ValueError(f"past_key_values is of another config; layer {place}: {error}") from error
    return cache


def mask_of_new_tokens(attention_mask: Tensor | None, batch: int, tokens: int, read: int) -> Tensor | None:
    """(B, T) of the tokens of this call, from a mask of those tokens or of everything since the first one."""
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if shape not in ((batch, tokens), (batch, read + tokens)):
        accepted = f"({batch}, {tokens})" + (f" or, with what was read, ({batch}, {read + tokens})" if read else "")
        raise ValueError(f"attention_mask must have shape (batch, tokens) = {accepted}, got {shape}.")
    return attention_mask[:, -tokens:] if tokens else attention_mask[:, :0]


def packed_bounds(
    cu_seqlens: Bounds, cu_seq_lens_q: Bounds, position_ids: Tensor | None, attention_mask: Tensor | None, batch: int
) -> list[int] | None:
    """Where packed sequences begin and end (N + 1,), or None for ordinary batches.

    Given as such, under the name FlashAttention has for it, or by position ids that restart, which is what
    DataCollatorWithFlattening produces. Position ids with a mask are `generate`'s, and say nothing new.
    """
    given = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
    if given is not None:
        return given.tolist() if isinstance(given, Tensor) else list(given)
    if position_ids is None or attention_mask is not None or batch != 1 or position_ids.shape[-1] == 1:
        return None
    places = position_ids.reshape(-1).to("cpu")
    restarts = (1 + (places[1:] <= places[:-1]).nonzero().flatten()).tolist()
    return [0, *restarts, len(places)] if restarts else None


def labels_within_sequences(labels: Tensor, bounds: list[int] | None, ignored: int = -100) -> Tensor:
    """Packed labels (1, T) without the first token of each sequence, which the one before it cannot predict."""
    if bounds is None:
        return labels
    starts = [start for start in bounds[:-1] if start < labels.shape[1]]  # but for an empty sequence at the end
    return labels.index_fill(1, torch.tensor(starts, device=labels.device), ignored)

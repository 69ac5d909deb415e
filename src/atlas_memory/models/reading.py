"""Reading more than fits: token ids of any number through a model, a step at a time."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from atlas_memory.checks import check_whole
from atlas_memory.models.cache import AtlasCache
from atlas_memory.models.inputs import check_token_ids
from atlas_memory.models.side_by_side import read_side_by_side

if TYPE_CHECKING:
    from atlas_memory.models.modeling_atlas import AtlasModel

Ids = Tensor | np.ndarray[Any, Any]
TokenSource = Ids | Iterable[int | Sequence[int] | Ids]

# Tokens per call: enough to use the machine, little enough for its memory.
DEFAULT_STEP = 2048


@torch.no_grad()
def read(
    model: AtlasModel,
    tokens: TokenSource,
    past_key_values: AtlasCache | None = None,
    *,
    step: int = DEFAULT_STEP,
    progress: bool = True,
) -> AtlasCache:
    """See `AtlasModel.read`."""
    check_whole("step", step)
    if isinstance(tokens, Tensor | np.ndarray) and tokens.ndim not in (1, 2):
        raise ValueError(f"tokens must have shape (tokens,) or (batch, tokens), got {tuple(tokens.shape)}.")
    cache = AtlasCache(len(model.layers)) if past_key_values is None else past_key_values
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.completed:,} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
    with bar:
        task = bar.add_task("reading", total=_count(tokens))

        def watched() -> Iterator[Tensor]:
            for piece in _pieces(tokens, step):
                check_token_ids(piece, model.config.vocab_size)  # on the host, where the model need not be
                yield piece
                bar.advance(task, piece.shape[1])

        read_side_by_side(model, watched(), cache)
    return cache


def _count(tokens: TokenSource) -> int | None:
    """How many tokens there will be, where that is known."""
    if isinstance(tokens, Tensor | np.ndarray):
        return int(tokens.shape[-1])
    return len(tokens) if isinstance(tokens, list | tuple) and all(isinstance(t, int) for t in tokens) else None


def _pieces(tokens: TokenSource, step: int) -> Iterator[Tensor]:
    """Pieces (B, step) of the stream, the last one shorter."""
    waiting: list[Tensor] = []
    count = 0  # of the columns that wait
    for part in _sliced(tokens, step) if isinstance(tokens, Tensor | np.ndarray) else _gathered(tokens, step):
        part = part if part.ndim == 2 else part.reshape(1, -1)
        if waiting and waiting[0].shape[0] != part.shape[0]:
            raise ValueError(f"tokens must keep their batch: {waiting[0].shape[0]} rows, then {part.shape[0]}.")
        waiting.append(part)
        count += part.shape[1]
        if count >= step:
            joined = torch.cat(waiting, dim=1)
            whole = joined.shape[1] - joined.shape[1] % step
            yield from joined[:, :whole].split(step, dim=1)
            waiting, count = [joined[:, whole:]], joined.shape[1] - whole
    rest = torch.cat(waiting, dim=1) if waiting else None
    if rest is not None and rest.shape[1]:
        yield rest


def _sliced(tokens: Ids, step: int) -> Iterator[Tensor]:
    """Only what is next is copied: an array may be a file of more than the memory holds."""
    for begin in range(0, tokens.shape[-1], step):
        yield _wide(tokens[..., begin : begin + step])


def _wide(ids: Any) -> Tensor:
    """As a tensor; ids are often kept in 16 bits, which no embedding takes."""
    made = torch.tensor(ids) if isinstance(ids, np.ndarray) else torch.as_tensor(ids)
    return made if made.is_floating_point() or made.dtype == torch.bool else made.long()


def _gathered(tokens: Iterable[Any], step: int) -> Iterator[Tensor]:
    """Single ids by the step, pieces as they come; as tensors."""
    single: list[int] = []
    for part in tokens:
        alone = isinstance(part, int | np.integer) or (
            isinstance(part, Tensor) and part.ndim == 0 and not part.is_floating_point()
        )
        if alone:
            single.append(operator.index(part))
            if len(single) < step:
                continue
        if single:
            yield torch.tensor(single)
            single = []
        if not alone:
            yield _wide(part)
    if single:
        yield torch.tensor(single)

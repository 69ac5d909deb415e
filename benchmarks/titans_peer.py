"""titans-pytorch's layer, as a piece of work. Runs in the peers' environment only.

Its `chunk_size` is the number of tokens that share one update, its `batch_size` the tokens that share one anchor (None:
all gradients are taken at the initial weights). Our chunk b is its chunk_size=1, batch_size=b.
"""

from __future__ import annotations

from typing import Any

import torch
from titans_pytorch import NeuralMemory

from benchmarks.work import Work


def warm_layer(**settings: Any) -> Work:
    """The layer, after a small run of the same kind: what a process allocates once in its life is not counted."""
    tiny = {"batch": 1, "tokens": settings["batch_size"] or 64, "dim": 16, "heads": 2, "key_width": 8}
    layer(**{**settings, **tiny}).run(backward=True)
    return layer(**settings)


def layer(
    *,
    batch: int,
    tokens: int,
    dim: int,
    heads: int,
    key_width: int,
    expansion: int,
    chunk_size: int,
    batch_size: int | None,
) -> Work:
    torch.manual_seed(0)
    network = {"depth": 2, "expansion_factor": float(expansion)}
    memory = NeuralMemory(
        dim,
        heads=heads,
        dim_head=key_width,
        chunk_size=chunk_size,
        batch_size=batch_size,
        momentum=True,
        default_model_kwargs=network,
    )
    for parameter in memory.memory_model_parameters:  # its heads share storage (its issue 64)
        parameter.data = parameter.data.clone()
    x = torch.randn(batch, tokens, dim, requires_grad=True)
    return Work(lambda: memory(x)[0], [x, *memory.parameters()])

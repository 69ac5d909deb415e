"""What one pass of a model asks of a machine, operation by operation: FLOPs, bytes, launches, kept activations.

The pass is run on the meta device, forward and backward, and every operation that PyTorch dispatches is counted. Where
`accounting` counts FLOPs, which a model has anywhere, this counts what decides how fast a machine can do them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from atlas_memory.layers import Block
from atlas_memory.layers.norm import RMSNorm
from atlas_memory.models.configuration_atlas import AtlasConfig

# Tokens of a row that are traced: a memory works chunk after chunk, so that more of them only repeat the same.
PIECE = 1024


_fused = torch.ops.aten._scaled_dot_product_efficient_attention


def _needed_backward(gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> int:
    """Of attention: scores that a fused kernel computes a second time are not counted, as `accounting` does not."""
    return 2 * int(sdpa_flop_count(queries.shape, keys.shape, values.shape))


_FORMULAS = {**flop_registry, torch.ops.aten._scaled_dot_product_efficient_attention_backward: _needed_backward}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One kind of kernel launch: what it computes and what it moves."""

    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Pass:
    """Some rows through a part of a model, forward and backward."""

    forward: Counter[Operation]
    backward: Counter[Operation]
    activation_bytes: int  # kept from the forward pass for the backward pass
    input_bytes: int  # of which the input of the part: what gradient checkpointing keeps

    @property
    def flops(self) -> int:
        return sum(operation.flops * count for operation, count in (self.forward + self.backward).items())

    @property
    def launches(self) -> int:
        return self.forward.total() + self.backward.total()

    def repeated(self, times: int) -> Pass:
        """So many of these, one after another."""
        forward, backward = (
            Counter({operation: times * count for operation, count in operations.items()})
            for operations in (self.forward, self.backward)
        )
        return Pass(forward, backward, times * self.activation_bytes, times * self.input_bytes)


class _Counting(TorchDispatchMode):
    """Counts operations; views, which move nothing, are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[Operation] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = function(*args, **kwargs)
        if not function.is_view and function.namespace != "prim":
            formula = _FORMULAS.get(function._overloadpacket)
            flops = formula(*args, **kwargs, out_val=outputs) if formula else 0
            tensors = [x for x in tree_leaves((args, kwargs, outputs)) if isinstance(x, Tensor)]
            moved = {id(x): x.numel() * x.element_size() for x in tensors}
            self.operations[Operation(int(flops), sum(moved.values()))] += 1
        return outputs


class _FusedAttention(TorchFunctionMode):
    """Attention as accelerators compute it under a mask, in one kernel: the meta device would keep every score."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        return _fused_attention(*args, **kwargs)


def _fused_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    bias = None
    if attn_mask is not None:
        shape = (*queries.shape[:-1], keys.shape[-2])
        bias = torch.where(attn_mask, 0.0, -torch.inf).to(queries.dtype).expand(shape)
    answers: Tensor = _fused(queries, keys, values, bias, compute_log_sumexp=True, is_causal=is_causal, scale=scale)[0]
    return answers


class _Kept:
    """Bytes that autograd keeps, each storage once; parameters are not counted, which exist anyway."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {x.untyped_storage()._cdata for x in module.parameters()}
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def keep(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._parameters:
            self._storages[storage._cdata] = storage
        return x

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


class Head(nn.Module):
    """The last norm, the projection to the vocabulary and the loss, as the model computes them."""

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.projection = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.projection(self.norm(x)).float().flatten(0, 1)
        labels = torch.empty(len(logits), dtype=torch.long, device=x.device)
        return nn.functional.cross_entropy(logits, labels, reduction="sum")


def trace(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Pass:
    """Of a module on the meta device. call: its output, as one tensor."""
    x.requires_grad_()
    kept = _Kept(module)
    keeping = torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda saved: saved)
    with _FusedAttention(), keeping, _Counting() as forward:
        outputs = call(x)
    nbytes = kept.nbytes
    with _Counting() as backward:
        outputs.sum().backward()
    return Pass(forward.operations, backward.operations, nbytes, x.numel() * x.element_size())


def trace_block(config: AtlasConfig, kind: str, rows: int, length: int, dtype: torch.dtype) -> Pass:
    """One layer of a type that `config.layer_types` names."""
    with torch.device("meta"):
        block = Block(**config.block_arguments(kind)).to(dtype)
        x = torch.empty(rows, length, config.hidden_size, dtype=dtype)
    return trace(block, lambda x: block(x)[0], x)


def trace_head(config: AtlasConfig, rows: int, length: int, dtype: torch.dtype) -> Pass:
    with torch.device("meta"):
        head = Head(config.hidden_size, config.vocab_size).to(dtype)
        x = torch.empty(rows, length, config.hidden_size, dtype=dtype)
    return trace(head, head, x)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A whole model: each type of layer once, with its number, and the head."""

    layers: tuple[tuple[Pass, int], ...]
    head: Pass

    def total(self, of: Callable[[Pass], float]) -> float:
        return of(self.head) + sum(count * of(layer) for layer, count in self.layers)


def trace_model(config: AtlasConfig, rows: int, length: int, dtype: torch.dtype) -> Trace:
    """rows × length tokens through a model whose weights and activations have this dtype.

    Where no layer looks further back than a window, long rows are counted as pieces of PIECE tokens, read one after
    another: the first tokens of each piece have less to attend to than they would, which is the error of it.
    """
    if rows < 1 or length < 1:
        raise ValueError(f"rows={rows} and length={length} must be at least 1.")
    pieces = 1 if _looks_back(config) else max(1, round(length / PIECE))
    kinds = Counter(config.layer_types).items()
    layers = tuple(
        (trace_block(config, kind, rows, length // pieces, dtype).repeated(pieces), count) for kind, count in kinds
    )
    return Trace(layers, trace_head(config, rows, length, dtype))


def _looks_back(config: AtlasConfig) -> bool:
    """Whether the cost of a token grows with its position."""
    return "full_attention" in config.layer_types or any(
        config.memory_spec(preset).kernel for preset in config.memory_presets
    )

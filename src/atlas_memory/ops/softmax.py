"""The normalised infinite matrix memory: softmax attention (eq. 21–26), through PyTorch's own kernel.

y_t = Σ_i κ(q_t, k_i) v_i / Σ_i κ(q_t, k_i) over the tokens up to t, and not older than the horizon.

Shapes: B batch, T queries, M tokens kept, N = M + T tokens attended to, H heads, D key width, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory.ops.call import Call
from atlas_memory.ops.fast_weights import FastWeights
from atlas_memory.ops.features import Exponential
from atlas_memory.ops.monitors import Monitors, Record, surprise_of
from atlas_memory.ops.networks import Factors
from atlas_memory.ops.packing import last_rows, take_rows
from atlas_memory.ops.state import MemoryState


def attend_and_keep(call: Call, monitors: Monitors | None) -> tuple[Tensor, MemoryState]:
    """Answers (B, T, H, V), zero at padding, and the state with the new tokens in its cache."""
    batch, tokens = call.keys.shape[:2]
    answers = take_rows(attend(call), [0] * batch, tokens, call.lengths)
    after = call.state.updated({}, [n + new for n, new in zip(call.state.position, call.lengths, strict=True)])
    keys, values = _with_cache(call)
    ends = [keys.shape[1] - tokens + length for length in call.lengths]
    count = max((0, *after.cached))
    cache = {"cache.keys": keys, "cache.down": values}
    after = after.updated({name: last_rows(x, ends, count, after.cached) for name, x in cache.items()})
    if monitors is not None:
        _watch(call, after, monitors)
    return answers, after


def attend(call: Call) -> Tensor:
    """The answers (B, T, H, V) to a call's queries; its keys, if any, are the queries' own tokens."""
    keys, values = _with_cache(call)
    if keys.shape[1] == 0 or call.queries.shape[1] == 0:
        return call.values.new_zeros(*call.queries.shape[:3], call.spec.value_width)
    assert isinstance(call.feature, Exponential)
    # the sharpness is a tensor, and learned: it goes into the queries
    queries = (call.queries * call.feature.sharpness).movedim(2, 1)
    keys, values = keys.movedim(2, 1), values.movedim(2, 1)
    visible = _visible(call)
    if visible is None:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0).movedim(1, 2)
    anything = visible.any(-1, keepdim=True)
    answers = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible | ~anything, scale=1.0)
    return (answers * anything.to(answers.dtype)).movedim(1, 2)


def _with_cache(call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values, those of earlier calls before the new ones."""
    cache = call.state.tensors["cache.keys"], call.state.tensors["cache.down"]
    return torch.cat([cache[0], call.keys], dim=1), torch.cat([cache[1], call.values], dim=1)


def _visible(call: Call) -> Tensor | None:
    """(B, 1, T, N): which tokens every query sees. None: all up to its own, and there are no earlier ones."""
    kept, new, horizon = call.state.tensors["cache.keys"].shape[1], call.keys.shape[1], call.spec.horizon
    if kept == 0 and (horizon is None or horizon >= new):
        return None
    asked = torch.arange(kept, kept + call.queries.shape[1]) if new else torch.full((call.queries.shape[1],), kept - 1)
    places = torch.arange(kept + new)
    ages = asked[:, None] - places
    seen = (ages >= 0) if horizon is None else (ages >= 0) & (ages < horizon)
    exists = places >= kept - torch.tensor(call.state.cached)[:, None]
    return (seen & exists[:, None])[:, None].to(call.keys.device)


def _watch(call: Call, after: MemoryState, monitors: Monitors) -> None:
    rows = call.keys.movedim(2, 1).flatten(0, 1), call.values.movedim(2, 1).flatten(0, 1)
    surprise = surprise_of({"down": Factors(*rows)}, {"down": call.feature})
    monitors.add(Record(surprise, surprise))
    vectors = after.tensors["cache.down"].movedim(2, 1).flatten(0, 1)
    batch = call.keys.shape[0]

    def per_token(x: Tensor) -> Tensor:
        x = x.unflatten(0, (batch, -1)).movedim(1, 2)
        return take_rows(x, [0] * batch, x.shape[1], call.lengths)

    monitors.finish(call, FastWeights({"down": vectors}, {}), per_token)

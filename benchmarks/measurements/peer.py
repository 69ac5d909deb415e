"""Against titans-pytorch, layer to layer; and against the gated delta rule that ships in transformers."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atlas_memory.ops import memorize
from benchmarks.child import Child
from benchmarks.peers import titans_pytorch
from benchmarks.registry import Measured, Run, at_least, at_most, measurement
from benchmarks.subjects import STANDARD, Size, layer, operator_arguments, sized
from benchmarks.timing import Seconds, interleave, ratio
from benchmarks.work import Work

OURS = "atlas_memory"
# Its anchor interval, in its coarser favourite of one update per 64 tokens: its default, and ours.
COARSE = {"titans_pytorch, batch_size None": None, "titans_pytorch, batch_size 64": 64}
# With an update per token its backward pass needs 15 GB at the standard length: a shorter sequence must do. That is in
# favour of the peer, whose time per token grows with the length (it copies all earlier weights at every anchor).
EQUAL_TOKENS = {"forward": STANDARD.tokens, "forward_backward": 256}


def _peer(size: Size, chunk_size: int, batch_size: int | None, maker: str = "layer") -> Child:
    fields = dataclasses.asdict(size)
    del fields["chunk"]
    return titans_pytorch(maker, **fields, chunk_size=chunk_size, batch_size=batch_size)


def _timed(size: Size, peers: dict[str, Child], backward: bool, repetitions: int) -> Seconds:
    candidates = {OURS: partial(layer("titans", size).run, backward)}
    candidates |= {name: partial(child.call, "run", backward=backward) for name, child in peers.items()}
    return interleave(candidates, repetitions)


def _raw(size: Size, seconds: Seconds) -> dict[str, Any]:
    per_second = {name: [size.batch * size.tokens / s for s in taken] for name, taken in seconds.items()}
    return {"size": dataclasses.asdict(size), "seconds": seconds, "tokens_per_second": per_second}


def against_coarse(run: Run, backward: bool) -> Measured:
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(_peer(STANDARD, STANDARD.chunk, batch_size))
            for name, batch_size in COARSE.items()
        }
        seconds = _timed(STANDARD, peers, backward, run.repetitions(11))
    ratios = {name: ratio(seconds, name, OURS) for name in peers}
    return Measured(min(ratios.values()), _raw(STANDARD, seconds) | {"ratios": ratios})


def against_equal(run: Run, backward: bool) -> Measured:
    size = sized(64 if run.quick else EQUAL_TOKENS["forward_backward" if backward else "forward"])
    with _peer(size, chunk_size=1, batch_size=size.chunk) as peer:
        seconds = _timed(size, {"titans_pytorch": peer}, backward, run.repetitions(2))
    return Measured(ratio(seconds, "titans_pytorch", OURS), _raw(size, seconds), f"T={size.tokens}")


def equal_memory(run: Run) -> Measured:
    size = sized(64 if run.quick else EQUAL_TOKENS["forward_backward"])
    with Child(sys.executable, "benchmarks.subjects:titans_layer", tokens=size.tokens) as ours:
        own = ours.call("peak_bytes", backward=True)
    with _peer(size, 1, size.chunk, "warm_layer") as peer:
        other = peer.call("peak_bytes", backward=True)
    raw = {"size": dataclasses.asdict(size), "bytes": {OURS: own, "titans_pytorch": other}}
    return Measured(own / other, raw, f"T={size.tokens}")


for passes, backward, coarse in (("forward", False, 4.0), ("forward_backward", True, 2.5)):
    words = passes.replace("_", " + ")
    measurement(
        f"coarse_peer.{passes}",
        f"`titans`, an update per token, against titans-pytorch with one per 64 tokens: speed, {words}",
        "×",
        at_least(coarse),
    )(partial(against_coarse, backward=backward))
    measurement(
        f"equal_peer.{passes}",
        f"`titans` against titans-pytorch at equal semantics: speed, {words}",
        "×",
        at_least(400),
    )(partial(against_equal, backward=backward))
measurement(
    "equal_peer.memory",
    "`titans` against titans-pytorch at equal semantics: peak memory, forward + backward",
    "1/",
    at_most(1 / 20),
)(equal_memory)


def _transformers_delta_rule(queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, step: Tensor) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    result: Tensor = torch_chunk_gated_delta_rule(
        queries, keys, values, log_decay, step, chunk_size=64, use_qk_l2norm_in_kernel=False
    )[0]
    return result


@measurement(
    "gated_deltanet",
    "`gated_deltanet`, the operator, against transformers' torch_chunk_gated_delta_rule: speed, forward + backward",
    "×",
    at_least(1.5),
)
def gated_deltanet(run: Run) -> Measured:
    """Both start from the logarithm of the retention and scale their queries, as a model's layer would."""
    arguments = operator_arguments("gated_deltanet")
    log_decay = arguments.gates.retention.detach().log().requires_grad_()
    tokens = (arguments.queries, arguments.keys, arguments.values)

    def ours() -> Tensor:
        gates = arguments.gates._replace(retention=log_decay.exp())
        scaled = arguments.queries * STANDARD.key_width**-0.5
        return memorize(arguments.spec, scaled, arguments.keys, arguments.values, gates)[0]

    def theirs() -> Tensor:
        return _transformers_delta_rule(*tokens, log_decay, arguments.gates.step)

    with torch.no_grad():
        torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-4)  # the same function, or no comparison
    leaves = [*tokens, log_decay, arguments.gates.step]
    works = {OURS: Work(ours, leaves), "transformers": Work(theirs, leaves)}
    seconds = interleave({name: partial(work.run, True) for name, work in works.items()}, run.repetitions(15))
    return Measured(ratio(seconds, "transformers", OURS), _raw(STANDARD, seconds))

"""One training step on Accelerate: passes over a batch with carried memory, one update. Shapes: R rows, T tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from atlas_memory.data import IGNORED, Batch
from atlas_memory.layers.memory import Memory
from atlas_memory.models import AtlasCache, AtlasForCausalLM
from atlas_memory.ops import Monitors
from atlas_memory.train.optimizers import make_optimizers
from atlas_memory.train.recipe import Recipe
from atlas_memory.train.schedule import NO_PENALTIES, Penalties, set_learning_rate
from atlas_memory.train.sharding import shard, total


class Reading(NamedTuple):
    """What a pass over some rows gives."""

    loss: Tensor  # the sum over targets, divided by what was asked for
    cache: AtlasCache | None  # to go on from, where states are carried


class Reader(nn.Module):
    """The model and all that a step asks of it, as one call: what DDP wraps must be called once per pass."""

    def __init__(self, model: AtlasForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: dict[str, Any], divisor: float, cache: AtlasCache | None, fresh: Sequence[bool]
    ) -> Reading:
        """inputs: of `Batch.model_inputs`. cache: None where rows carry nothing; its fresh rows start anew."""
        targets = inputs["shift_labels"]
        tokens = {name: x for name, x in inputs.items() if name not in ("labels", "shift_labels")}
        outputs = self.model.model(**tokens, past_key_values=cache, use_cache=cache is not None, fresh=fresh)
        # Logits only where they are asked for: with few answers in a long text they would cost as much as the layers.
        asked = targets != IGNORED
        logits = self.model.lm_head(outputs.last_hidden_state[asked])
        loss = F.cross_entropy(logits.float(), targets[asked], reduction="sum") / divisor
        return Reading(loss, outputs.past_key_values)


@contextlib.contextmanager
def watched(model: nn.Module, watch: bool = True) -> Iterator[list[Monitors]]:
    """Monitors of every memory that reads something inside; none, if they are not wanted."""
    monitors: list[Monitors] = []

    def hand_over(module: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not arguments[0].shape[1]:  # only asked how a fresh row begins: a mean over nothing would thin the others
            return arguments, options
        monitors.append(Monitors())
        return arguments, {**options, "monitors": monitors[-1]}

    memories = [module for module in model.modules() if watch and isinstance(module, Memory)]
    hooks = [memory.register_forward_pre_hook(hand_over, with_kwargs=True) for memory in memories]
    try:
        yield monitors
    finally:
        for hook in hooks:
            hook.remove()


def mean_write(monitors: Sequence[Monitors]) -> Tensor:
    """Of all memories and tokens, differentiable."""
    written = [monitor.mean_write * monitor.tokens for monitor in monitors if monitor.mean_write is not None]
    return torch.stack(written).sum() / max(1, sum(monitor.tokens for monitor in monitors))


def mean_leak(monitors: Sequence[Monitors], batch: Batch) -> Tensor:
    """What of the mean write falls on background: the mean over all real tokens, differentiable."""
    written = torch.stack([monitor.writes.mean(-1) for monitor in monitors]).mean(0)  # (R, T)
    leaked = written * batch.background[:, : written.shape[1]].to(written)  # columns of padding alone are not read
    return leaked.sum() / max(1, int(batch.mask.sum()))


@torch.no_grad()
def summary(monitors: Sequence[Monitors]) -> dict[str, float]:
    """A few numbers about all memories: what a person watches while a model trains."""
    limits = [limit.float().flatten() for monitor in monitors for limit in monitor.limiter.values()]
    norms = [norm.float().flatten() for monitor in monitors for norm in monitor.weight_norms.values()]
    surprises = [monitor.surprise.float().flatten() for monitor in monitors if monitor.surprise is not None]
    shown: dict[str, float] = {}
    if limits:
        shown["limited"] = float((torch.cat(limits) < 1).float().mean())
    if norms:
        shown["memory_norm"], shown["largest_memory_norm"] = (
            float(torch.cat(norms).mean()),
            float(torch.cat(norms).max()),
        )
    if surprises:
        shown["surprise"] = float(torch.cat(surprises).mean())
    return shown


class Outcome(NamedTuple):
    """Of one step, the same on every rank but for the monitors."""

    loss: float
    gradient_norm: float
    applied: bool  # False: something was not finite, and no weight was changed
    monitors: dict[str, float]


def _check_leaks_are_seen(model: AtlasForCausalLM) -> None:
    if model.config.backbone == "mac" or not any(isinstance(module, Memory) for module in model.modules()):
        raise ValueError(
            "loop.leak_penalty needs a model with memories that read a row at once; accepted backbones: lmm, mag, mal."
        )


def _check_equal_shares(recipe: Recipe, processes: int) -> None:
    if recipe.data.rows.batch % processes:
        raise ValueError(
            f"data.rows.batch={recipe.data.rows.batch} must be a multiple of the {processes} processes with "
            "loop.sharding='fsdp2': all of them gather the weights in every pass."
        )


class Learner:
    """Model, optimizers and carried states; `step` learns from a batch, `loss` only looks."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: AtlasForCausalLM,
        recipe: Recipe,
    ) -> None:
        self.accelerator, self.model, self.recipe = accelerator, model, recipe
        for module in model.modules():
            if isinstance(module, Memory):
                module.check_finite = False  # a rank that raised would leave the others waiting: `step` looks instead
        if recipe.loop.leak_penalty:
            _check_leaks_are_seen(model)
        if recipe.loop.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.carries = recipe.data.rows.kind == "segments"
        self.caches: list[AtlasCache] = []  # of each pass, where states are carried
        self.sharded = recipe.loop.sharding == "fsdp2"
        reader: nn.Module = Reader(model)
        if self.sharded:
            _check_equal_shares(recipe, accelerator.num_processes)
            model.to(accelerator.device)
            shard(reader, model.model.layers, accelerator.num_processes, accelerator.device)
        # After sharding: an optimizer made before would hold parameters that are no longer the model's.
        optimizers = [accelerator.prepare(optimizer) for optimizer in make_optimizers(model, recipe.optimizer)]
        self.reader = reader if self.sharded else accelerator.prepare(reader)
        self.optimizers: list[Any] = optimizers

    def step(self, batch: Batch, rate: float, watch: bool, penalties: Penalties = NO_PENALTIES) -> Outcome:
        """Learn from one rank's share of a global batch; all ranks call it together. penalties: on writing."""
        self.reader.train()
        parts = list(batch.split(self.recipe.loop.rows_per_pass or len(batch.input_ids)))
        divisor = max(1, batch.target_count) / self.accelerator.num_processes  # DDP takes the mean over ranks
        sums, monitors = torch.zeros(3, device=self.accelerator.device), []
        for place, part in enumerate(parts):
            last = place == len(parts) - 1
            # Whole gradients travel once, after the last pass. Monitors stay until then: activations that are not kept
            # but computed again must be computed in the same way.
            with (
                self._gradients_travel(last),
                watched(self.model, watch or any(penalties)) as seen,
            ):
                reading = self._read(part, place, divisor)
                monitors += seen
                nothing = torch.zeros_like(reading.loss)
                write = mean_write(seen) / len(parts) if seen else nothing
                leak = mean_leak(seen, part) / len(parts) if penalties.leak else nothing
                self.accelerator.backward(reading.loss + penalties.write * write + penalties.leak * leak)
            sums += torch.stack([reading.loss, write, leak]).detach()
        # clip_grad_norm_ with no limit only measures.
        clip = self.recipe.optimizer.clip or float("inf")
        norm = total(self.accelerator.clip_grad_norm_(self.model.parameters(), clip))
        loss, write, leak = self.accelerator.reduce(sums, reduction="mean").tolist()
        applied = bool(torch.isfinite(torch.tensor([loss, write, leak, norm])).all())
        self._update(rate, applied)
        written = {"write": write} if monitors else {}
        if penalties.leak:
            written["leak"] = leak
        return Outcome(loss, norm, applied, written | (summary(monitors) if watch else {}))

    def _gradients_travel(self, now: bool) -> contextlib.AbstractContextManager[Any]:
        # Sharded gradients travel after every pass: kept whole until the last, they would undo the sharding.
        return contextlib.nullcontext() if now or self.sharded else self.accelerator.no_sync(self.reader)

    def _update(self, rate: float, applied: bool) -> None:
        set_learning_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            if applied:
                optimizer.step()
            optimizer.zero_grad()
        if not applied:
            self.caches = []  # what was remembered may not be finite either: every row starts anew

    def _read(self, part: Batch, place: int, divisor: float) -> Reading:
        part = part.never_empty().to(self.accelerator.device)
        if not self.carries:
            return self._call(part.model_inputs(), divisor, None, ())
        known = place < len(self.caches)
        cache = self.caches[place] if known else self.empty_cache()
        fresh = part.fresh.tolist() if known else [True] * len(part.input_ids)
        reading = self._call(part.model_inputs(), divisor, cache, fresh)
        assert reading.cache is not None
        self.caches[place : place + 1] = [reading.cache.detach()]
        return reading

    def _call(self, *arguments: Any) -> Reading:
        # What Accelerate has prepared, it calls in the precision of the recipe; what we have sharded, it has not seen.
        with self.accelerator.autocast() if self.sharded else contextlib.nullcontext():
            reading: Reading = self.reader(*arguments)
        return reading

    def empty_cache(self) -> AtlasCache:
        return AtlasCache(len(self.model.model.layers))

    @torch.no_grad()
    def loss(self, batches: Iterator[Batch]) -> float:
        """Mean loss over the targets of all batches, of all ranks; training goes on as if nothing had been asked."""
        caches, self.caches = self.caches, []
        self.reader.eval()
        total, targets = torch.zeros((), device=self.accelerator.device), 0
        for batch in batches:
            for place, part in enumerate(batch.split(self.recipe.loop.rows_per_pass or len(batch.input_ids))):
                total += self._read(part, place, 1.0).loss
            targets += batch.target_count
        self.caches = caches
        self.reader.train()
        return float(self.accelerator.reduce(total, reduction="sum")) / max(1, targets)

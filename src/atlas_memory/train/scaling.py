"""What a training step costs on N accelerators: FLOPs, memory, communication, time. The words are in docs/scaling.md.

seconds of a pass = Σ over operations of max(FLOPs / speed, bytes / bandwidth), and a launch for each of them
seconds of a step = passes + update + the communication that the last backward pass does not hide
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from atlas_memory.data.tokenizers import BYTES, SMALLEST_VOCABULARY
from atlas_memory.models import AtlasForCausalLM
from atlas_memory.models.accounting import account, count_parameters
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.models.joining import joined_config
from atlas_memory.models.operations import Operation, Pass, Trace, trace_model
from atlas_memory.train.hardware import Hardware
from atlas_memory.train.optimizers import KINDS, parameter_kinds
from atlas_memory.train.recipe import Recipe, make_config

STRATEGIES = ("ddp", "fsdp2")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step to be predicted."""

    config: AtlasConfig
    rows: int  # of the global batch
    length: int
    rows_per_pass: int  # of one accelerator, at most
    accelerators: int = 1
    strategy: str = "ddp"
    precision: str = "float32"
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    carries: bool = False  # memory states stay from step to step

    def __post_init__(self) -> None:
        for name in ("rows", "length", "rows_per_pass", "accelerators"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is unknown; known: {', '.join(STRATEGIES)}.")
        if self.rows % self.accelerators:
            raise ValueError(f"rows={self.rows} must be a multiple of accelerators={self.accelerators}.")

    @property
    def passes(self) -> int:
        return math.ceil(self.rows / self.accelerators / self.rows_per_pass)

    @property
    def rows_of_a_pass(self) -> int:
        return math.ceil(self.rows / self.accelerators / self.passes)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def trace(self) -> Trace:
        return trace_model(self.config, self.rows_of_a_pass, self.length, _DTYPES[self.precision])


def vocabulary_of(recipe: Recipe) -> int:
    """Without opening a tokenizer, which may be on the hub: then it is taken to be as large as Llama's."""
    named = SMALLEST_VOCABULARY if recipe.data.tokenizer == BYTES else 32_000
    return recipe.tokenizer.vocabulary or named


def _config_of(recipe: Recipe) -> AtlasConfig:
    if recipe.start:
        return joined_config([AtlasConfig.from_pretrained(folder) for folder in recipe.start])
    return make_config(recipe.model, vocab_size=vocabulary_of(recipe))


def plan_of(recipe: Recipe, accelerators: int, **changes: Any) -> Plan:
    """The recipe's step. A batch of fewer rows than accelerators grows to one row each: nothing smaller is possible."""
    rows = recipe.data.rows
    batch = math.ceil(rows.batch / accelerators) * accelerators
    fields: dict[str, Any] = {
        "config": _config_of(recipe),
        "rows": batch,
        "length": max([rows.length, *(length for _, length in rows.lengths)]),
        "rows_per_pass": recipe.loop.rows_per_pass or batch // accelerators,
        "accelerators": accelerators,
        "precision": recipe.loop.precision,
        "gradient_checkpointing": recipe.loop.gradient_checkpointing,
        "optimizer": recipe.optimizer.name,
        "carries": rows.kind == "segments",
    }
    return Plan(**{**fields, **changes})


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one accelerator at the peak of a step."""

    weights: float  # float32; in bfloat16 also the copies that autocast makes
    gradients: float
    optimizer: float
    activations: float
    states: float  # of memories: those a pass ends with, and those carried between steps

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one step, on one accelerator; seconds are those of the whole step."""

    plan: Plan
    memory: Memory
    flops: float
    products: float  # seconds of operations that are bound by their FLOPs
    traffic: float  # seconds of operations that are bound by their bytes, the update among them
    launches: float  # seconds of the host
    communication: float  # seconds
    exposed: float  # of which not hidden behind the last backward pass
    step: float
    step_without_launches: float  # as if one launch did it all: what graphs or fused kernels could reach
    fits: bool

    @property
    def tokens_per_second(self) -> float:
        return self.plan.tokens / self.step

    @property
    def limit(self) -> str:
        """What the step spends most of its time on."""
        if not self.fits:
            return "memory"
        parts = {"products": self.products, "traffic": self.traffic, "launches": self.launches}
        return max({**parts, "communication": self.exposed}.items(), key=lambda part: part[1])[0]


def predict(plan: Plan, hardware: Hardware, trace: Trace | None = None) -> Prediction:
    """trace: of `plan.trace()`, where it is known already."""
    trace = trace or plan.trace()
    forward, backward = _times(plan, hardware, trace)
    memory = peak_memory(plan, trace)
    update = _update_bytes(plan) / hardware.bandwidth
    passed = forward + backward
    products, traffic = plan.passes * passed.products, plan.passes * passed.traffic + update
    communication, hideable = communication_seconds(plan, hardware, backward.elapsed(hardware))
    exposed = max(0.0, communication - hideable)
    elapsed = plan.passes * passed.elapsed(hardware)
    return Prediction(
        plan=plan,
        memory=memory,
        flops=plan.passes * passed.flops,
        products=products,
        traffic=traffic,
        launches=plan.passes * passed.launches,
        communication=communication,
        exposed=exposed,
        step=elapsed + update + exposed,
        step_without_launches=products + traffic + exposed,
        fits=memory.total <= hardware.memory,
    )


@dataclasses.dataclass(frozen=True)
class _Seconds:
    """Of some operations."""

    products: float
    traffic: float
    launches: float
    flops: float

    def __add__(self, other: _Seconds) -> _Seconds:
        return _Seconds(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def elapsed(self, hardware: Hardware) -> float:
        work = self.products + self.traffic
        return max(work, self.launches) if hardware.asynchronous else work + self.launches


def _times(plan: Plan, hardware: Hardware, trace: Trace) -> tuple[_Seconds, _Seconds]:
    """Of a pass, forward and backward; what checkpointing computes again belongs to the second."""
    forward, backward = Counter(trace.head.forward), Counter(trace.head.backward)
    for layer, count in trace.layers:
        one, other = layer.repeated(count).forward, layer.repeated(count).backward
        forward, backward = forward + one, backward + other
        if plan.gradient_checkpointing:
            backward = backward + one
    return _seconds(forward, hardware), _seconds(backward, hardware)


def _seconds(operations: Counter[Operation], hardware: Hardware) -> _Seconds:
    speed = hardware.flops * hardware.efficiency
    products = traffic = flops = 0.0
    for operation, count in operations.items():
        computing, moving = operation.flops / speed, operation.bytes / hardware.bandwidth
        flops += count * operation.flops
        if computing > moving:
            products += count * computing
        else:
            traffic += count * moving
    return _Seconds(products, traffic, operations.total() * hardware.launch, flops)


def peak_memory(plan: Plan, trace: Trace) -> Memory:
    """When the backward pass of the last accumulated pass begins."""
    parameters = sum(count_parameters(plan.config))
    share = 1 / plan.accelerators if plan.strategy == "fsdp2" else 1.0
    held = plan.rows // plan.accelerators if plan.carries else plan.rows_of_a_pass
    casts = 2 * parameters * share if plan.precision == "bfloat16" else 0
    return Memory(
        weights=4 * parameters * share + casts,
        gradients=4 * parameters * share,
        optimizer=_optimizer_bytes(plan) * share,
        activations=_activations(plan, trace),
        states=held * account(plan.config, context=min(plan.length, 256)).state_bytes,
    )


def _activations(plan: Plan, trace: Trace) -> float:
    if not plan.gradient_checkpointing:
        return trace.total(lambda part: part.activation_bytes)
    inputs = sum(count * layer.input_bytes for layer, count in trace.layers)
    return inputs + max(part.activation_bytes for part in _parts(trace))


def _parts(trace: Trace) -> Iterator[Pass]:
    yield trace.head
    yield from (layer for layer, _ in trace.layers)


def _optimizer_bytes(plan: Plan) -> float:
    """Two float32 numbers for each parameter of AdamW, one for each of Muon."""
    with torch.device("meta"):
        model = AtlasForCausalLM(plan.config)
    kinds = parameter_kinds(model)
    with_muon = plan.optimizer == "muon"
    return sum(
        (4 if with_muon and KINDS[kinds[name]].muon else 8) * parameter.numel()
        for name, parameter in model.named_parameters()
    )


def _update_bytes(plan: Plan) -> float:
    """Weights and optimizer state are read and written, gradients read; Muon's own products are left out."""
    share = 1 / plan.accelerators if plan.strategy == "fsdp2" else 1.0
    return share * (3 * 4 * sum(count_parameters(plan.config)) + 2 * _optimizer_bytes(plan))


def communication_seconds(plan: Plan, hardware: Hardware, backward: float) -> tuple[float, float]:
    """Seconds on the wires, and how many of them can hide: behind backward passes of so many seconds.

    DDP: one all-reduce of float32 gradients a step, 2 (n - 1) / n of their bytes through every ring. FSDP2: two
    all-gathers of float32 weights, which autocast rounds afterwards, and a reduce-scatter of gradients, for every pass.
    """
    n, parameters = plan.accelerators, sum(count_parameters(plan.config))
    if n == 1:
        return 0.0, 0.0
    once = (n - 1) / n * parameters / hardware.ring(n)
    if plan.strategy == "ddp":
        return 2 * 4 * once, backward
    return plan.passes * 3 * 4 * once, plan.passes * backward


COLUMNS = (
    "model", "accelerators", "split", "rows × passes", "memory, GB", "PFLOP", "step, s", "communication, s",
    "tokens/s", "days", "limited by", "without launches, s",
)  # fmt: skip


def row(prediction: Prediction, name: str, tokens: float) -> tuple[str, ...]:
    """As in COLUMNS. tokens: of the whole run, which the days are for."""
    plan = prediction.plan
    return (
        name,
        f"{plan.accelerators}",
        plan.strategy,
        f"{plan.rows_of_a_pass} × {plan.passes}",
        f"{prediction.memory.total / 1e9:.1f}",
        f"{prediction.flops * plan.accelerators / 1e15:.3g}",
        f"{prediction.step:.2f}",
        f"{prediction.communication:.3f} ({prediction.exposed:.3f} exposed)",
        f"{prediction.tokens_per_second:,.0f}",
        f"{tokens / prediction.tokens_per_second / 86400:.1f}",
        prediction.limit,
        f"{prediction.step_without_launches:.2f}",
    )


def table(
    recipe: Recipe, sizes: Sequence[str], accelerators: Sequence[int], strategies: Sequence[str], hardware: Hardware
) -> Iterator[tuple[str, ...]]:
    """Rows for every size on every number of accelerators. sizes: none: the recipe's own model."""
    traces: dict[tuple[str, int], Trace] = {}  # a trace takes seconds, and depends on neither hardware nor strategy
    tokens = recipe.loop.steps * recipe.data.rows.batch * recipe.data.rows.length
    for size in sizes or [""]:
        resized = recipe.model_copy(update={"model": {**recipe.model, "size": size}}) if size else recipe
        for count in accelerators:
            for strategy in strategies:
                plan = plan_of(resized, count, strategy=strategy)
                key = (size, plan.rows_of_a_pass)
                traces[key] = traces[key] if key in traces else plan.trace()
                yield row(predict(plan, hardware, traces[key]), size or "recipe", tokens)

"""Recipe: everything that decides a training run, typed. How it is read from a file: recipe_files.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from atlas_memory.data import DataConfig
from atlas_memory.models.accounting import named_size, sized_config
from atlas_memory.models.configuration_atlas import FIELDS, AtlasConfig

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, strict=True)]  # strict: `yes` is not 1
CountOrNone = Annotated[int, Field(ge=0, strict=True)]

_NOT_IN_RECIPES = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
# `size` stands for widths and depth; the vocabulary and the special tokens are the tokenizer's.
MODEL_FIELDS = ("size", *(name for name in FIELDS if name not in _NOT_IN_RECIPES))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UnknownFieldError(ValueError):
    """Of a section that is no pydantic model."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is unknown.")
        self.name = name


def _checked_model(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in MODEL_FIELDS:
            raise UnknownFieldError(name)
    described = {name: value for name, value in fields.items() if name != "size"}
    if "size" in fields:
        _, described = named_size(fields["size"], described)
    AtlasConfig(**described)
    return fields


def _several(value: Any) -> Any:
    """One folder is a list of one, and so it is written down."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def make_config(fields: dict[str, Any], **tokenizer: Any) -> AtlasConfig:
    """The configuration of a model: a recipe's fields, and what its tokenizer decides."""
    fields = {**fields, **tokenizer}
    size = fields.pop("size", None)
    return AtlasConfig(**fields) if size is None else sized_config(size, **fields)


class TokenizerConfig(Section):
    """Train a tokenizer on the training documents first, and keep it beside the run; else data.tokenizer is used."""

    vocabulary: Annotated[int, Field(ge=258)] | None = None
    documents: Count | None = None  # of the source, to train it on; None: all
    lessons: Count = 1000  # of each exercise, to train it on


class OptimizerConfig(Section):
    """name: `adamw`, or `muon` for the matrices of the layers, with AdamW for everything else.

    Muon's steps are scaled to the size of AdamW's, so that one learning rate serves both.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-3
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Momentum = 0.95  # of Muon
    clip: Positive | None = 1.0  # largest norm of the whole gradient


class ScheduleConfig(Section):
    """name: `cosine`, or `wsd`: warm-up, stable, decay. Steps are those of loop.steps, skipped ones included."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: CountOrNone = 100  # steps
    decay: Share = 0.2  # wsd: the share of all steps in which the rate falls
    final: Share = 0.1  # of the learning rate, where it ends


class LoopConfig(Section):
    """How long, and how a step is computed. The curriculum over sequence lengths is data.rows.lengths."""

    steps: Count
    rows_per_pass: Count | None = None  # of one process; more rows of the batch are accumulated; None: all at once
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast; memory states stay float32
    gradient_checkpointing: bool = False
    sharding: Literal["none", "fsdp2"] = "none"  # fsdp2: weights, gradients and moments over all processes; with adamw
    write_penalty: NotNegative = 0.0  # times the mean write of the memories, added to the loss
    leak_penalty: NotNegative = 0.0  # the same of what is written in an exercise's background alone
    write_penalty_from: CountOrNone = 0  # the step both begin at: what is worth writing has to be learned first
    write_penalty_ramp: CountOrNone = 0  # steps from their beginning to their full size
    patience: Count = 10  # steps in a row with a loss or gradient that is not finite, before the run stops


class EvaluationConfig(Section):
    every: CountOrNone = 200  # steps; 0: never
    batches: Count = 8


class CheckpointConfig(Section):
    every: CountOrNone = 200  # steps; 0: only at the end
    keep: Count = 2  # newest ones; the best one by validation loss is kept besides
    # What the weights of the finished model are kept in: half of the bytes; they are loaded as float32 either way.
    final: Literal["float32", "float16"] = "float32"


class LoggingConfig(Section):
    every: Count = 10  # steps
    monitors: bool = True  # look into the memories at logged steps
    tensorboard: bool = True  # if it is installed
    trackers: tuple[Literal["trackio", "wandb"], ...] = ()


class Recipe(Section):
    description: str = ""
    seed: CountOrNone = 0
    # Folders of saved models to go on from, with their tokenizer; several are joined (models/joining.py). Then `model`
    # must be empty.
    start: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    model: Annotated[dict[str, Any], AfterValidator(_checked_model)] = Field(default_factory=dict)
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = Field(default_factory=DataConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check_together(self) -> Recipe:
        if self.start and (self.model or self.tokenizer.vocabulary is not None):
            raise ValueError("start gives the model and its tokenizer; model and tokenizer must be left out with it.")
        if self.loop.leak_penalty and not self.data.exercises:
            raise ValueError("loop.leak_penalty needs data.exercises: only they know what is background.")
        if self.loop.sharding != "none" and self.optimizer.name == "muon":
            raise ValueError("loop.sharding='fsdp2' needs optimizer.name='adamw': Muon needs whole matrices.")
        if self.evaluation.every and not self.data.validation and self.data.source_share:
            raise ValueError("evaluation.every must be 0 where data.validation is 0: no documents are held out.")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values, all fields spelled out."""
        return self.model_dump(mode="json")

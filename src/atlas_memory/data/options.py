"""What can be chosen about data, as frozen dataclasses whose errors name the field: a recipe holds one DataConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import Strict

from atlas_memory.checks import check_choice, check_flag, check_whole

SOURCE_KINDS = ("builtin", "text", "jsonl", "datasets")
SPLITS = ("train", "validation", "all")
EXERCISES = "atlas_memory.exercises"  # the group of entry points
# What a folder is searched for when no suffixes are given: prose, markup and code, all of it plain text.
_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .html .xml .json .yaml .yml .toml .ini .cfg .csv .tsv .sql .sh .py .pyi .ipynb
    .c .h .cc .cpp .hpp .cu .cuh .rs .go .java .kt .scala .js .jsx .ts .tsx .css .rb .php .pl .lua .jl .r .swift
    .hs .ml .lean .v .asm .cmake
"""
TEXT_SUFFIXES = tuple(_SUFFIXES.split())
Whole = Annotated[int, Strict()]  # in a recipe, `yes` is not 1
_SEEDS = 2**32  # numpy's frozen generator takes 32-bit words


def check_text(name: str, value: Any, *, optional: bool = False) -> None:
    if not (optional and value is None) and not (isinstance(value, str) and value):
        raise ValueError(f"{name}={value!r} must be a word or a path{', or None' if optional else ''}.")


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where documents come from.

    kind: `builtin`, the standard library of the running Python; `text`, one document a file; `jsonl`, one a line;
    `datasets`, one a row of a Hugging Face dataset, from local files or from the hub.
    """

    kind: str = "builtin"
    path: str | None = None  # file, folder or glob; datasets: also a name on the hub
    field: str = "text"  # jsonl, datasets: which field holds the text
    suffixes: tuple[str, ...] = TEXT_SUFFIXES  # text: what to take from a folder
    encoding_errors: str = "strict"  # text, jsonl: bytes that are not UTF-8 are an error, or replaced by U+FFFD
    subset: str | None = None  # datasets: a configuration of the dataset
    split: str = "train"  # datasets
    revision: str | None = None  # datasets: a commit or tag on the hub
    streaming: bool = False  # datasets: read rows as they come, without a copy of the whole
    limit: Whole | None = None  # documents at most

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, SOURCE_KINDS)
        check_text("path", self.path, optional=True)
        if self.kind == "builtin" and self.path is not None:
            raise ValueError(f"path={self.path!r} has no meaning for kind='builtin'; it must be None.")
        if self.kind != "builtin" and self.path is None:
            raise ValueError(f"path=None must be given for kind={self.kind!r}: a file, a folder or a glob.")
        for name in ("field", "split"):
            check_text(name, getattr(self, name))
        for name in ("subset", "revision"):
            check_text(name, getattr(self, name), optional=True)
        check_choice("encoding_errors", self.encoding_errors, ("strict", "replace"))
        object.__setattr__(self, "suffixes", _checked_suffixes(self.suffixes))
        check_flag("streaming", self.streaming)
        check_whole("limit", self.limit, optional=True)

    @classmethod
    def parse(cls, words: str, **fields: Any) -> SourceConfig:
        """`builtin`, `kind:path`, or a path alone, whose kind is read off its name."""
        kind, colon, path = words.partition(":")
        if kind in SOURCE_KINDS and (colon or kind == "builtin"):
            return cls(kind=kind, path=path or None, **fields)
        if kind in SOURCE_KINDS:
            raise ValueError(f"source={words!r} needs a path: {kind}:PATH.")
        if words.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
            return cls(kind="jsonl", path=words, **fields)
        if Path(words).exists() or any(sign in words for sign in "*?["):
            return cls(kind="text", path=words, **fields)
        raise ValueError(
            f"source={words!r} must be builtin, text:PATH, jsonl:PATH, datasets:NAME, or the path of a file, "
            "a folder or a glob that exists."
        )


def _checked_suffixes(suffixes: Any) -> tuple[str, ...]:
    given = tuple(suffixes) if isinstance(suffixes, list | tuple) else ()
    if not given or not all(isinstance(suffix, str) and suffix.startswith(".") for suffix in given):
        raise ValueError(f"suffixes={suffixes!r} must be one or more endings with their dot, such as ['.txt', '.md'].")
    return given


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """How documents become rows.

    kind: `packed`, documents one after another, cut into full rows; `segments`, each row of the batch reads one
    document over as many batches as it takes. lengths: a curriculum, ((batch index, row length), ...): from that batch
    on, rows have that length.
    """

    kind: str = "packed"
    batch: Whole = 8  # rows of the global batch, over all ranks
    length: Whole = 512  # tokens of a row
    lengths: tuple[tuple[int, int], ...] = ()
    boundaries: str = "reset"  # packed: the memory forgets at the start of a document, or carries over it
    minimum_tokens: Whole = 1  # segments: shorter documents are left out
    shuffle: bool = True
    seed: Whole = 0
    epochs: Whole | None = None  # passes over the documents; None: without end

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("packed", "segments"))
        for name in ("batch", "length", "minimum_tokens"):
            check_whole(name, getattr(self, name))
        check_choice("boundaries", self.boundaries, ("reset", "carry"))
        check_flag("shuffle", self.shuffle)
        check_whole("seed", self.seed, least=0)
        if self.seed >= _SEEDS:
            raise ValueError(f"seed={self.seed} must be less than 2**32.")
        check_whole("epochs", self.epochs, optional=True)
        object.__setattr__(self, "lengths", _checked_lengths(self.lengths))
        if self.kind == "packed" and self.minimum_tokens != 1:
            raise ValueError(f"minimum_tokens={self.minimum_tokens} needs kind='segments'; packing takes all.")
        if self.kind == "segments" and self.boundaries != "reset":
            raise ValueError(
                f"boundaries={self.boundaries!r} needs kind='packed'; a segment holds one document, and its row says "
                "whether it is `fresh`."
            )

    def length_at(self, batch: int) -> int:
        """Tokens of a row of the global batch of this index."""
        length = self.length
        for begin, later in self.lengths:
            if begin > batch:
                break
            length = later
        return length


def _checked_lengths(lengths: Any) -> tuple[tuple[int, int], ...]:
    accepted = f"lengths={lengths!r} must be pairs (batch index, row length) with rising indices."
    try:
        pairs = tuple((begin, length) for begin, length in lengths)
    except (TypeError, ValueError) as error:
        raise ValueError(accepted) from error
    for begin, length in pairs:
        check_whole("batch index in lengths", begin, least=0)
        check_whole("row length in lengths", length)
    begins = [begin for begin, _ in pairs]
    if begins != sorted(set(begins)):
        raise ValueError(accepted)
    return pairs


def find_exercise(name: str) -> Any:
    """The class of this name among the entry points of EXERCISES; see `lessons.Exercise`."""
    known = {entry.name: entry for entry in entry_points(group=EXERCISES)}
    check_choice("exercise", name, sorted(known))
    return known[name].load()


@dataclasses.dataclass(frozen=True)
class ExerciseConfig:
    """Lessons made by a task, such as `babilong`. share: of all lessons; what is left is the source's.

    The exercise checks its own options here, if it can, so that a recipe is refused before any work.
    """

    name: str
    share: float = 1.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text("name", self.name)
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(f"share={self.share!r} must be a number above 0 and at most 1.")
        if not isinstance(self.options, dict):
            raise ValueError(f"options={self.options!r} must be names with values.")
        check = getattr(find_exercise(self.name), "check", None)
        if check is not None:
            self._check_options(check)

    def _check_options(self, check: Callable[[dict[str, Any]], object]) -> None:
        try:
            check(self.options)
        except TypeError as error:  # a value of another kind than any that was thought of
            raise ValueError(f"options={self.options!r} do not fit {self.name}: {error}.") from error


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Everything between files and batches.

    validation: the share of documents held out, spread evenly over the source. cache: a folder; None for the user's
    own cache folder.
    """

    source: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    exercises: tuple[ExerciseConfig, ...] = ()  # mixed with the source; rows of kind `segments` only
    tokenizer: str = "bytes"  # bytes, a folder, or a name on the hub
    rows: RowsConfig = dataclasses.field(default_factory=RowsConfig)
    validation: float = 0.05
    cache: str | None = None
    tokenizing_workers: Whole = 0  # processes that tokenise; 0: this one
    loading_workers: Whole = 0  # processes that prepare batches; 0: this one
    pin_memory: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("source", SourceConfig), ("rows", RowsConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a {kind.__name__}.")
        self._check_exercises()
        check_text("tokenizer", self.tokenizer)
        check_share("validation", self.validation)
        check_text("cache", self.cache, optional=True)
        for name in ("tokenizing_workers", "loading_workers"):
            check_whole(name, getattr(self, name), least=0)
        check_flag("pin_memory", self.pin_memory)

    def _check_exercises(self) -> None:
        object.__setattr__(self, "exercises", tuple(self.exercises))
        if self.exercises and self.rows.kind != "segments":
            raise ValueError(f"exercises need rows.kind='segments', got {self.rows.kind!r}.")
        if self.source_share < -1e-9:
            raise ValueError(f"the shares of exercises must be at most 1 together, got {1 - self.source_share:g}.")

    @property
    def source_share(self) -> float:
        """Of all lessons; exactly 0 where exercises take all."""
        left = 1 - sum(exercise.share for exercise in self.exercises)
        return 0.0 if abs(left) < 1e-9 else left


def check_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be a number of at least 0 and less than 1.")

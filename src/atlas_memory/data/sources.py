"""Where documents come from: each source yields them in the same order every time, and can say what it would yield."""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from atlas_memory.checks import check_choice
from atlas_memory.data import builtin
from atlas_memory.data.options import SPLITS, SourceConfig, check_share

_DATASET_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}


class Document(NamedTuple):
    text: str
    name: str


class Source(Protocol):
    """Documents, and a description that changes whenever they may have changed."""

    def documents(self) -> Iterator[Document]: ...

    def description(self) -> dict[str, Any]: ...


class EmptySourceError(ValueError):
    """A source, or the part of it that was asked for, has no text."""


def open_source(config: SourceConfig) -> Source:
    return _SOURCES[config.kind](config)


def read_documents(config: SourceConfig, split: str = "all", validation: float = 0.0) -> Iterator[Document]:
    """The documents of one split that have any text. No documents at all is an error."""
    check_choice("split", split, SPLITS)
    check_share("validation", validation)
    found = (document for document in open_source(config).documents() if document.text)
    seen, taken = 0, 0
    for seen, document in enumerate(itertools.islice(found, config.limit), 1):
        if split == "all" or _held_out(seen, validation) == (split == "validation"):
            taken += 1
            yield document
    if not taken:
        raise EmptySourceError(_nothing(config, split, validation, seen))


def _held_out(number: int, share: float) -> bool:
    """Whether the document of this number, from 1, goes to validation: evenly spaced, so that few documents will do."""
    return math.floor(number * share) > math.floor((number - 1) * share)


def _nothing(config: SourceConfig, split: str, share: float, seen: int) -> str:
    place = config.kind if config.path is None else f"{config.kind}:{config.path}"
    if not seen:
        return f"source {place} has no document with any text."
    return (
        f"validation={share} leaves no document of {seen} in {place} for split={split!r}; "
        f"accepted: at least {1 / seen:.3g} for a validation split, and documents for both."
    )


class _Files:
    """What sources of files share: which files, and how to tell whether they changed."""

    suffixes: tuple[str, ...] = ()

    def __init__(self, config: SourceConfig) -> None:
        self.config, self.path = config, str(config.path)
        self.root = Path(self.path) if Path(self.path).is_dir() else None
        self.files = self._find()
        if not self.files:
            among = f" ending in {' '.join(self.suffixes)}" if self.root is not None else ""
            raise EmptySourceError(f"path={self.path!r} matches no file{among}; accepted: a file, a folder or a glob.")

    def _find(self) -> list[Path]:
        path = Path(self.path)
        if path.is_file():
            return [path]
        if path.is_dir():
            return sorted(file for file in path.rglob("*") if file.is_file() and self._wanted(path, file))
        return sorted(file for file in map(Path, glob.glob(self.path, recursive=True)) if file.is_file())

    def _wanted(self, folder: Path, file: Path) -> bool:
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        return not hidden and file.name.lower().endswith(self.suffixes)

    def _name(self, file: Path) -> str:
        return (file if self.root is None else file.relative_to(self.root)).as_posix()

    def description(self) -> dict[str, Any]:
        return {"kind": self.config.kind, "field": self.config.field, "files": _stamps(self.files)}


class TextFiles(_Files):
    """One document a file."""

    def __init__(self, config: SourceConfig) -> None:
        self.suffixes = tuple(suffix.lower() for suffix in config.suffixes)
        super().__init__(config)

    def documents(self) -> Iterator[Document]:
        for file in self.files:
            yield Document(_decoded(file.read_bytes(), str(file), self.config.encoding_errors), self._name(file))


class JsonLines(_Files):
    """One document a line."""

    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst")

    def documents(self) -> Iterator[Document]:
        for file in self.files:
            with _opened(file) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        where = f"{file}, line {number}"
                        yield Document(self._text(line, where), f"{self._name(file)}:{number}")

    def _text(self, line: bytes, where: str) -> str:
        try:
            row = json.loads(_decoded(line, where, self.config.encoding_errors))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}); accepted: one object a line.") from error
        text = _field(row, self.config.field, where)
        return _whole_characters(text, where, self.config.encoding_errors) if b"\\u" in line else text


class HubDataset:
    """One document a row of a Hugging Face dataset: local files, a folder of `save_to_disk`, or a name on the hub."""

    def __init__(self, config: SourceConfig) -> None:
        self.config, self.path = config, Path(str(config.path))
        self._library = _optional("datasets", "datasets")

    def documents(self) -> Iterator[Document]:
        for number, row in enumerate(self._load()):
            where = f"dataset {self.config.path}, split {self.config.split}, row {number}"
            yield Document(_field(row, self.config.field, where), f"{self.config.path}:{number}")

    def _load(self) -> Iterable[Any]:
        config = self.config
        if (self.path / "state.json").is_file() or (self.path / "dataset_dict.json").is_file():
            saved = self._library.load_from_disk(str(self.path))
            if isinstance(saved, self._library.DatasetDict):
                check_choice("split", config.split, list(saved))
                saved = saved[config.split]
            return saved
        options: dict[str, Any] = {"split": config.split, "streaming": config.streaming, "revision": config.revision}
        if not self.path.is_file():
            return self._library.load_dataset(str(config.path), config.subset, **options)
        check_choice("suffix of path", self.path.suffix, tuple(_DATASET_BUILDERS))
        # datasets calls everything in a lone file its train split.
        options |= {"split": "train", "revision": None, "data_files": str(self.path)}
        return self._library.load_dataset(_DATASET_BUILDERS[self.path.suffix], **options)

    def description(self) -> dict[str, Any]:
        config = self.config
        fields = ("kind", "path", "field", "subset", "split", "revision")
        local = sorted(file for file in self.path.rglob("*") if file.is_file()) if self.path.is_dir() else []
        files = [self.path] if self.path.is_file() else local
        return {**{name: getattr(config, name) for name in fields}, "files": _stamps(files)}


class StandardLibrary:
    """The sources and documentation of the running Python: a corpus every machine has."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    def documents(self) -> Iterator[Document]:
        for text, name in itertools.chain(builtin.sources(), builtin.documentation()):
            yield Document(text, name)

    def description(self) -> dict[str, Any]:
        return {"kind": "builtin", "python": builtin.version(), "files": _stamps(builtin.files())}


_SOURCES: dict[str, Callable[[SourceConfig], Source]] = {
    "builtin": StandardLibrary,
    "text": TextFiles,
    "jsonl": JsonLines,
    "datasets": HubDataset,
}


def _stamps(files: Iterable[Path]) -> list[list[Any]]:
    """Path, size and time of change: quick to read for thousands of files, and any edit changes them."""
    stamps = ((file.resolve(), file.stat()) for file in files)
    return [[str(path), status.st_size, status.st_mtime_ns] for path, status in stamps]


def _decoded(content: bytes, where: str, errors: str) -> str:
    try:
        return content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: byte {error.start} is not UTF-8; accepted: UTF-8 text, or encoding_errors='replace'."
        ) from error


def _whole_characters(text: str, where: str, errors: str) -> str:
    """JSON can spell half of a character, which is no text in any encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where}: half of a surrogate pair at character {error.start}; accepted: whole characters, "
                "or encoding_errors='replace'."
            ) from error
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _opened(file: Path) -> Any:
    """A file of lines as bytes, decompressed by its suffix."""
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    if file.suffix == ".zst":
        return io.BufferedReader(_optional("zstandard", ".zst files").open(file, "rb"))
    return file.open("rb")


def _field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {type(row).__name__} instead of an object with the field {field!r}.")
    if field not in row:
        raise ValueError(f"{where}: field={field!r} is missing; fields here: {', '.join(map(repr, row)) or 'none'}.")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field={field!r} holds {type(text).__name__}; it must hold text.")
    return text


def _optional(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {module}: pip install 'atlas-memory[data]'.") from error

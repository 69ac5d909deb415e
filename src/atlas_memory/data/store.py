"""Tokenised documents on disk, memory-mapped: built once, found again by a fingerprint of all that went into them.

A store is a folder: `tokens.bin`, the documents one after another, each with its end token; `offsets.npy` (N + 1,),
where they begin; `manifest.json`, what they were made of and how large and of which checksum the files must be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from atlas_memory.checks import check_choice
from atlas_memory.data.folders import replace_folder
from atlas_memory.data.options import SPLITS, DataConfig
from atlas_memory.data.sources import open_source, read_documents
from atlas_memory.data.tokenizers import Encoder, load_tokenizer
from atlas_memory.data.tokenizing import tokenise

FORMAT = 1
# Up to this size tokens are read and compared with their checksum at every opening; above, only their size is.
QUICK_CHECK_BYTES = 2**27
_TOKENS, _OFFSETS, _MANIFEST = "tokens.bin", "offsets.npy", "manifest.json"
_log = logging.getLogger(__name__)


class DamagedStoreError(ValueError):
    """A folder that is not, or is no longer, the store it should be."""


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """Documents as token ids. Opened by `open_store`; goes to worker processes as its path."""

    folder: Path
    manifest: dict[str, Any]

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All documents, one after another, each with its end token."""
        return _plain(np.memmap(self.folder / _TOKENS, np.dtype(self.manifest["dtype"]), mode="r"))

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """(N + 1,) where each document begins, and where the last one ends."""
        return _plain(np.load(self.folder / _OFFSETS, mmap_mode="r"))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Ids of one document, its end token last."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def token_count(self) -> int:
        return int(self.manifest["tokens"])

    @property
    def end(self) -> int:
        return int(self.manifest["end"])

    @property
    def pad(self) -> int:
        return int(self.manifest["pad"])

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""
        return int(self.manifest["vocabulary"])

    @property
    def digest(self) -> str:
        """Of the content: the same for the same documents and tokenizer, wherever they lie."""
        checksums = self.manifest["files"]
        return hashlib.sha256("".join(checksums[name]["sha256"] for name in sorted(checksums)).encode()).hexdigest()

    def verify(self) -> None:
        """Compare every byte with the checksums."""
        for name in (_OFFSETS, _TOKENS):
            if _sha256(self.folder / name) != self.manifest["files"][name]["sha256"]:
                raise DamagedStoreError(f"{self.folder / name} has another content than it was written with.")

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "manifest": self.manifest}  # never the maps: they would travel as copies


def cache_folder(given: str | None) -> Path:
    """The folder given, $ATLAS_MEMORY_CACHE, or the user's cache folder."""
    chosen = given or os.environ.get("ATLAS_MEMORY_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas-memory" / "data"


def open_store(config: DataConfig, split: str = "train", *, progress: bool = True) -> Store:
    """The tokenised documents of one split; tokenised now if the cache does not have them.

    Of several processes that ask at once, one tokenises and the others wait for it.
    """
    check_choice("split", split, SPLITS)
    cache = cache_folder(config.cache)
    if config.source.path and cache.resolve().is_relative_to(Path(config.source.path).resolve()):
        raise ValueError(f"cache={str(cache)!r} lies in the source folder, and would be read as text; choose another.")
    encoder = Encoder(load_tokenizer(config.tokenizer))
    ingredients = {
        "format": FORMAT,
        "source": open_source(config.source).description(),
        "limit": config.source.limit,
        "encoding_errors": config.source.encoding_errors,
        "split": split,
        "validation": config.validation,
        "tokenizer": encoder.fingerprint,
    }

    def build(folder: Path) -> None:
        texts = (document.text for document in read_documents(config.source, split, config.validation))
        write_store(folder, tokenise(texts, encoder, config.tokenizing_workers, progress), encoder, ingredients)

    return _find_or_build(cache, _fingerprint(ingredients), build)


def _find_or_build(cache: Path, fingerprint: str, build: Callable[[Path], None]) -> Store:
    folder = cache / fingerprint[:24]
    cache.mkdir(parents=True, exist_ok=True)
    # The usual case waits for nobody; files may vanish meanwhile, if another process is repairing the store.
    with contextlib.suppress(DamagedStoreError, OSError):
        return read_store(folder, fingerprint)
    with _only_one(folder):
        if folder.exists():
            try:
                return read_store(folder, fingerprint)  # made while this process waited
            except DamagedStoreError as error:
                _log.warning("rebuilding the cache: %s", error)
        with replace_folder(folder) as unfinished:
            build(unfinished)
        return read_store(folder, fingerprint)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the system gives it back if this process is killed."""
    lock = filelock.FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _log.warning("another process is making %s: waiting for it.", folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_store(folder: Path, documents: Iterable[np.ndarray], encoder: Encoder, ingredients: dict[str, Any]) -> None:
    """Write a store into an empty folder, the manifest last."""
    ends, total = [0], 0
    with (folder / _TOKENS).open("wb") as file:
        for ids in documents:
            file.write(ids.astype(encoder.dtype, copy=False).tobytes())
            total += len(ids)
            ends.append(total)
    np.save(folder / _OFFSETS, np.array(ends, "<i8"))
    manifest = {
        "fingerprint": _fingerprint(ingredients),
        "dtype": encoder.dtype.str,
        "tokens": total,
        "documents": len(ends) - 1,
        "end": encoder.end,
        "pad": encoder.pad,
        "vocabulary": encoder.vocabulary,
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
            for name in (_TOKENS, _OFFSETS)
        },
        "ingredients": ingredients,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def read_store(folder: Path, fingerprint: str) -> Store:
    """A store in that folder, if it is whole and has that fingerprint."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        found, sizes = manifest["fingerprint"], {name: entry["bytes"] for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedStoreError(f"{folder / _MANIFEST} cannot be read ({error}).") from error
    if found != fingerprint:
        raise DamagedStoreError(f"{folder} was made of something else: fingerprint {found}, wanted {fingerprint}.")
    for name in (_TOKENS, _OFFSETS):
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != sizes.get(name):
            raise DamagedStoreError(f"{path} has {size} bytes instead of {sizes.get(name)}.")
    store = Store(folder, manifest)
    if sizes[_TOKENS] <= QUICK_CHECK_BYTES:
        store.verify()
    return store


def _plain(mapped: np.ndarray) -> np.ndarray:
    """The same map without its class, which makes every slice several times slower."""
    return mapped.view(np.ndarray)


def _fingerprint(ingredients: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""What an evaluation has done so far, in a folder beside its result: one that is killed loses minutes, not hours."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import shutil
from pathlib import Path
from typing import Any

from atlas_memory.files import write_json
from atlas_memory.models import AtlasCache
from atlas_memory.models.cache_file import load_cache, save_cache
from atlas_memory.tasks.results import by_content

FINISHED, READING = "finished.json", "reading.safetensors"


@dataclasses.dataclass
class Finished:
    """A batch of samples of a cell that is done: how right each was, and what reading took."""

    cell: int
    batch: int
    right: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0  # read, the model's own
    characters: int = 0
    seconds: float = 0.0
    peak_rss_mb: float = 0.0


def work_folder(out: Path) -> Path:
    """Beside a result."""
    return out.with_name(f"{out.name}.work")


def settings_before(out: Path) -> dict[str, Any]:
    """Of the result that stands there, or of work on it; empty where there is neither."""
    for file in (work_folder(out) / FINISHED, out):
        try:
            return dict(json.loads(file.read_text(encoding="utf-8"))["settings"])
        except (ValueError, KeyError, TypeError, OSError):
            continue
    return {}


class WorkFolder:
    """finished.json: settings and finished batches. reading.safetensors: the memory in the middle of the next one.

    The folder is made when there is something to keep.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.folder = work_folder(out)
        self._settings = settings
        self._file, self._cache = self.folder / FINISHED, self.folder / READING
        self.finished: list[Finished] = []
        if self._file.is_file():
            content = self._read()
            if by_content(content["settings"]) != by_content(self._settings):
                raise ValueError(
                    f"out={str(out)!r}: {self.folder} holds the work of another evaluation, with "
                    f"{_differing(content['settings'], self._settings)}; "
                    "remove that folder, repeat that command, or choose another --out."
                )
            self.finished = content["finished"]
        elif self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"out={str(out)!r}: {str(self.folder)!r}, where its work would be kept, is a file.")

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            settings = dict(content["settings"])
            return {"settings": settings, "finished": [Finished(**entry) for entry in content["finished"]]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(self._file)!r} is damaged ({error!r}); remove the folder to start anew.") from error

    def _write(self) -> None:
        self.folder.mkdir(exist_ok=True)
        entries = [dataclasses.asdict(entry) for entry in self.finished]
        write_json(self._file, {"settings": self._settings, "finished": entries})

    def has(self, cell: int, batch: int) -> bool:
        return any((entry.cell, entry.batch) == (cell, batch) for entry in self.finished)

    def add(self, entry: Finished) -> None:
        self.finished.append(entry)
        self._write()
        self._cache.unlink(missing_ok=True)

    def save_reading(self, entry: Finished, places: list[dict[str, Any]], cache: AtlasCache) -> None:
        if not self._file.is_file():
            self._write()
        notes = {"entry": dataclasses.asdict(entry), "places": places, "settings": self._settings}
        save_cache(cache, self._cache, notes)

    def load_reading(self, cell: int, batch: int) -> tuple[Finished, list[dict[str, Any]], AtlasCache] | None:
        """Where the reading of this batch stood, if it was saved, and of this evaluation."""
        if not self._cache.is_file():
            return None
        try:
            cache, notes = load_cache(self._cache)
            entry, places, settings = Finished(**notes["entry"]), notes["places"], notes["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(self._cache)!r} is damaged ({error}); remove the folder to start anew.") from error
        mine = (entry.cell, entry.batch) == (cell, batch) and by_content(settings) == by_content(self._settings)
        return (entry, places, cache) if mine else None

    def start_anew(self) -> None:
        self.remove()
        self.finished = []

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What was other then, each cut to a few words."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name}={reprlib.repr(before.get(name))}" for name in names)

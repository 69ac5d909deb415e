"""Checkpoints that are there in full or not at all, and know when they are damaged.

A checkpoint is a folder `step-00000100`: `model.safetensors` and `config.json`, which transformers can load;
`optimizer-<n>.pt`; `progress.json`, with the place in the data; for each rank `random-<rank>.pt` and, where states are
carried, `carried-<rank>.safetensors`; and `manifest.json`, the sizes and checksums of all of these.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor

from atlas_memory.data.folders import replace_folder, unfinished
from atlas_memory.models.cache_file import load_cache, save_cache
from atlas_memory.train import carry
from atlas_memory.train.learner import Learner
from atlas_memory.train.sharding import gathered, load_weights, optimizer_state

FORMAT = 2
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_log = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """A folder that is not, or is no longer, the checkpoint it should be."""


@dataclasses.dataclass
class Progress:
    """How far a run has come. Plain numbers, the same on every rank."""

    step: int = 0  # steps done
    tokens: int = 0  # real tokens of those steps
    skipped: int = 0  # steps in which something was not finite
    skipped_in_a_row: int = 0
    validation: dict[str, float] = dataclasses.field(default_factory=dict)  # {step: loss}
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # state of the loader
    processes: int = 1
    carried: bool = False  # whether states of the memories belong to it


class Checkpoints:
    """The checkpoints of a run, in a folder of their own."""

    def __init__(self, folder: Path, accelerator: Accelerator, keep: int = 2) -> None:
        self.folder, self.accelerator, self.keep = folder, accelerator, keep

    def all(self) -> list[Path]:
        """Oldest first; damaged ones among them. Folders of other names, such as copies, are nobody's business here."""
        return sorted(path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())

    def newest(self) -> Path | None:
        """The newest one that is whole, on every rank the same; damaged ones are reported."""
        found: list[str | None] = [None]
        if self.accelerator.is_main_process:
            found = [next((str(path) for path in reversed(self.all()) if self._whole(path)), None)]
        broadcast_object_list(found)
        return None if found[0] is None else Path(found[0])

    @staticmethod
    def _whole(path: Path) -> bool:
        try:
            verify(path)
        except DamagedCheckpointError as error:
            _log.warning("%s Going back to the checkpoint before it.", error)
            return False
        return True

    def save(self, learner: Learner, progress: Progress) -> Path:
        """Called by all ranks. Afterwards only the newest ones and the best are kept."""
        progress = dataclasses.replace(progress, processes=self.accelerator.num_processes, carried=bool(learner.caches))
        target = self.folder / f"step-{progress.step:08d}"
        whole = _whole_states(learner)
        if self.accelerator.is_main_process:
            with replace_folder(target) as temporary:
                self.accelerator.wait_for_everyone()  # the folder is there
                _write_shared(temporary, learner, whole, progress)
                _write_own(temporary, learner, self.accelerator.process_index)
                self.accelerator.wait_for_everyone()  # every rank has written
                _write_manifest(temporary)
            self._prune(progress)
        else:
            self.accelerator.wait_for_everyone()
            _write_own(unfinished(target), learner, self.accelerator.process_index)
            self.accelerator.wait_for_everyone()
        self.accelerator.wait_for_everyone()
        return target

    def _prune(self, progress: Progress) -> None:
        """Those beyond this step were damaged, or gone back from: they are no reason to delete one before."""
        steps = {path: int(path.name.removeprefix("step-")) for path in self.all()}
        existing = [path for path, step in steps.items() if step <= progress.step]
        losses = {path: progress.validation.get(str(steps[path]), math.nan) for path in existing}
        finite = [path for path in existing if math.isfinite(losses[path])]
        best = min(finite, key=lambda path: losses[path], default=None)
        for path in existing[: -self.keep]:
            if path != best:
                shutil.rmtree(path)

    def load(self, path: Path, learner: Learner, seed: int) -> Progress:
        """Put a learner where it was when this was saved, whatever the number of ranks was."""
        progress = Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))
        missing, unexpected = load_weights(learner.model, load_file(path / "model.safetensors"))
        if missing or unexpected:
            raise ValueError(f"{path} is of another model: missing {sorted(missing)}, unexpected {sorted(unexpected)}.")
        for place, optimizer in enumerate(learner.optimizers):
            state = torch.load(path / f"optimizer-{place}.pt", map_location="cpu", weights_only=True)
            optimizer.load_state_dict(optimizer_state(state, optimizer))
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        if progress.carried:
            learner.caches = _load_carried(path, progress.processes, learner, rank, world)
        if (path / f"random-{rank}.pt").is_file() and world == progress.processes:
            restore_random_numbers(torch.load(path / f"random-{rank}.pt", weights_only=True))
        else:  # no rank had the numbers that would be drawn now: draw from new ones, the same at every such resume
            seed_random_numbers(seed, rank, progress.step)
        return progress


def verify(path: Path) -> None:
    """Compare every file with the manifest."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: its {_MANIFEST} cannot be read ({error})."
        ) from error
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpointError(f"checkpoint {path} has format {manifest.get('format')!r}; accepted: {FORMAT}.")
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} is missing.")
        if file.stat().st_size != expected["size"] or _sha256(file) != expected["sha256"]:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} has another content than was written.")


def seed_random_numbers(seed: int, rank: int, step: int = 0) -> None:
    """Python, numpy and torch; every rank and step its own."""
    words = np.random.SeedSequence([seed, rank, step]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def random_numbers() -> dict[str, Any]:
    """The state of every generator this process has."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_numbers(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


class _Whole(NamedTuple):
    """What all ranks share, unsharded."""

    weights: dict[str, Tensor]
    optimizers: list[dict[str, Any]]


def _whole_states(learner: Learner) -> _Whole:
    """Asked for on every rank, as sharded tensors are gathered."""
    weights = gathered(dict(learner.model.named_parameters()))  # a tied one once
    return _Whole(weights, [gathered(optimizer.state_dict()) for optimizer in learner.optimizers])


def _write_shared(folder: Path, learner: Learner, whole: _Whole, progress: Progress) -> None:
    learner.model.config.save_pretrained(folder)
    tensors = {name: weight.detach().contiguous() for name, weight in whole.weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for place, state in enumerate(whole.optimizers):
        torch.save(state, folder / f"optimizer-{place}.pt")
    (folder / "progress.json").write_text(json.dumps(dataclasses.asdict(progress)), encoding="utf-8")


def _write_own(folder: Path, learner: Learner, rank: int) -> None:
    torch.save(random_numbers(), folder / f"random-{rank}.pt")
    if learner.caches:
        save_cache(carry.join(learner.caches), folder / f"carried-{rank}.safetensors")


def _write_manifest(folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / _MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")


def _load_carried(path: Path, written_by: int, learner: Learner, rank: int, world: int) -> list[Any]:
    """This rank's share: row r of a global batch is row r // world of rank r % world."""
    caches = [load_cache(path / f"carried-{r}.safetensors")[0] for r in range(written_by)]
    together = carry.join(caches).to(learner.accelerator.device)
    count = together.layers[0].batch_size
    stored = [row for r in range(written_by) for row in range(r, count, written_by)]  # global rows, as they lie
    place = {row: index for index, row in enumerate(stored)}
    mine = [place[row] for row in range(rank, count, world)]
    size = learner.recipe.loop.rows_per_pass or len(mine)
    return [carry.share(together, mine[begin : begin + size]) for begin in range(0, len(mine), size)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

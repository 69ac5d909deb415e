"""Evaluations that are stopped and gone on with, and work that is not theirs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atlas_memory.models import AtlasCache
from atlas_memory.tasks.evaluation import Request, evaluate, finished_report
from atlas_memory.tasks.reading import StreamReader, TokenRow
from atlas_memory.tasks.work import Finished, WorkFolder, settings_before
from tests.tasks.conftest import request, save_small, without_times

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from atlas_memory.tasks import reading
from atlas_memory.tasks.work import Finished, WorkFolder
from atlas_memory.tasks.evaluation import evaluate
from tests.tasks.conftest import request

torch.set_num_threads(1)
reading.SECONDS_UNWATCHED = 0.0  # every step is looked at, and saved
save, saved = WorkFolder.save_reading, []

def save_and_die(self, *arguments):
    save(self, *arguments)
    saved.append(1)
    if len(saved) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

WorkFolder.save_reading = save_and_die
evaluate(request(Path(sys.argv[1]), Path(sys.argv[2]), batch=2, step=100, save_every=0.0), progress=False)
"""


def test_killed_it_goes_on_where_it_was(byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calm = tmp_path / "out.json", tmp_path / "calm.json"
    # In the middle of a batch, two hundred tokens before its end: not yet so far that this model would have forgotten.
    command = [sys.executable, "-c", KILLED, str(byte_model), str(out), "18"]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    work = WorkFolder(out, request(byte_model, out, batch=2, step=100).all_settings())
    before, reading = work.finished, work.load_reading(1, 0)
    assert reading is not None and all(100 < len(place["waiting"]) < 300 for place in reading[1])
    said: dict[Path, list[list[str]]] = {out: [], calm: []}
    taken = {out: 0, calm: 0}
    take, answers = TokenRow.take, StreamReader.answers
    for file in (out, calm):

        def counting(row: TokenRow, count: int, file: Path = file) -> list[int]:
            taken[file] += 1
            return take(row, count)

        def listening(reader: StreamReader, *arguments: Any, file: Path = file) -> list[str]:
            said[file].append(answers(reader, *arguments))
            return said[file][-1]

        monkeypatch.setattr(TokenRow, "take", counting)
        monkeypatch.setattr(StreamReader, "answers", listening)
        evaluate(request(byte_model, file, batch=2, step=100), progress=False)
    assert before and taken[out] < taken[calm]  # not from the start
    # The first batch that it went on with had been begun; it is answered as by one who read it in one go.
    assert said[out] == said[calm][len(before) :] and len({text for batch in said[out] for text in batch}) > 1
    assert without_times(json.loads(out.read_text())) == without_times(json.loads(calm.read_text()))


def test_work_of_another_evaluation_is_not_taken(byte_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    WorkFolder(out, {"seed": 1}).add(Finished(0, 0, [1.0]))
    with pytest.raises(ValueError, match="holds the work of another evaluation"):
        evaluate(request(byte_model, out), progress=False)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"settings": null, "finished": []}'])
def test_damaged_work_is_named(content: str, byte_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    WorkFolder(out, {}).add(Finished(0, 0, [1.0]))
    (tmp_path / "out.json.work" / "finished.json").write_text(content)
    with pytest.raises(ValueError, match=r"finished\.json' is damaged .* remove the folder to start anew"):
        evaluate(request(byte_model, out), progress=False)


def test_a_file_in_the_place_of_the_work_is_named(byte_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.json.work").write_text("")
    with pytest.raises(ValueError, match=r"out\.json\.work', where its work would be kept, is a file"):
        evaluate(request(byte_model, tmp_path / "out.json"), progress=False)


def stopped(asked: Request) -> None:
    """Leave the work of one batch."""
    WorkFolder(asked.out, asked.all_settings()).add(Finished(0, 0, [1.0]))


def test_work_with_another_model_is_not_taken(tmp_path: Path) -> None:
    """The folder is the same, but not what is in it."""
    out, model = tmp_path / "out.json", save_small(tmp_path / "model", 320)
    stopped(request(model, out))
    assert WorkFolder(out, request(model, out).all_settings()).finished
    for file in ("config.json", "model.safetensors"):
        content = (model / file).read_bytes()
        (model / file).write_bytes(content + b" ")
        with pytest.raises(ValueError, match=r"work of another evaluation, with model_digest='\w+\.\.\.\w+'; remove"):
            evaluate(request(model, out), progress=False)
        (model / file).write_bytes(content)
    assert WorkFolder(out, request(model, out).all_settings()).finished


@pytest.mark.parametrize("name", ["facts", "background", "book"])
def test_work_with_other_files_is_not_taken(byte_model: Path, tmp_path: Path, name: str) -> None:
    out, file = tmp_path / "out.json", tmp_path / "qa1.txt"
    file.write_text("1 Mary moved to the office.\n")
    asked = request(byte_model, out, settings={name: str(file)})
    stopped(asked)
    assert WorkFolder(out, asked.all_settings()).finished
    file.write_text("1 Mary moved to the garden.\n")
    with pytest.raises(ValueError, match=rf"work of another evaluation, with {name}_digest="):
        evaluate(asked, progress=False)


def test_a_finished_report_is_of_the_same_request(tmp_path: Path) -> None:
    out, model = tmp_path / "out.json", save_small(tmp_path / "model", 320)
    asked = request(model, out)
    assert finished_report(asked) is None
    report = evaluate(asked, progress=False)
    assert finished_report(asked) == report
    assert finished_report(request(model, out, batch=2, step=8)) == report  # the same answers, at another pace
    for fields in ({"precision": "bfloat16"}, {"name": "niah"}, {"settings": {"seed": 1}}):
        assert finished_report(request(model, out, **fields)) is None
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content + b" ")
    assert finished_report(asked) is None
    (model / "model.safetensors").write_bytes(content)
    for text in ("nothing", "[]"):
        out.write_text(text)
        assert finished_report(asked) is None


def test_a_refusal_is_short(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    WorkFolder(out, {"same": 1, "files": {str(number): "x" * 99 for number in range(99)}}).add(Finished(0, 0))
    with pytest.raises(ValueError, match=r"with files=\{.*\}, seed=None; remove") as refusal:
        WorkFolder(out, {"same": 1, "seed": 2})
    assert len(str(refusal.value)) < 700 and "same" not in str(refusal.value)


def test_a_reading_of_another_evaluation_is_not_gone_on_with(tmp_path: Path) -> None:
    out, cache = tmp_path / "out.json", AtlasCache(1)
    WorkFolder(out, {"seed": 1}).save_reading(Finished(0, 0, tokens=7), [{"read": 7}], cache)
    found = WorkFolder(out, {"seed": 1}).load_reading(0, 0)
    assert found is not None and found[0].tokens == 7
    (tmp_path / "out.json.work" / "finished.json").unlink()
    assert WorkFolder(out, {"seed": 2}).load_reading(0, 0) is None
    file = tmp_path / "out.json.work" / "reading.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"reading\.safetensors' is damaged .* remove the folder to start anew"):
        WorkFolder(out, {"seed": 1}).load_reading(0, 0)


def test_again_is_again_whatever_was_left_behind(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that died after its report was written, and before its work was removed."""
    asked = request(byte_model, tmp_path / "out.json")
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", lambda _: None)
        before = evaluate(asked, progress=False)
    assert WorkFolder(asked.out, asked.all_settings()).finished
    read: list[int] = []
    answers = StreamReader.answers

    def listening(reader: StreamReader, *arguments: Any) -> list[str]:
        read.append(1)
        return answers(reader, *arguments)

    monkeypatch.setattr(StreamReader, "answers", listening)
    after = evaluate(asked, progress=False)
    assert len(read) == 4 and not asked.out.with_name("out.json.work").exists()
    assert without_times(after.to_dict()) == without_times(before.to_dict())


def test_what_an_evaluation_began_with(byte_model: Path, tmp_path: Path) -> None:
    asked = request(byte_model, tmp_path / "out.json", precision="bfloat16")
    assert settings_before(asked.out) == {}
    stopped(asked)
    assert settings_before(asked.out)["precision"] == "bfloat16"
    evaluate(asked, progress=False)
    assert settings_before(asked.out)["precision"] == "bfloat16"
    asked.out.write_text("[]")
    assert settings_before(asked.out) == {}

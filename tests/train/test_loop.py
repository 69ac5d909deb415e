"""The loop in one process: it learns, resumes bit for bit, and knows when to stop."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atlas_memory.data import RowsConfig, SegmentRows, load_tokenizer, train_tokenizer
from atlas_memory.models import AtlasCache, AtlasForCausalLM
from atlas_memory.ops import MemoryState, Monitors
from atlas_memory.tasks.babilong.training import Babilong
from atlas_memory.train import DivergedError, Recipe, train
from atlas_memory.train import loop as loop_module
from atlas_memory.train.checkpoint import Checkpoints, DamagedCheckpointError, verify
from atlas_memory.train.kept_tokenizer import MADE_FROM
from atlas_memory.train.learner import Learner, Reader, mean_leak, mean_write, watched
from atlas_memory.train.records import LOG, read_log
from atlas_memory.train.runs import find
from tests.models.support import VOCABULARY, small_model, token_ids
from tests.train.support import SEGMENTS, STEPS, cut_back, logged, tiny_recipe, weights


def recipe(folder: Path, **sections: Any) -> Recipe:
    return Recipe.model_validate(tiny_recipe(folder, **sections))


def trained(folder: Path, name: str, resume: bool = False, **sections: Any) -> Path:
    train(recipe(folder, **sections), folder / name, resume=resume, progress=False)
    return folder / name


def same(first: Path, second: Path) -> bool:
    one, other = weights(first / "final"), weights(second / "final")
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "carried": {"data": {"rows": {"kind": "packed", "boundaries": "carry", "batch": 4, "length": 12}}},
    "segments": {"data": SEGMENTS},
    "accumulated segments": {"data": SEGMENTS, "loop": {"steps": STEPS, "rows_per_pass": 3}},
    "muon, curriculum, tied": {
        "model": {"tie_word_embeddings": True},
        "optimizer": {"name": "muon", "lr": 0.01},
        "data": {"rows": {"batch": 4, "length": 8, "lengths": [[2, 12], [5, 16]]}},
    },
    "bfloat16 segments": {"data": SEGMENTS, "loop": {"steps": STEPS, "precision": "bfloat16"}},
    "checkpointed activations": {"data": SEGMENTS, "loop": {"steps": STEPS, "gradient_checkpointing": True}},
    "a trained tokenizer": {"tokenizer": {"vocabulary": 300}},
    "mac, penalty": {
        "model": {"backbone": "mac", "segment_length": 8},
        "data": SEGMENTS,
        "loop": {"steps": STEPS, "write_penalty": 0.5},
    },
    "memory tokens": {
        "model": {"preset": None, "layer_types": ["memory_tokens"], "num_hidden_layers": 1, "segment_length": 5},
        "data": SEGMENTS,
    },
    "full attention": {
        "model": {"preset": None, "layer_types": ["full_attention"], "num_hidden_layers": 1},
        "data": SEGMENTS,
        "loop": {"steps": STEPS, "rows_per_pass": 3},
    },
    "transformer": {"model": {"preset": "transformer", "backbone": "lmm", "memory": {}}, "data": SEGMENTS},
}


def sections_of(variant: str, folder: Path) -> dict[str, Any]:
    """With the parts of the tiny recipe that a variant leaves as they are."""
    sections, base = dict(VARIANTS[variant]), tiny_recipe(folder)
    return {name: {**base.get(name, {}), **section} for name, section in sections.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_is_exact(tmp_path: Path, variant: str) -> None:
    sections = sections_of(variant, tmp_path)
    whole = trained(tmp_path, "whole", **sections)
    resumed = cut_back(whole, "resumed", STEPS - 2)
    trained(tmp_path, "resumed", resume=True, **sections)
    assert same(whole, resumed)
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "validation_loss") == logged(whole, "validation_loss")


def test_rows_begin_new_documents_at_different_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests of resuming and of several processes rely on."""
    asked: list[list[bool]] = []
    forward = Reader.forward
    monkeypatch.setattr(Reader, "forward", lambda self, *args: asked.append(list(args[3])) or forward(self, *args))
    trained(tmp_path, "run", data=tiny_recipe(tmp_path)["data"] | SEGMENTS, evaluation={"every": 0})
    assert any(any(fresh) and not all(fresh) for fresh in asked[: STEPS - 2])


def test_the_loss_falls_and_the_model_is_a_folder_of_transformers(tmp_path: Path) -> None:
    run = trained(tmp_path, "run", loop={"steps": 25}, checkpoint={"every": 0})
    losses = logged(run)
    assert sum(losses[-3:]) < sum(losses[:3]) - 3
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "final"), AutoTokenizer.from_pretrained(run / "final")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generate(**tokenizer("Line", return_tensors="pt"), max_new_tokens=3).shape == (1, 7)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000025"]


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_accumulation_changes_nothing(tmp_path: Path, kind: str) -> None:
    data = tiny_recipe(tmp_path)["data"] | {"rows": {"kind": kind, "batch": 4, "length": 12}}
    whole = trained(tmp_path, "whole", data=data)
    split = trained(tmp_path, "split", data=data, loop={"steps": STEPS, "rows_per_pass": 3})
    assert logged(split) == pytest.approx(logged(whole), rel=1e-5)


def test_monitors_only_look(tmp_path: Path) -> None:
    looked_at = trained(tmp_path, "watched", data=tiny_recipe(tmp_path)["data"] | SEGMENTS)
    blind = trained(
        tmp_path,
        "blind",
        data=tiny_recipe(tmp_path)["data"] | SEGMENTS,
        logging={"every": 1, "monitors": False, "tensorboard": False},
    )
    assert same(looked_at, blind)
    assert logged(looked_at, "memory_norm")
    assert not logged(blind, "memory_norm")


def test_a_penalty_makes_memories_write_less(tmp_path: Path) -> None:
    free = trained(tmp_path, "free", loop={"steps": 20})
    held = trained(tmp_path, "held", loop={"steps": 20, "write_penalty": 100.0})
    assert logged(held, "write")[-1] < 0.9 * logged(free, "write")[-1]
    later = trained(tmp_path, "later", loop={"steps": 20, "write_penalty": 100.0, "write_penalty_from": 20})
    assert same(later, free)


STORIES = {
    "exercises": [{"name": "babilong", "options": {"tasks": ["qa1"], "lengths": [200]}}],
    "rows": {"kind": "segments", "batch": 4, "length": 64},
}


def test_a_leak_penalty_makes_memories_write_less_where_nothing_is_told(tmp_path: Path) -> None:
    free = trained(tmp_path, "free", data=STORIES, loop={"steps": 20, "leak_penalty": 1e-9})
    held = trained(tmp_path, "held", data=STORIES, loop={"steps": 20, "leak_penalty": 100.0})
    assert logged(held, "leak")[-1] < 0.8 * logged(free, "leak")[-1]


def test_a_leak_is_a_write_in_the_background() -> None:
    """Of rows of different lengths, as part of the mean over all that is real."""
    model = small_model(preset="titans").train()
    rows = SegmentRows(
        Babilong({"tasks": ["qa1"], "lengths": [0, 200]}).lessons(load_tokenizer("bytes")),
        RowsConfig(kind="segments", batch=3, length=1100),
    )
    batch = rows.read()
    ids = batch.input_ids % VOCABULARY
    assert batch.background.any() and not batch.mask.all()
    with watched(model) as seen:
        model.model(ids, attention_mask=batch.mask)
    everything = dataclasses.replace(batch, background=batch.mask)
    assert torch.allclose(mean_leak(seen, everything), mean_write(seen))
    few, many = Monitors(mean_write=torch.tensor(1.0), tokens=10), Monitors(mean_write=torch.tensor(0.0), tokens=30)
    assert mean_write([few, many]) == 0.25  # groups of sequences count by their tokens
    read = batch.background[:, : int(batch.lengths.max())]
    expected = [monitor.writes[read].mean() * read.sum() for monitor in seen]
    assert torch.allclose(mean_leak(seen, batch), torch.stack(expected).mean() / batch.mask.sum())


@pytest.mark.parametrize(
    "model", [{"backbone": "mac"}, {"preset": None, "layer_types": ["full_attention"], "num_hidden_layers": 1}]
)
def test_a_leak_penalty_needs_memories_that_read_rows(tmp_path: Path, model: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"loop\.leak_penalty needs a model with memories that read a row at once"):
        trained(tmp_path, "run", model=model, data=STORIES, loop={"steps": 1, "leak_penalty": 1.0})


def test_a_leak_penalty_needs_exercises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"loop\.leak_penalty needs data\.exercises"):
        recipe(tmp_path, loop={"steps": 1, "leak_penalty": 1.0})


def test_rows_that_begin_do_not_thin_the_penalty() -> None:
    """Asking for the state they begin with is no reading."""
    model = small_model(preset="gated_deltanet").train()
    ids, fresh = token_ids(2, 8), [True, False]
    with watched(model) as alone:
        cache = model(ids).past_key_values
    with watched(model) as restarted:
        model.model(ids, past_key_values=cache, fresh=fresh)
    assert len(restarted) == len(alone) > 0


def test_a_run_starts_from_a_saved_model(tmp_path: Path) -> None:
    first = trained(tmp_path, "first", loop={"steps": 3})
    fields = tiny_recipe(tmp_path, loop={"steps": 1}, optimizer={"lr": 1e-12}) | {"start": str(first / "final")}
    del fields["model"]
    second = tmp_path / "second"
    train(Recipe.model_validate(fields), second, progress=False)
    before, after = weights(first / "final"), weights(second / "final")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    with pytest.raises(ValueError, match="start gives the model and its tokenizer"):
        Recipe.model_validate({**fields, "model": {"preset": "titans"}})


def test_a_finished_model_may_be_kept_in_half_of_the_bytes(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    whole = trained(tmp_path, "whole", model=tied, loop={"steps": 3}) / "final"
    half = trained(tmp_path, "half", model=tied, loop={"steps": 3}, checkpoint={"final": "float16"}) / "final"
    before, after = weights(whole), weights(half)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].half()) for name in before)
    model = AutoModelForCausalLM.from_pretrained(half)
    assert model.dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight


def test_a_run_starts_from_several_models_side_by_side(tmp_path: Path) -> None:
    """And is refused where their tokenizers differ, which would give words another meaning."""
    folder = str(trained(tmp_path, "first", loop={"steps": 3}) / "final")
    fields = tiny_recipe(tmp_path, loop={"steps": 1}, optimizer={"lr": 1e-12}) | {"start": [folder, folder]}
    del fields["model"]
    train(Recipe.model_validate(fields), tmp_path / "both", progress=False)
    single, joined = (AtlasForCausalLM.from_pretrained(at).eval() for at in (folder, tmp_path / "both" / "final"))
    assert joined.config.hidden_size == 2 * single.config.hidden_size
    ids = token_ids(1, 20)
    assert torch.allclose(joined(ids).logits, single(ids).logits, atol=1e-4)
    other = tmp_path / "other"
    train_tokenizer(["another language"], 300, other, progress=False)
    shutil.copytree(folder, other, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match="have different tokenizers"):
        train(Recipe.model_validate(fields | {"start": [folder, str(other)]}), tmp_path / "mixed", progress=False)


def test_a_task_is_trained_on_by_its_name(tmp_path: Path) -> None:
    """With a tokenizer of its own words; the loss is that of the answers, the tokens are all that were read."""
    data = {
        "exercises": [{"name": "babilong", "options": {"tasks": ["qa1"]}}],
        "rows": {"kind": "segments", "batch": 4, "length": 48},
    }
    fields = tiny_recipe(tmp_path, data=data, loop={"steps": 12})
    fields["tokenizer"] = {"vocabulary": 400, "lessons": 50}
    out = tmp_path / "run"
    train(Recipe.model_validate(fields), out, progress=False)
    assert logged(out)[-1] < logged(out)[0]
    assert logged(out, "tokens")[0] > 100
    assert len(logged(out, "validation_loss")) == 4
    assert load_tokenizer(out / "final").tokenize(" bathroom") == ["\u0120bathroom"]


def test_memory_states_stay_float32_under_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[AtlasCache]] = []
    save = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, learner, p: kept.append(learner.caches) or save(self, learner, p)
    )
    trained(
        tmp_path,
        "run",
        data=tiny_recipe(tmp_path)["data"] | SEGMENTS,
        loop={"steps": 2, "precision": "bfloat16"},
    )
    parts = [part for layer in kept[-1][0].layers if layer.state is not None for part in layer.state.parts.values()]
    memories = [part for part in parts if isinstance(part, MemoryState)]
    assert memories
    assert {tensor.dtype for part in memories for tensor in part.tensors.values()} == {torch.float32}


def test_carried_rows_see_what_came_before(tmp_path: Path) -> None:
    """In segments a step knows the documents from their beginning: other losses than if every row started empty."""
    data = tiny_recipe(tmp_path)["data"] | SEGMENTS
    carried = trained(tmp_path, "carried", data=data)
    forgetful = Learner._read

    def forget(self: Learner, *arguments: Any) -> Any:
        self.caches = []
        return forgetful(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "_read", forget)
        empty = trained(tmp_path, "empty", data=data)
    assert logged(carried)[0] == logged(empty)[0]
    assert logged(carried)[1:] != logged(empty)[1:]


class TestDivergence:
    def test_a_bad_step_changes_no_weight_and_is_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, forward = [0], Reader.forward

        def spoiled(self: Reader, *arguments: Any) -> Any:
            reading = forward(self, *arguments)
            calls[0] += self.training
            return (
                reading._replace(loss=reading.loss * float("nan")) if calls[0] == STEPS and self.training else reading
            )

        monkeypatch.setattr(Reader, "forward", spoiled)
        run = trained(tmp_path, "run", evaluation={"every": 0})
        before, after = (weights(run / "checkpoints" / f"step-{step:08d}") for step in (STEPS - 1, STEPS))
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert logged(run, "skipped")[-2:] == [0, 1]

    @pytest.mark.parametrize("backbone", ["mag", "mac"])
    def test_stops_with_the_last_monitors(
        self, tmp_path: Path, backbone: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = tiny_recipe(tmp_path)["model"] | {"backbone": backbone, "segment_length": 8}
        with pytest.raises(DivergedError, match=r"3 steps in a row .*memory_norm"):
            trained(
                tmp_path,
                "run",
                model=model,
                optimizer={"lr": 1e30},
                loop={"steps": 9, "patience": 3},
                schedule={"name": "constant", "warmup": 0},
                evaluation={"every": 0},
            )
        assert "is skipped" in caplog.text


class TestCheckpoints:
    def test_the_newest_and_the_best_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        losses = iter([2.0, 1.0, 3.0, 4.0, 5.0, 6.0])
        monkeypatch.setattr(Learner, "loss", lambda self, batches: next(losses))
        run = trained(tmp_path, "run", evaluation={"every": 1}, checkpoint={"every": 1, "keep": 2})
        kept = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
        assert kept == [2, 5, 6]

    def test_a_loss_that_is_no_number_is_never_the_best(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        losses = iter([float("nan"), 1.0, 3.0, float("inf"), 5.0, 6.0])
        monkeypatch.setattr(Learner, "loss", lambda self, batches: next(losses))
        run = trained(tmp_path, "run", evaluation={"every": 1}, checkpoint={"every": 1, "keep": 2})
        kept = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
        assert kept == [2, 5, 6]
        for line in (run / LOG).read_text(encoding="utf-8").splitlines():
            json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
        assert read_log(run)[1]["validation_loss"] != read_log(run)[1]["validation_loss"]  # NaN

    def test_other_folders_and_later_checkpoints_are_left_alone(self, tmp_path: Path) -> None:
        first = trained(tmp_path, "run", loop={"steps": 3}, checkpoint={"every": 1, "keep": 1}, evaluation={"every": 0})
        (first / "checkpoints" / "step-00000003-copy").mkdir()
        later = first / "checkpoints" / "step-00000009"
        later.mkdir()  # damaged
        trained(
            tmp_path, "run", resume=True, loop={"steps": 4}, checkpoint={"every": 1, "keep": 1}, evaluation={"every": 0}
        )
        kept = sorted(path.name for path in (first / "checkpoints").iterdir())
        assert kept == ["step-00000003-copy", "step-00000004", "step-00000009"]

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest"])
    def test_damage_is_detected_and_the_one_before_is_used(
        self, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        whole = trained(tmp_path, "whole")
        resumed = cut_back(whole, "resumed", STEPS)
        newest = resumed / "checkpoints" / f"step-{STEPS:08d}"
        _damage(newest, damage)
        with pytest.raises(DamagedCheckpointError, match="damaged"):
            verify(newest)
        trained(tmp_path, "resumed", resume=True)
        assert f"step-{STEPS:08d} is damaged" in caplog.text
        assert same(whole, resumed)

    def test_a_crash_while_saving_leaves_no_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(folder: Path) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("atlas_memory.train.checkpoint._write_manifest", fail)
        with pytest.raises(OSError, match="no space"):
            trained(tmp_path, "run")
        assert not list((tmp_path / "run" / "checkpoints").iterdir())

    @pytest.mark.parametrize("left", ["checkpoints", "final", "log.jsonl", "tokenizer"])
    def test_a_folder_with_a_run_is_not_overwritten(self, tmp_path: Path, left: str) -> None:
        (tmp_path / "run" / left).mkdir(parents=True)
        with pytest.raises(ValueError, match="holds a run already"):
            trained(tmp_path, "run")

    def test_a_folder_that_would_be_read_as_text(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="lies in the source folder"):
            trained(tmp_path, "texts/run")

    def test_a_tokenizer_of_another_recipe_is_refused(self, tmp_path: Path) -> None:
        trained(tmp_path, "run", loop={"steps": 1}, tokenizer={"vocabulary": 300})
        with pytest.raises(ValueError, match=r"made with tokenizer\.vocabulary=300, and not 310"):
            trained(tmp_path, "run", resume=True, loop={"steps": 2}, tokenizer={"vocabulary": 310})
        (tmp_path / "run" / "tokenizer" / MADE_FROM).unlink()
        with pytest.raises(ValueError, match="it is not known what it was made from"):
            trained(tmp_path, "run", resume=True, loop={"steps": 2}, tokenizer={"vocabulary": 300})

    def test_another_model_is_refused(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        run = trained(tmp_path, "run")
        before = (run / loop_module.RECIPE).read_bytes()
        with pytest.raises(ValueError, match="another model"):
            trained(tmp_path, "run", resume=True, model=tiny_recipe(tmp_path)["model"] | {"num_hidden_layers": 1})
        assert (run / loop_module.RECIPE).read_bytes() == before
        assert "model.num_hidden_layers was 2, and is 1" in caplog.text
        with pytest.raises(ValueError, match=r"another model: missing .*embed_tokens"):
            trained(tmp_path, "run", resume=True, model=tiny_recipe(tmp_path)["model"] | {"hidden_size": 16})

    def test_nothing_to_resume_from_is_a_beginning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            run = trained(tmp_path, "run", resume=True)
        assert (run / loop_module.FINAL).is_dir()


def _damage(checkpoint: Path, damage: str) -> None:
    file = checkpoint / ("manifest.json" if damage == "no manifest" else "model.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-10])
    elif damage == "flipped":
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()


def test_runs_end_where_the_data_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tiny_recipe(tmp_path)["data"] | {"rows": {"batch": 4, "length": 200, "epochs": 1}}
    run = trained(tmp_path, "run", data=data, loop={"steps": 50})
    assert "The data ended" in caplog.text
    steps = len(logged(run))
    assert 1 <= steps < 50
    assert logged(run, "data_ended") == [True]
    assert read_log(run)[-2]["step"] == steps  # validated at the end
    assert (run / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert find([run])[0].row()[-1] == "yes"
    before = read_log(run)
    trained(tmp_path, "run", resume=True, data=data, loop={"steps": 50})
    assert read_log(run) == before

"""Recipes: defaults, overrides, and errors that point at the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from atlas_memory.spec import presets
from atlas_memory.train.recipe import Recipe, make_config
from atlas_memory.train.recipe_files import RecipeError, differences, load_recipe, save_recipe, shipped_recipes

GOOD = """\
model:
  preset: titans
data:
  rows:
    batch: 4
optimizer:
  lr: 3e-4
loop:
  steps: 5
"""


def load(folder: Path, text: str, *overrides: str) -> object:
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return load_recipe(folder / "recipe.yaml", overrides)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_found_by_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description
    assert make_config(recipe.model, vocab_size=258).preset in presets.names()


def test_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    """YAML reads 3e-4 as text."""
    assert load(tmp_path, GOOD).optimizer.lr == 3e-4  # type: ignore[attr-defined]


def test_a_resolved_recipe_is_read_as_the_same_one(tmp_path: Path) -> None:
    recipe = load_recipe("lm-books", ["optimizer.lr=0.5"])
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe


def test_overrides(tmp_path: Path) -> None:
    recipe = load_recipe("quick", ["optimizer.lr=3e-4", "data.rows.lengths=[[0, 16], [5, 32]]", "model.backbone=lmm"])
    assert (recipe.optimizer.lr, recipe.model["backbone"]) == (3e-4, "lmm")
    assert recipe.data.rows.lengths == ((0, 16), (5, 32))
    changed = differences(load_recipe("quick").to_dict(), recipe.to_dict())
    assert [field for field, _, _ in changed] == ["model.backbone", "data.rows.lengths", "optimizer.lr"]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("  lr: 3e-4", "  lrr: 3e-4", 7, "optimizer.lrr: is unknown; did you mean lr?"),
        ("  lr: 3e-4", "  lr: fast", 7, "optimizer.lr: 'fast': input should be a valid number"),
        ("  lr: 3e-4", "  lr: -1", 7, "optimizer.lr: -1: input should be greater than 0"),
        ("    batch: 4", "    batch: 0", 5, "data.rows.batch: batch=0 must be a whole number of at least 1."),
        ("    batch: 4", "    batch: yes", 5, "data.rows.batch: True: input should be a valid integer."),
        ("    batch: 4", "    bach: 4", 5, "data.rows.bach: is unknown; did you mean batch?"),
        ("  preset: titans", "  preset: titanic", 2, "titanic"),
        ("  preset: titans", "  presets: titans", 2, "model.presets: is unknown; did you mean preset?"),
        ("  steps: 5", "  precision: float16\n  steps: 5", 9, "loop.precision: 'float16'"),
        ("  steps: 5", "  steps: yes", 9, "loop.steps: True: input should be a valid integer."),
        ("  steps: 5", "  patience: 3", 8, "loop.steps: must be given."),
        ("optimizer:", "optimiser:", 6, "optimiser: is unknown; did you mean optimizer?"),
        ("loop:", "loop:\n  steps: 4", 10, "steps is given twice."),
        ("  preset: titans", "  size: 340q", 2, "model.size: size='340q' is unknown; known: 170m"),
        ("  preset: titans", "  size: 340m\n  preset: titanic", 3, "titanic"),
        ("  preset: titans", "  size: 340m\n  memory: {chnk: 3}", 3, "model.memory: memory={'chnk': 3} does not fit"),
        (
            "  preset: titans",
            "  size: 340m\n  layer_types: [atlas]",
            3,
            "must name a type for each of num_hidden_layers=24",
        ),
        ("  preset: titans", "  size: 340m\n  num_attention_heads: 7", 1, "hidden_size=1024 must be an even multiple"),
        ("  preset: titans", "  size: 340m\n  intermediate_size: 64", 3, "intermediate_size=64 must be left out"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(tmp_path, GOOD.replace(old, new))
    assert f"{tmp_path / 'recipe.yaml'}:{line}: " in str(raised.value)
    assert message in str(raised.value)


EXERCISE = """\
data:
  rows: {kind: segments}
  exercises:
    - share: 0.5
      name: babilong
      options:
        tasks: [qa1]
loop: {steps: 5}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("babilong", "babylong", 4, "data.exercises.0: exercise='babylong' is not a choice; allowed: babilong"),
        ("share: 0.5", "share: 0.5\n      share: 0.2", 5, "share is given twice."),
        ("share: 0.5", "shares: 0.5", 4, "data.exercises.0.shares: is unknown; did you mean share?"),
        ("share: 0.5", "share: 2", 4, "data.exercises.0.share: share=2.0 must be a number above 0 and at most 1."),
    ],
)
def test_exercises_are_checked_with_the_recipe(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    load(tmp_path, EXERCISE)
    with pytest.raises(RecipeError) as raised:
        load(tmp_path, EXERCISE.replace(old, new))
    assert f"{tmp_path / 'recipe.yaml'}:{line}: " in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("option", "line", "message"),
    [
        ("task: qa1", 4, "data.exercises.0: option of babilong='task' is not a choice; allowed: tasks"),
        ("tasks: [qa0]", 4, "data.exercises.0: task='qa0' is not a choice"),
        ("seed: one", 7, "data.exercises.0.options.seed: seed='one' must be a whole number"),
        ("more_questions: many", 7, "data.exercises.0.options.more_questions: more_questions='many'"),
        ("stages: [5]", 7, "data.exercises.0.options.stages: stages=[5] must be a list"),
    ],
)
def test_options_of_exercises_are_checked_with_the_recipe(tmp_path: Path, option: str, line: int, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(tmp_path, EXERCISE.replace("tasks: [qa1]", option))
    assert f"{tmp_path / 'recipe.yaml'}:{line}: {message}" in str(raised.value)


def test_recipes_open_no_files_of_exercises(tmp_path: Path) -> None:
    """They may be those of another machine."""
    load(tmp_path, EXERCISE.replace("tasks: [qa1]", "{background: absent, facts: absent}"))


def stages(recipe: Recipe) -> list[dict[str, Any]]:
    return [stage for exercise in recipe.data.exercises for stage in exercise.options.get("stages", ())]


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if stages(load_recipe(name))])
def test_every_stage_of_a_shipped_recipe_is_reached(name: str) -> None:
    recipe = load_recipe(name)
    lessons = recipe.loop.steps * recipe.data.rows.batch  # at most: were each of them a single row long
    assert max(stage["from"] for stage in stages(recipe)) < lessons


def test_documents_of_the_paper_suffice_and_are_not_many_times_too_many() -> None:
    recipe = load_recipe("paper-340m")
    needed = recipe.loop.steps * recipe.data.rows.batch * recipe.data.rows.length
    assert needed == pytest.approx(15e9, rel=0.01)
    assert recipe.data.source.limit is not None
    read = 1000 * recipe.data.source.limit * (1 - recipe.data.validation)
    assert 1.1 * needed < read < 1.5 * needed


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        load(tmp_path, GOOD.replace("lr: 3e-4", "lr: x").replace("batch: 4", "batch: y"))
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=x", "--set optimizer.lr=x: optimizer.lr: 'x'"),
        ("checkpoint.evry=3", "--set checkpoint.evry=3: checkpoint.evry: is unknown; did you mean every?"),
        ("loop", "--set loop: must be section.field=value"),
        ("seed.x=3", "--set seed.x=3: seed is 0, and has no fields."),
    ],
)
def test_errors_name_the_override(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("quick", [override])
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["- a\n", "loop: {steps: 1\n", ""])
def test_files_that_are_no_recipe(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        load(tmp_path, text)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="quick"):
        load_recipe("quik")


def test_saved_recipes_are_plain_yaml(tmp_path: Path) -> None:
    save_recipe(load_recipe("quick"), tmp_path / "r.yaml")
    assert yaml.safe_load((tmp_path / "r.yaml").read_text(encoding="utf-8"))["model"]["preset"] == "atlas"

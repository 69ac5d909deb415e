"""Local files in place of the hub: the same prompts, and errors that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atlas_memory.tasks.paper import EvaluationError, paper_tasks
from atlas_memory.tasks.paper.loading import find_files, load_from_file, load_from_hub, read_rows, task_manager
from tests.tasks.paper.rows import ROWS

TASKS = {task.name: task for task in paper_tasks()}

# The text the model reads before the first row's answer.
PROMPTS = {
    "lambada_openai": "The baker opened the oven and took out the",
    "piqa": "Question: Dry a wet shirt\nAnswer:",
    "hellaswag": "Baking: A woman mixes flour and water. She",
    "arc_easy": "Question: Which of these is a liquid at room temperature?\nAnswer:",
    "arc_challenge": "Question: A ball rolls more slowly on grass than on ice. Which force differs most?\nAnswer:",
    "social_iqa": "Q: Ada broke her neighbour's window. What will Ada want to do next?\nA:",
    "boolq": "The mill stands by the river.\nQuestion: is the mill by the river?\nAnswer:",
    "swde": "The Mill (1951). Director: Ida Holm. Length: 90 min. Director:",
    "nq_completion": "The bridge was built in 1820. It has nine arches. The bridge has this many arches:",
    "drop_completion": "The reds scored 3 goals, the blues 5. More goals were scored by the",
    "fda": "510(k) summary. Date prepared: 2001-05-03. Device: pump. Date prepared:",
    "squad_completion": "The mill stands by the river and is old. The mill stands",
    "triviaqa_completion": "The mill  Ida Holm built the mill. The mill was built by",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_is_the_harness_s_own(name: str, data_folder: Path) -> None:
    task = TASKS[name]
    loaded = load_from_file(task_manager([task]), task, data_folder / f"{name}.jsonl")
    assert loaded.task_name == name
    assert loaded.doc_to_text(next(iter(loaded.eval_docs))) == PROMPTS[name]


def test_wikitext_is_detokenised_and_winogrande_split_at_the_gap(data_folder: Path) -> None:
    manager = task_manager([TASKS["wikitext"], TASKS["winogrande"]])
    wikitext = load_from_file(manager, TASKS["wikitext"], data_folder / "wikitext.jsonl")
    assert "12,000 stones crosses it.\n" in wikitext.doc_to_target(wikitext.eval_docs[1])
    winogrande = load_from_file(manager, TASKS["winogrande"], data_folder / "winogrande.jsonl")
    choices = winogrande.doc_to_choice(winogrande.eval_docs[1])
    assert choices == ["Mia thanked Noa because Mia", "Mia thanked Noa because Noa"]


def test_dates_stay_text(data_folder: Path) -> None:
    assert read_rows(data_folder / "fda.jsonl", TASKS["fda"])["value"] == ["2001-05-03", "2002-11-30"]


# What the hub is asked for: dataset, configuration.
HUB = {
    "wikitext": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"),
    "lambada_openai": ("EleutherAI/lambada_openai", "default"),
    "piqa": ("baber/piqa", None),
    "hellaswag": ("Rowan/hellaswag", None),
    "winogrande": ("allenai/winogrande", "winogrande_xl"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge"),
    "social_iqa": ("lighteval/siqa", None),
    "boolq": ("aps/super_glue", "boolq"),
    "swde": ("hazyresearch/based-swde-v2", "default"),
    "nq_completion": ("hazyresearch/based_nq_2048", None),
    "drop_completion": ("hazyresearch/based_drop", None),
    "fda": ("hazyresearch/based-fda", "default"),
    "squad_completion": ("hazyresearch/based-squad", "default"),
    "triviaqa_completion": ("hazyresearch/based_triviaqa", None),
}


@pytest.mark.parametrize("name", HUB)
def test_a_local_file_gives_the_requests_of_the_public_dataset(
    name: str, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is played by its loading function, which returns whole rows, the columns nobody reads included."""
    import datasets

    asked = []

    def load_dataset(path: str, name: str | None = None, **keywords: Any) -> Any:
        asked.append((path, name))
        rows = datasets.Dataset.from_list([row for row, _ in ROWS[task.name]])
        return datasets.DatasetDict({split: rows for split in ("train", "validation", "test")})

    task, manager = TASKS[name], task_manager([TASKS[name]])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    public, local = load_from_hub(manager, task), load_from_file(manager, task, data_folder / f"{name}.jsonl")
    assert asked == [HUB[name]]
    for loaded in (public, local):
        loaded.set_config(key="num_fewshot", value=0)
        loaded.build_all_requests()
    assert [request.args for request in public.instances] == [request.args for request in local.instances]


@pytest.mark.parametrize("name", ["piqa", "swde", "nq_completion"])
def test_without_a_hub_the_error_says_how_to_use_files(name: str) -> None:
    task = TASKS[name]
    columns = ", ".join(task.columns)
    with pytest.raises(EvaluationError, match=rf"FOLDER/{name}\.jsonl, .* columns {columns}, and pass --data FOLDER"):
        load_from_hub(task_manager([task]), task)


def test_a_folder_is_searched_for_the_tasks_that_have_a_file(tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").touch()
    (tmp_path / "swde.jsonl").touch()
    assert find_files(tmp_path, paper_tasks("recall")) == {"swde": tmp_path / "swde.jsonl"}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("piqqa.jsonl", r"'piqqa' is unknown\. Nearest: piqa"),
        ("piqa.jsonl", r"has no file of these tasks\. It may have: swde\.jsonl, nq_completion\.jsonl"),
        ("notes.txt", r"has no file of these tasks"),
    ],
)
def test_a_folder_without_the_right_files(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(EvaluationError, match=message):
        find_files(tmp_path, paper_tasks("recall"))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"absent' is not a folder"):
        find_files(tmp_path / "absent", paper_tasks())


GOOD: dict[str, Any] = {"goal": "Dry a shirt", "sol1": "sun", "sol2": "river", "label": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no rows"),
        ("\n\n", r"has no rows"),
        (json.dumps(GOOD) + "\n{'goal':", r"line 2: not JSON"),
        (json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "sol2": None}), r"line 3: the column 'sol2' is null"),
        (json.dumps({"goal": "Dry a shirt"}), r"'sol1' is absent; .* reads the columns goal, sol1, sol2, label"),
        ("[1, 2]", r"line 1: not a JSON object but '\[1, 2\]'"),
        (json.dumps({**GOOD, "label": "1"}), r"'label' is \"1\"; it should be of type int64"),
        (json.dumps({**GOOD, "label": True}), r"'label' is true; it should be of type int64"),
        (json.dumps({**GOOD, "goal": ["a"]}), r"'goal' is \[\"a\"\]; it should be of type string"),
    ],
)
def test_a_file_that_is_not_in_the_format(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EvaluationError, match=message):
        read_rows(path, TASKS["piqa"])


def test_nested_columns_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "arc_easy.jsonl"
    path.write_text(json.dumps({"question": "Which?", "choices": {"text": ["a", "b"]}, "answerKey": "A"}))
    with pytest.raises(EvaluationError, match=r"the column 'choices' is .*; it should be of type \{'text'"):
        read_rows(path, TASKS["arc_easy"])


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "piqa.jsonl"
    row = {**GOOD, "goal": "Dry\u2028a\x85shirt"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_rows(path, TASKS["piqa"])["goal"] == [row["goal"]]


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(EvaluationError, match=r"is not UTF-8"):
        read_rows(path, TASKS["piqa"])

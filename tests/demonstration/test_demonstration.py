"""The demo: the same scene every time, read as the model reads, asked without a trace, and left as a page."""

from __future__ import annotations

import doctest
import io
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from atlas_memory.cli import app, demonstrating
from atlas_memory.demonstration import Answered, Question, Scene, Show, scene
from atlas_memory.demonstration.figures import make_figures
from atlas_memory.demonstration.page import WITHOUT, write_page
from atlas_memory.demonstration.scene import needle_cells
from atlas_memory.models import shipped
from atlas_memory.tasks.evaluation import Request, load_report
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.needle import DEPTHS
from atlas_memory.tasks.precision import PRECISIONS
from atlas_memory.tasks.samples import up_to_stop
from atlas_memory.train import DivergedError
from atlas_memory.train.plot import figure_class
from tests.tasks.conftest import save_small

NAMES = ("length", "parameters", "own_tokens", "seconds", "speed", "state_bytes")
NUMBERS = dict.fromkeys((*NAMES, "rival_parameters", "rival_reach", "rival_near"), "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("demo"), 320)


def test_the_example_is_what_the_code_makes() -> None:
    failed, tried = doctest.testmod(scene, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried and not failed


def test_a_scene_holds_its_facts_in_order_and_is_the_same_again() -> None:
    made = Scene(length=2000, seed=3)
    text = "".join(made.pieces())
    places = [text.index(fact) for fact in made.facts]
    assert places == sorted(places)
    assert 0.95 * 2000 * 4.2 < len(text) <= 2000 * 4.2
    assert text == "".join(Scene(length=2000, seed=3).pieces()) != "".join(Scene(length=2000, seed=4).pieces())


def test_reading_is_the_models_own_and_asking_leaves_no_trace(model: Path) -> None:
    show, made = Show(model), Scene(length=1500)
    readings = list(show.read(made))
    ids = show.tokenizer("".join(made.pieces()))["input_ids"]
    assert readings[-1].tokens == len(ids)
    assert len({reading.state_bytes for reading in readings}) == 1
    said = show.ask(made.questions)
    assert said == show.ask(made.questions)
    assert show.ask(made.questions[::-1]) == said[::-1]
    prompt = torch.tensor([ids + show.tokenizer(f" {made.questions[0].text}")["input_ids"]])
    most = max(len(question.answer) for question in made.questions) + 1 + 4  # bytes, the end and some more
    generated = show.model.generate(prompt, max_new_tokens=most, do_sample=False)[0, prompt.shape[1] :]
    text = str(show.tokenizer.decode(generated, skip_special_tokens=True))
    assert up_to_stop(text) == said[0].said and len(generated) == most


def test_there_is_room_for_an_answer_of_bytes(model: Path) -> None:
    """A model that says the answer byte by byte is right."""
    show, question = Show(model), Question("Where is Mary?", "conservatory")
    list(show.read(Scene(length=0)))
    after = iter(b" conservatory. Then some")

    def forward(**_: Any) -> Any:
        return SimpleNamespace(logits=torch.eye(320)[next(after)][None, None])

    show.model.forward = forward  # type: ignore[method-assign, assignment]
    assert show.ask([question]) == [Answered(question, "conservatory", right=True)]


def test_the_end_of_a_scene_is_enough_for_a_window(model: Path) -> None:
    made = Scene(length=1500)
    *_, reading = Show(model).read(made, last=400)
    assert 400 <= reading.tokens < 900  # bytes: whole sentences, and no more of them than it takes


def test_needles_lie_at_their_depth() -> None:
    cells = needle_cells((1000,), samples=2)
    assert [cell.details["depth"] for cell in cells] == list(DEPTHS) == [0.0, 0.25, 0.5, 0.75, 1.0]
    for cell in cells:
        assert cell.sample is not None
        sample = cell.sample(0)
        *text, question = sample.pieces()
        place = next(n for n, piece in enumerate(text) if sample.answer in piece)
        assert abs(place / (len(text) - 1) - cell.details["depth"]) < 0.05
        assert question.startswith(" Where is ")


def test_the_page_escapes_what_a_model_says(tmp_path: Path) -> None:
    wrong = Answered(Question("Where is Mary?", "garden"), "<script>", right=False)
    right = wrong._replace(said="garden", right=True)
    write_page(tmp_path / "index.html", ["A & B."], [(right, wrong)], {"a.png": "curve"}, NUMBERS)
    page = (tmp_path / "index.html").read_text()
    assert '<td class="right">garden</td><td class="wrong">&lt;script&gt;</td>' in page
    assert "A &amp; B." in page and 'src="a.png"' in page and "$" not in page


OFFLINE = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_the_page_opens_in_a_browser_with_its_figures(tmp_path: Path) -> None:
    figure = figure_class()()
    figure.add_subplot().plot([1, 2])
    figure.savefig(tmp_path / "a.png")
    answer = Answered(Question("Where is Mary?", "garden"), "garden", right=True)
    page = tmp_path / "index.html"
    write_page(page, ["A fact."], [(answer, answer)], {"a.png": "curve"}, NUMBERS)
    seen = "document.title = [...document.images].map(i => i.naturalWidth > 0) + ' ' + answers.rows.length"
    page.write_text(page.read_text() + f"<script>onload = () => {{ {seen} }}</script>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom", *OFFLINE]
    options.append(f"--user-data-dir={tmp_path / 'profile'}")
    shown = subprocess.run([str(BROWSER), *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert "<title>true 2</title>" in shown.stdout, shown.stderr


def test_the_command_leaves_a_page_and_figures(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrating, "LENGTHS", (200,))
    out = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--model", str(model), "--tokens", "1k", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Where is" in result.output
    assert {file.name for file in out.iterdir()} == {"accuracy.png", "index.html", "needle.json", "needle.png"}
    page = (out / "index.html").read_text()
    assert (
        "accuracy.png" in page
        and "BABILong, accuracy of the shipped" not in page
        and WITHOUT in page
        and "2,143,170 parameters" in page
    )
    assert "without" in result.output
    (out / "needle.json.work").mkdir()  # of a demo with another book that was stopped
    (out / "needle.json.work" / "finished.json").write_text('{"settings": {}, "finished": []}')
    result = CliRunner().invoke(app, ["demo", "--model", str(model), "--tokens", "1k", "--out", str(out)])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["demo", "--tokens", "1k,2k", "--out", str(out)])
    assert result.exit_code == 2 and "must be one length" in result.output
    result = CliRunner().invoke(app, ["demo", "--model", "absent", "--tokens", "1k", "--out", str(out)])
    assert result.exit_code == 2 and "model='absent' has no config.json" in result.output


def test_curves_are_shown_of_the_model_they_were_measured_on(model: Path, tmp_path: Path) -> None:
    cells = needle_cells((0,), 1)
    for folder, told in (
        (shipped.model_folder("shipped"), "BABILong, accuracy of the shipped model"),
        (model, "One fact, accuracy against length, measured just now"),
        (shipped.model_folder("window"), "One fact, accuracy against length, measured just now"),
    ):
        assert make_figures(folder, cells, tmp_path, "builtin", "float32")["accuracy.png"].startswith(told)
        assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--tokens", "1k", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "holds index.html, and not of a demo" in result.output
    assert (tmp_path / "index.html").read_text() == "mine"


def test_what_a_model_says_is_no_markup() -> None:
    wrong = Answered(Question("Where is [b]Mary?", "garden[/]"), "[/x] [red]", right=False)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(demonstrating._table([(wrong, wrong._replace(said="", right=True))]))
    text = console.export_text(styles=True)
    assert "[/x] [red]" in text and "Where is [b]Mary?" in text and "garden[/]" in text
    assert "\x1b[31m[/x]" in text and "\x1b[32m–" in text


def refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["demo", "--tokens", "1k", *map(str, arguments)])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading or training is a failure."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(demonstrating, "_read", fail)
    monkeypatch.setattr(demonstrating, "run_training", fail)


@pytest.mark.usefixtures("unread")
def test_what_cannot_be_written_is_found_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text(" ")
    for out in (file, file / "below"):
        assert "file' is a file. It should be a folder" in refused("--out", out)
    assert "out='/proc/demo' cannot be written" in refused("--out", "/proc/demo")
    assert "model='window' has no memory" in refused("--out", tmp_path / "demo", "--model", "window")
    assert "tokens='0' must be one length of at least 1" in refused("--out", tmp_path / "demo", "--tokens", "0")
    assert "book='/absent'" in refused("--out", tmp_path / "demo", "--book", "/absent")
    assert "has no sentences of ten tokens" in refused("--out", tmp_path / "demo", "--book", file)
    assert "must not both be given" in refused("--out", tmp_path / "demo", "--train", "--model", "shipped")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'atlas-memory[figures]'" in refused("--out", tmp_path / "demo")
    assert list(tmp_path.iterdir()) == [file]


def test_a_training_that_diverges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object, **__: object) -> None:
        raise DivergedError("the loss was nan for 3 steps in a row.")

    monkeypatch.setattr(demonstrating, "run_training", diverge)
    assert "the loss was nan" in refused("--out", tmp_path / "demo", "--train")


def test_a_result_that_cannot_be_written_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstrating, "LENGTHS", (200,))
    (tmp_path / "needle.json").mkdir()
    assert "needle.json' is a folder" in refused("--out", tmp_path, "--model", model)


def test_shipped_models_are_there_and_small() -> None:
    for name in shipped.SHIPPED:
        folder = shipped.model_folder(name)
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {f.name for f in folder.iterdir()}
        assert (folder / "model.safetensors").stat().st_size < 10e6
    assert shipped.model_folder("elsewhere") == Path("elsewhere")


def test_shipped_results_are_of_the_shipped_model() -> None:
    request = Request("babilong", Path("shipped"), needle_cells((0,), 1), Path("unused.json"), {})
    for file in shipped.results_folder().glob("*.json"):
        report = load_report(file)
        assert report.settings["model_digest"] == request.all_settings()["model_digest"]
        assert {"facts_digest", "background_digest", "precision"} <= report.settings.keys()


def wrong_and_asked(model: str, length: int, precision: str = "float32") -> tuple[int, int]:
    """Questions of five scenes that a shipped model answers wrongly, and all of them."""
    show, answers = Show(shipped.model_folder(model), precision), []
    for seed in range(5):
        made = Scene(length, seed=seed)
        list(show.read(made))
        answers += show.ask(made.questions)
    return sum(not answer.right for answer in answers), len(answers)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_shipped_model_answers(precision: str) -> None:
    wrong, asked = wrong_and_asked("shipped", length=2000, precision=precision)
    assert wrong <= 1 and asked >= 15


def test_the_model_without_a_memory_knows_the_questions_but_not_what_is_far() -> None:
    wrong, asked = wrong_and_asked("window", length=0)
    assert wrong <= 2 and asked >= 15
    wrong, _ = wrong_and_asked("window", length=4000)
    assert wrong >= asked // 2


def test_what_a_window_does_not_see_makes_no_difference() -> None:
    """Which is why the demo may leave it out."""
    show, made = Show(shipped.model_folder("window")), Scene(length=3000)
    list(show.read(made))
    whole = show.ask(made.questions)
    *_, reading = show.read(made, last=round(characters_of(show.reach)))
    assert show.ask(made.questions) == whole and reading.tokens < 500

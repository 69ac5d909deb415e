"""Tables of accuracies: how many answers, how sure, and how seeds differ."""

from __future__ import annotations

from atlas_memory.studies.accuracies import CAPTION, Runs, markdown
from atlas_memory.tasks.results import Report, Result, wilson


def report(*accuracies: float) -> Report:
    """Ten samples of qa1 and of qa2 at one length."""
    results = [
        Result(task, 4000, 10, accuracy, 0.0, 1.0, 1.0, 1.0, 4000, 4000)
        for task, accuracy in zip(("qa1", "qa2"), accuracies, strict=True)
    ]
    return Report("babilong", "model", {}, results)


def test_cells_have_their_interval_and_its_number_of_answers() -> None:
    text = markdown({"a": Runs([report(0.8, 0.4)])}, ("qa1", "qa2"), (4000,), ["A note."])
    lines = text.splitlines()
    assert lines[0] == "| model | seeds | task | 4K |"
    low, high = (f"{100 * bound:.1f}" for bound in wilson(12, 20))
    assert lines[2] == f"| `a` | 1 | mean | 60.0 % ({low}–{high}, n = 20) |"
    assert [line[:26] for line in lines[3:5]] == ["| `a` | 1 | qa1 | 80.0 % (", "| `a` | 1 | qa2 | 40.0 % ("]
    assert lines[-4:] == ["", CAPTION, "", "A note."]


def test_seeds_are_pooled_with_their_spread() -> None:
    runs = Runs([report(0.8, 0.4), report(1.0, 1.0)], diverged=1)
    text = markdown({"a": runs, "b": Runs([], diverged=3)}, ("qa1", "qa2"), (4000,), [])
    low, high = (f"{100 * bound:.1f}" for bound in wilson(32, 40))
    assert f"| `a` | 3 (1 diverged) | mean | 80.0 % ± 28.3 ({low}–{high}, n = 40) |" in text
    assert "| `a` | 3 (1 diverged) | qa1 | 90.0 % ± 14.1 (" in text
    assert text.count("`b`") == 1 and "| `b` | 3 (3 diverged) |  | diverged |" in text


def test_one_task_has_one_row() -> None:
    one = Report("babilong", "model", {}, report(0.5, 0.0).results[:1])
    text = markdown({"a": Runs([one])}, ("qa1",), (4000,), [])
    assert text.count("`a`") == 1 and "| `a` | 1 | qa1 | 50.0 % (" in text

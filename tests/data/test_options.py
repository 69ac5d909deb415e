from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlas_memory.data import DataConfig, ExerciseConfig, RowsConfig, SourceConfig, options


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (SourceConfig, {"kind": "web"}, "kind='web' is not a choice; allowed: builtin, text, jsonl, datasets"),
        (SourceConfig, {"kind": "text"}, "path=None must be given for kind='text'"),
        (SourceConfig, {"path": "x"}, "path='x' has no meaning for kind='builtin'"),
        (SourceConfig, {"field": ""}, "field='' must be a word"),
        (SourceConfig, {"limit": 0}, "limit=0 must be a whole number of at least 1, or None"),
        (SourceConfig, {"suffixes": ("txt",)}, "suffixes=.*endings with their dot"),
        (SourceConfig, {"encoding_errors": "ignore"}, "encoding_errors='ignore'.*strict, replace"),
        (SourceConfig, {"streaming": 1}, "streaming=1 must be True or False"),
        (RowsConfig, {"kind": "rows"}, "kind='rows' is not a choice; allowed: packed, segments"),
        (RowsConfig, {"length": 0}, "length=0 must be a whole number of at least 1"),
        (RowsConfig, {"batch": 2.0}, "batch=2.0 must be a whole number"),
        (RowsConfig, {"boundaries": "keep"}, "boundaries='keep' is not a choice; allowed: reset, carry"),
        (RowsConfig, {"minimum_tokens": 9}, "minimum_tokens=9 needs kind='segments'"),
        (RowsConfig, {"kind": "segments", "boundaries": "carry"}, "boundaries='carry' needs kind='packed'"),
        (RowsConfig, {"seed": 2**32}, r"seed=4294967296 must be less than 2\*\*32"),
        (RowsConfig, {"seed": True}, "seed=True must be a whole number of at least 0"),
        (RowsConfig, {"epochs": 0}, "epochs=0 must be a whole number of at least 1, or None"),
        (RowsConfig, {"lengths": ((5, 8), (5, 9))}, "lengths=.* with rising indices"),
        (RowsConfig, {"lengths": 5}, "lengths=5 must be pairs"),
        (RowsConfig, {"lengths": ((1, 0),)}, "row length in lengths=0"),
        (DataConfig, {"source": "builtin"}, "source='builtin' must be a SourceConfig"),
        (DataConfig, {"validation": 1}, "validation=1 must be a number of at least 0 and less than 1"),
        (DataConfig, {"tokenizer": ""}, "tokenizer='' must be a word or a path"),
        (DataConfig, {"loading_workers": -1}, "loading_workers=-1 must be a whole number of at least 0"),
        (DataConfig, {"pin_memory": "yes"}, "pin_memory='yes' must be True or False"),
    ],
)
def test_errors_name_the_field_the_value_and_what_is_accepted(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**fields)


class Sums:
    """An exercise whose only option is a number of terms."""

    def __init__(self, options: dict[str, Any], split: str) -> None:
        pytest.fail("an exercise must not be made to check its options")

    @staticmethod
    def check(options: dict[str, Any]) -> None:
        if options["terms"] + 1 < 3:
            raise ValueError(f"terms={options['terms']!r} must be at least 2.")


class Unchecked:
    """One that checks nothing beforehand."""


def test_exercises_check_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"sums": Sums, "unchecked": Unchecked}
    entries = [SimpleNamespace(name=name, load=lambda kind=kind: kind) for name, kind in known.items()]
    monkeypatch.setattr(options, "entry_points", lambda group: entries)
    assert ExerciseConfig("sums", options={"terms": 2}).options == {"terms": 2}
    assert ExerciseConfig("unchecked", options={"terms": 1}).share == 1
    with pytest.raises(ValueError, match="terms=1 must be at least 2"):
        ExerciseConfig("sums", options={"terms": 1})
    with pytest.raises(ValueError, match=r"options={'terms': 'two'} do not fit sums: .*str"):
        ExerciseConfig("sums", options={"terms": "two"})
    with pytest.raises(ValueError, match="exercise='babilong' is not a choice; allowed: sums, unchecked"):
        ExerciseConfig("babilong")


def test_lengths_of_a_curriculum() -> None:
    rows = RowsConfig(length=4, lengths=[[2, 8], [5, 16]])  # type: ignore[arg-type]
    assert [rows.length_at(batch) for batch in range(7)] == [4, 4, 8, 8, 8, 16, 16]
    assert rows.lengths == ((2, 8), (5, 16))  # lists, as YAML has them, are taken too


def test_importing_imports_no_optional_library() -> None:
    program = "import sys, atlas_memory.data; print({'datasets', 'lm_eval'} & set(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "set()"


def test_sources_by_one_word(tmp_path: Path) -> None:
    assert SourceConfig.parse("builtin") == SourceConfig()
    assert SourceConfig.parse("text:a/b").path == "a/b"
    assert SourceConfig.parse("datasets:owner/name", field="body").field == "body"
    assert SourceConfig.parse("rows.jsonl.zst").kind == "jsonl"
    assert SourceConfig.parse("src/**/*.py").kind == "text"
    assert SourceConfig.parse(str(tmp_path)).kind == "text"
    with pytest.raises(ValueError, match="source='text' needs a path: text:PATH"):
        SourceConfig.parse("text")
    with pytest.raises(ValueError, match="source='nowhere' must be builtin"):
        SourceConfig.parse("nowhere")

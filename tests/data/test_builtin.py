from __future__ import annotations

from atlas_memory.data import SourceConfig, read_documents
from atlas_memory.data.sources import open_source


def test_the_standard_library_is_a_corpus() -> None:
    documents = list(read_documents(SourceConfig()))
    names = [document.name for document in documents]
    assert len(set(names)) == len(names)
    assert {"collections/__init__.py", "pydoc_data/topics.py", "builtins (documentation)"} <= set(names)
    assert not any(name.startswith(("test/", "site-packages/")) for name in names)
    assert sum(len(document.text) for document in documents) > 5_000_000
    text = {name: text for text, name in documents}["builtins (documentation)"]
    assert "builtins.str.join\n" in text
    assert list(read_documents(SourceConfig())) == documents


def test_its_description_names_the_interpreter() -> None:
    source = open_source(SourceConfig())
    assert source.description() == source.description()
    assert source.description()["python"]

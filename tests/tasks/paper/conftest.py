"""A saved model and a folder of local rows, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atlas_memory import AtlasConfig, AtlasForCausalLM
from tests.tasks.paper.rows import ROWS


def save_tokenizer(folder: Path) -> int:
    """Train a tokenizer on the rows, save it, and return the size of its vocabulary."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(row) for rows in ROWS.values() for row, _ in rows], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder)
    return tokenizer.get_vocab_size()


def save_model(folder: Path, vocabulary: int) -> None:
    """The model under evaluation: the one place that says which."""
    config = AtlasConfig(
        vocab_size=vocabulary,
        preset="gated_deltanet",
        backbone="mag",
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        memory={"key_width": 8},
        memory_heads=2,
        sliding_window=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    AtlasForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, save_tokenizer(folder))
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task, rows in ROWS.items():
        lines = [json.dumps(row) for row, _ in rows]
        (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder

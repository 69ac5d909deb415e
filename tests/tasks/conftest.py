"""Saved models, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_memory import AtlasConfig, AtlasForCausalLM
from atlas_memory.data.tokenizers import byte_tokenizer
from atlas_memory.tasks.babilong import stream
from atlas_memory.tasks.evaluation import Request


def save_small(folder: Path, vocabulary: int) -> Path:
    """An untrained model with the byte tokenizer; weights large enough for answers to depend on what was read."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AtlasConfig(
            vocab_size=vocabulary,
            preset="gated_deltanet",
            backbone="mag",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            memory={"key_width": 8},
            memory_heads=2,
            sliding_window=16,
            initializer_range=0.3,
        )
        AtlasForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("bytes"), 320)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers' own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("other")
    config = GPT2Config(
        vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=2048, bos_token_id=256, eos_token_id=256
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def request(model: Path, out: Path, **fields: Any) -> Request:
    """A small one, of BABILong."""
    chosen = {"lengths": [0, 300], "samples": 3, "tasks": ["qa1", "qa5"]}
    cells = stream.cells(**chosen)  # type: ignore[arg-type]
    return Request(**{"name": "babilong", "model": model, "cells": cells, "out": out, "settings": chosen, **fields})


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    timed = ("tokens_per_second", "peak_rss_mb")
    results = [{name: value for name, value in row.items() if name not in timed} for row in report["results"]]
    return {**report, "results": results}

"""A model with a short window answers from its memory what attention can no longer see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atlas_memory import AtlasConfig, AtlasForCausalLM
from tests.learning.recall import train
from tests.learning.test_recall import SHORT


class Logits(nn.Module):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.model = AtlasForCausalLM(AtlasConfig(vocab_size=SHORT.vocabulary, **fields))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


@pytest.mark.slow
def test_recall_beyond_the_window_is_learned() -> None:
    """Facts lie at least 16 tokens before their questions, the two windows together reach 14; chance: 1 in 4."""
    torch.manual_seed(0)
    model = Logits(
        preset="gated_deltanet",
        backbone="mag",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        memory_heads=2,
        memory={"key_width": 16, "chunk": 8},
        sliding_window=8,
    )
    assert train(model, SHORT, steps=150, batch=32, rate=6e-3) >= 0.8

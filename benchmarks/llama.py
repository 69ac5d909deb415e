"""The usual alternative: a Llama of the same size, which keeps keys and values of all it has read."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from atlas_memory import AtlasForCausalLM


def llama_like(ours: AtlasForCausalLM, longest: int) -> LlamaForCausalLM:
    """Of the same depth and width, with feed-forward layers as wide as makes up for the memory's parameters."""
    torch.manual_seed(0)
    config = ours.config

    def made(inner: int) -> LlamaForCausalLM:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=config.num_attention_heads,
                max_position_embeddings=longest,
                tie_word_embeddings=config.tie_word_embeddings,
                intermediate_size=inner,
            )
        )

    missing = max(0, ours.num_parameters() - made(1).num_parameters())
    return made(1 + missing // (3 * config.hidden_size * config.num_hidden_layers)).eval()


def filled(llama: LlamaForCausalLM, context: int, rows: int = 1) -> DynamicCache:
    """A cache as `context` tokens would leave it: its size is what reading on costs, not its numbers."""
    config, cache = llama.config, DynamicCache()
    width = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, rows, config.num_attention_heads, context, width)
        cache.update(keys, values, layer)
    return cache


def nbytes(cache: DynamicCache) -> int:
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))

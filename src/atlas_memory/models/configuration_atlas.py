"""AtlasConfig: what a model is made of, checked when it is made."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from atlas_memory.checks import check_whole
from atlas_memory.layers.mixers import MIXERS
from atlas_memory.spec import MemorySpec, presets

BACKBONES = tuple(name for name, row in MIXERS.items() if row.memory)
ATTENTION_LAYERS = tuple(name for name, row in MIXERS.items() if not row.memory)

# Keys of `memory` that belong to the layer around the operator, not to its spec.
LAYER_OPTIONS = ("convolution", "initial_rank", "rotary")


class AtlasConfig(PreTrainedConfig):
    """The fields of an Atlas language model.

    preset: the memory, a name of `presets.names()`. backbone: how memory and attention share a layer: lmm, mal, mag or
    mac. memory: further fields of MemorySpec, or convolution, initial_rank and rotary of the layer; for every memory.
    memory_heads: heads of the memory, whose key width is its own. layer_types: for each layer a preset, which stands in
    the backbone, or "full_attention", "sliding_attention" or "memory_tokens"; None: the preset everywhere. A layer of
    memory tokens is a whole segment-recurrent Transformer (RMT): memory_token_layers layers, and memory_tokens tokens
    taken along from segment to segment. sliding_window: of attention in mal, mag and sliding layers. segment_length: of
    mac and memory tokens. persistent_tokens: learned keys and values of attention.
    intermediate_size: None: 8/3 of the hidden size, in steps of 64.
    """

    model_type = "atlas_memory"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  as the base class declares it

    def __init__(
        self,
        vocab_size: int = 32_000,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int | None = None,
        preset: str | None = None,
        backbone: str = "mag",
        layer_types: Sequence[str] | None = None,
        memory_heads: int = 4,
        memory: Mapping[str, Any] | None = None,
        sliding_window: int = 512,
        segment_length: int = 256,
        persistent_tokens: int = 0,
        memory_tokens: int = 8,
        memory_token_layers: int = 2,
        rope_theta: float = 10_000.0,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_misspelled(kwargs)
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.backbone, self.memory_heads, self.memory = backbone, memory_heads, dict(memory or {})
        self.sliding_window, self.segment_length = sliding_window, segment_length
        self.persistent_tokens = persistent_tokens
        self.memory_tokens, self.memory_token_layers = memory_tokens, memory_token_layers
        self.rope_theta, self.rms_norm_eps, self.initializer_range = rope_theta, rms_norm_eps, initializer_range
        self.use_cache, self.tie_word_embeddings = use_cache, tie_word_embeddings
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self.intermediate_size = intermediate_size
        if intermediate_size is None and isinstance(hidden_size, int):
            self.intermediate_size = 64 * -(-hidden_size * 8 // (3 * 64))
        self._check_numbers()
        self.preset, self.layer_types = _resolved_layers(preset, layer_types, num_hidden_layers)
        self._check_combinations()

    def validate(self) -> None:
        """In place of the base class's checks, which know the layer types of transformers only."""
        if "layer_types" in self.__dict__:  # the base class also asks while it is being made
            self._check_numbers()
            self._check_combinations()

    @property
    def memory_presets(self) -> list[str]:
        """The presets the layers use, each once."""
        return [name for name in dict.fromkeys(self.layer_types) if name not in ATTENTION_LAYERS]

    def memory_spec(self, preset: str) -> MemorySpec:
        """The memory of layers of this type."""
        fields = {name: value for name, value in self.memory.items() if name not in LAYER_OPTIONS}
        return presets.make(preset, **fields)

    def block_arguments(self, layer_type: str) -> dict[str, Any]:
        """The arguments of `Block` for layers of this type."""
        attention = layer_type in ATTENTION_LAYERS
        return {
            "dim": self.hidden_size,
            "mixer": layer_type if attention else self.backbone,
            "inner": self.intermediate_size,
            "heads": self.num_attention_heads,
            "window": self.sliding_window,
            "segment": self.segment_length,
            "persistent": self.persistent_tokens,
            "tokens": self.memory_tokens,
            "depth": self.memory_token_layers,
            "theta": self.rope_theta,
            "preset": None if attention else layer_type,
            "memory_heads": self.memory_heads,
            "memory": self.memory,
            "eps": self.rms_norm_eps,
        }

    def _check_numbers(self) -> None:
        counts = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        more = ("memory_heads", "sliding_window", "segment_length", "memory_tokens", "memory_token_layers")
        for name in (*counts, *more, "persistent_tokens"):
            check_whole(name, getattr(self, name), least=0 if name == "persistent_tokens" else 1)
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} must be a positive finite number.")
        for name in ("convolution", "initial_rank"):
            check_whole(f"memory[{name!r}]", self.memory.get(name, 1))
        check_whole("pad_token_id", self.pad_token_id, least=0, optional=True)
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id={self.pad_token_id} must be below vocab_size={self.vocab_size}.")
        if self.backbone not in BACKBONES:
            raise ValueError(f"backbone={self.backbone!r} is unknown; known: {', '.join(BACKBONES)}.")

    def _check_combinations(self) -> None:
        try:
            specs = [self.memory_spec(name) for name in self.memory_presets]
        except ValueError as error:
            raise ValueError(f"memory={self.memory!r} does not fit: {error}") from error
        attends = self.backbone != "lmm" or any(name in ATTENTION_LAYERS for name in self.layer_types)
        if self.hidden_size % (2 * self.num_attention_heads) and attends:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be an even multiple of "
                f"num_attention_heads={self.num_attention_heads}: rotary positions turn pairs."
            )
        if self.persistent_tokens and not attends:
            raise ValueError(
                f"persistent_tokens={self.persistent_tokens} needs a layer with attention; backbone='lmm' has none."
            )
        for spec in specs if self.backbone == "mac" else ():
            chunk = spec.anchor_chunk
            if self.segment_length % chunk:
                raise ValueError(
                    f"segment_length={self.segment_length} must be a multiple of the memory's chunk={chunk}."
                )


def _resolved_layers(preset: str | None, layer_types: Sequence[str] | None, count: int) -> tuple[str, list[str]]:
    """The preset and the type of each layer, where one or both are given."""
    if preset is not None:
        presets.make(preset)
    if layer_types is None:
        return preset or "atlas", [preset or "atlas"] * count
    if isinstance(layer_types, str) or len(layer_types) != count:
        raise ValueError(f"layer_types={layer_types!r} must name a type for each of num_hidden_layers={count}.")
    for name in layer_types:
        if name not in ATTENTION_LAYERS and name not in presets:
            known = ", ".join([*ATTENTION_LAYERS, *presets.names()])
            raise ValueError(f"layer_types has {name!r}, which is unknown; known: {known}.")
    used = [name for name in layer_types if name not in ATTENTION_LAYERS]
    if preset is not None and used and preset not in used:
        raise ValueError(f"preset={preset!r} contradicts layer_types={list(layer_types)}, which does not use it.")
    return preset or (used[0] if used else "atlas"), list(layer_types)


def _check_misspelled(unknown: Mapping[str, Any]) -> None:
    """Configurations accept any further attribute; one that nearly is a field is a slip."""
    for name in unknown:
        near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85)
        if near:
            raise ValueError(f"AtlasConfig has no field {name!r}; did you mean {near[0]!r}?")


FIELDS = tuple(name for name in inspect.signature(AtlasConfig.__init__).parameters if name not in ("self", "kwargs"))

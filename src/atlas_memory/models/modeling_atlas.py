"""AtlasModel and AtlasForCausalLM: blocks of layers/ as Hugging Face models.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from atlas_memory.layers import Attention, Block, BlockState, Memory
from atlas_memory.layers.initial_weights import InitialWeights
from atlas_memory.layers.mixers import TokenStack, real_tokens
from atlas_memory.layers.norm import RMSNorm
from atlas_memory.models.cache import AtlasCache
from atlas_memory.models.configuration_atlas import LAYER_OPTIONS, AtlasConfig
from atlas_memory.models.inputs import (
    Bounds,
    check_cache,
    check_token_ids,
    labels_within_sequences,
    mask_of_new_tokens,
    packed_bounds,
)
from atlas_memory.models.loading import AUTO_MAP, check_same_architecture, check_weights_found, write_loader
from atlas_memory.models.reading import DEFAULT_STEP, TokenSource, read
from atlas_memory.ops.packing import Packing


class AtlasDecoderLayer(GradientCheckpointingLayer):
    """One block, under the interface of gradient checkpointing and of device maps."""

    def __init__(self, config: AtlasConfig, layer_type: str) -> None:
        super().__init__()
        self.block = Block(**config.block_arguments(layer_type))

    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        keep_state: bool = True,
        last: bool = False,
        fresh: Sequence[bool] = (),
    ) -> tuple[Tensor, BlockState | None]:
        if state is not None and any(fresh):
            state = state.restarted(fresh, self.block(x.new_zeros(len(fresh), 0, x.shape[-1]))[1])
        if state is not None and self.training:
            x = self._touching_initial_weights(x)
        x, state = self.block(x, state, mask=mask, cu_seqlens=cu_seqlens, last=last)
        return x, state if keep_state else None

    def _touching_initial_weights(self, x: Tensor) -> Tensor:
        """x. Where no row starts anew they would have no gradient, and processes that train together wait for it.

        The same is true of memory tokens where no segment begins or ends.
        """
        initial = [x for module in self.modules() if isinstance(module, InitialWeights) for x in module.parameters()]
        tokens = [x for module in self.modules() if isinstance(module, TokenStack) for x in module.parameters(False)]
        weights = [parameter.flatten()[:1] for parameter in (*initial, *tokens)]
        return x + 0.0 * torch.cat(weights).sum() if weights else x


class AtlasPreTrainedModel(PreTrainedModel):
    config_class = AtlasConfig
    config: AtlasConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AtlasDecoderLayer"]  # noqa: RUF012
    # states live where their layer does, masks on the host
    _skip_keys_device_placement = ["past_key_values", "state", "mask", "cu_seqlens"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # a memory cannot unread the tokens that assisted generation tries out

    def _init_weights(self, module: nn.Module) -> None:
        """Called children first: a memory restores its own start over what its linear layers were given."""
        super()._init_weights(module)
        if any(parameter.is_meta for parameter in module.parameters()):
            return  # there is nothing to fill
        if isinstance(module, Memory):
            options = {name: self.config.memory[name] for name in LAYER_OPTIONS if name in self.config.memory}
            with torch.device("cpu"):
                fresh = Memory(module.dim, module.heads, spec=module.spec, **options)
            for name, parameter in fresh.named_parameters():
                initialization.copy_(module.get_parameter(name), parameter)
        elif isinstance(module, Attention) and module.persistent is not None:
            initialization.normal_(module.persistent, std=module.width**-0.5)
        elif isinstance(module, TokenStack):
            for parameter in (module.first, module.writing):
                initialization.normal_(parameter, std=self.config.initializer_range)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **options: Any
    ) -> None:
        """As in transformers; the reentrant kind is refused, which would lose the gradients of carried states."""
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("gradient_checkpointing_kwargs: use_reentrant=True loses gradients of states; use False.")
        kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        super().gradient_checkpointing_enable(kwargs, *args, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a checkpoint of another architecture than the one asked for is an error."""
        check_same_architecture(pretrained_model_name_or_path, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        resizes = kwargs.pop("ignore_mismatched_sizes", False)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        model, info = loaded
        check_weights_found(pretrained_model_name_or_path, info, resizes)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the folder also loads where nothing but transformers is imported, as in lm_eval."""
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)
        write_loader(save_directory)

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Uploads happen before saving is over, and leave out what has lain in the folder since before it began."""
        write_loader(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


class AtlasModel(AtlasPreTrainedModel):
    """Embeddings, blocks, norm: token ids (B, T) → hidden states (B, T, hidden_size), and the cache to go on from."""

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(AtlasDecoderLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def blocks(self) -> list[Block]:
        return [layer.block for layer in self.layers if isinstance(layer, AtlasDecoderLayer)]

    def restarted(self, cache: AtlasCache, rows: Sequence[bool]) -> AtlasCache:
        """A copy in which the marked rows have read nothing: they start from the model's own, learned beginning."""
        other, nothing = cache.copy(), self.embed_tokens.weight.new_zeros(len(rows), 0, self.config.hidden_size)
        for layer, block in zip(other.layers, self.blocks, strict=True):
            if layer.state is not None:
                layer.state = layer.state.restarted(rows, block(nothing)[1])
        return other

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AtlasCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Bounds = None,
        cu_seq_lens_q: Bounds = None,
        only_cache: bool = False,
        fresh: Sequence[bool] = (),
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens, or their embeddings (B, T, hidden_size).

        attention_mask (B, T), or with what was read (B, past + T): nonzero at real tokens, padding left or right.
        cu_seqlens or cu_seq_lens_q (N + 1,), or position_ids that restart: one row of N packed sequences. Positions are
        otherwise the memory's own, and position_ids are not needed. past_key_values: goes on in place. only_cache: for
        reading on; hidden states are not asked for, and what only they need is not computed. fresh: rows that start
        anew, whatever the cache holds of them.
        """
        x = self._embed(input_ids, inputs_embeds)
        batch, tokens = x.shape[:2]
        cache = None if past_key_values is None else check_cache(past_key_values, self.blocks)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        keep = cache is not None or (bool(use_cache) and not (self.gradient_checkpointing and self.training))
        if keep and cache is None:
            cache = AtlasCache(len(self.layers))
        mask = mask_of_new_tokens(attention_mask, batch, tokens, 0 if cache is None else cache.get_seq_length())
        bounds = packed_bounds(cu_seqlens, cu_seq_lens_q, position_ids, attention_mask, batch)
        packing = Packing(batch, tokens, mask, bounds)
        columns = tokens if bounds is None else max(packing.lengths)
        if len(fresh) not in (0, packing.rows):
            raise ValueError(f"fresh={fresh!r} must hold a flag for each of {packing.rows} rows, or none.")
        padding = packing if bounds is None else Packing(batch, tokens, None, None)  # packed rows are the layers' own
        x = padding.unpack(x)
        right_padding = real_tokens(padding.lengths, x.shape[1])
        seen, states = [], []
        for place, layer in enumerate(self.layers):
            seen += [x] if output_hidden_states else []
            state = None if cache is None else cache.layers[place].state
            last = only_cache and place == len(self.layers) - 1
            options = {"mask": right_padding, "cu_seqlens": packing.bounds, "last": last, "fresh": fresh}
            x, state = layer(x, state=state, keep_state=keep, **options)
            states.append(state)
        if cache is not None:  # all layers, or, after an error in one of them, none
            cache.advance(states, columns)
        if only_cache:
            return BaseModelOutputWithPast(past_key_values=cache)
        x = self.norm(x)
        outputs: dict[str, Any] = {"last_hidden_state": padding.pack(x), "past_key_values": cache}
        if output_hidden_states:
            outputs["hidden_states"] = tuple(padding.pack(y) for y in [*seen, x])
        return BaseModelOutputWithPast(**outputs)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given.")
        if inputs_embeds is not None:
            width = self.config.hidden_size
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != width:
                shape = tuple(inputs_embeds.shape)
                raise ValueError(f"inputs_embeds must have shape (batch, tokens, {width}), got {shape}.")
            return inputs_embeds
        assert input_ids is not None
        check_token_ids(input_ids, self.config.vocab_size)
        return self.embed_tokens(input_ids)

    def read(
        self,
        tokens: TokenSource,
        past_key_values: AtlasCache | None = None,
        *,
        step: int = DEFAULT_STEP,
        progress: bool = True,
    ) -> AtlasCache:
        """Read token ids of any number, `step` at a time, in constant memory; the cache holds what was remembered.

        tokens: ids (T,) or (B, T), a tensor or an array of any whole numbers, or an iterable of ids or of pieces of
        such; past_key_values: goes on in place.
        """
        return read(self, tokens, past_key_values, step=step, progress=progress)


class AtlasForCausalLM(AtlasPreTrainedModel, GenerationMixin):
    """A language model: logits (B, T, V), loss, generate()."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__(config)
        self.model = AtlasModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """In place of the cache of keys and values that `generate` would make."""
        if generation_config.cache_implementation is not None:
            kind = generation_config.cache_implementation
            raise ValueError(
                f"cache_implementation={kind!r} is not for this model: its cache is an AtlasCache; use None."
            )
        if model_kwargs.get("past_key_values") is not None:
            model_kwargs["past_key_values"]._is_user_defined = True  # it outlives the call: see `generate`
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = AtlasCache(len(self.model.layers))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AtlasCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Bounds = None,
        cu_seq_lens_q: Bounds = None,
        fresh: Sequence[bool] = (),
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As `AtlasModel`. labels (B, T): shifted here; -100 is ignored. logits_to_keep: of the last tokens only."""
        if kwargs.pop("only_cache", False):
            raise ValueError(
                "only_cache=True is not for AtlasForCausalLM, whose forward gives logits; to read on without them, "
                "call read(tokens, past_key_values), or model.model(..., only_cache=True)."
            )
        given = input_ids if input_ids is not None else inputs_embeds
        batch = 0 if given is None else given.shape[0]
        bounds = packed_bounds(cu_seqlens, cu_seq_lens_q, position_ids, attention_mask, batch)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=bounds,
            fresh=fresh,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            labels = labels_within_sequences(labels, bounds)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def read(
        self,
        tokens: TokenSource,
        past_key_values: AtlasCache | None = None,
        *,
        step: int = DEFAULT_STEP,
        progress: bool = True,
    ) -> AtlasCache:
        """As `AtlasModel.read`: no logits are computed."""
        return self.model.read(tokens, past_key_values, step=step, progress=progress)

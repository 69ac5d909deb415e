"""Hugging Face models of the family, known to the Auto classes once this is imported."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from atlas_memory.models.cache import AtlasCache
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.models.modeling_atlas import AtlasForCausalLM, AtlasModel

AutoConfig.register(AtlasConfig.model_type, AtlasConfig, exist_ok=True)
AutoModel.register(AtlasConfig, AtlasModel, exist_ok=True)
AutoModelForCausalLM.register(AtlasConfig, AtlasForCausalLM, exist_ok=True)

__all__ = ["AtlasCache", "AtlasConfig", "AtlasForCausalLM", "AtlasModel"]

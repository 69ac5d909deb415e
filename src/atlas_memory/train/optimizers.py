"""Which parameter is learned by which optimizer, and which of them decay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from atlas_memory.layers.gates import TokenGates
from atlas_memory.layers.initial_weights import InitialWeights
from atlas_memory.layers.memory import Memory
from atlas_memory.layers.mixers import TokenStack
from atlas_memory.layers.norm import RMSNorm
from atlas_memory.train.muon import Muon
from atlas_memory.train.recipe import OptimizerConfig


class Kind(NamedTuple):
    muon: bool  # orthogonalised steps make sense for matrices that map one activation to another, and for nothing else
    decays: bool  # zero is no natural place for gates, norms, coefficients and biases


KINDS: dict[str, Kind] = {
    "matrix": Kind(muon=True, decays=True),
    "embedding": Kind(muon=False, decays=True),
    "head": Kind(muon=False, decays=True),
    "initial": Kind(muon=False, decays=True),  # of fast weights, one matrix a head
    "convolution": Kind(muon=False, decays=True),
    "persistent": Kind(muon=False, decays=True),  # tokens that are learned, of attention or between segments
    "gate": Kind(muon=False, decays=False),
    "norm": Kind(muon=False, decays=False),
    "coefficient": Kind(muon=False, decays=False),
    "bias": Kind(muon=False, decays=False),
}


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """{name of a parameter: a key of KINDS}, for every parameter that learns."""
    kinds: dict[str, str] = {}
    for path, module in model.named_modules():
        inherited = _kind_below(module)
        for name, parameter in module.named_parameters(path, recurse=inherited is not None):
            if parameter.requires_grad and name not in kinds:
                kinds[name] = inherited or _own_kind(module, name, parameter)
    # A tied head is met as the embedding only: keep the names that the model itself gives.
    return {name: kinds[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


def _kind_below(module: nn.Module) -> str | None:
    """The kind of everything in a module, where that is one."""
    if isinstance(module, TokenGates):
        return "gate"
    if isinstance(module, InitialWeights):
        return "initial"
    return None


def _own_kind(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    leaf = name.rpartition(".")[2]
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, RMSNorm) or leaf == "norm":
        return "norm"
    if leaf == "bias":
        return "bias"
    if isinstance(module, nn.Linear):
        return "head" if name.endswith("lm_head.weight") else "matrix"
    if leaf == "persistent" or isinstance(module, TokenStack):
        return "persistent"
    known = {"mixing": "convolution", "coefficients": "coefficient"}
    if leaf in known and isinstance(module, Memory):
        return known[leaf]
    raise ValueError(f"parameter {name} of shape {tuple(parameter.shape)} has no kind; known: {', '.join(KINDS)}.")


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """One optimizer, or Muon and AdamW; each parameter in exactly one group of one of them."""
    kinds = parameter_kinds(model)
    parameters = dict(model.named_parameters())

    def groups(muon: bool) -> list[dict[str, object]]:
        chosen = {name: KINDS[kind] for name, kind in kinds.items()}
        uses_muon = {name: kind.muon and config.name == "muon" for name, kind in chosen.items()}
        split = [
            [name for name, kind in chosen.items() if kind.decays == decays and uses_muon[name] == muon]
            for decays in (True, False)
        ]
        decay = (config.weight_decay, 0.0)
        return [
            {"params": [parameters[name] for name in names], "weight_decay": weight_decay}
            for names, weight_decay in zip(split, decay, strict=True)
            if names
        ]

    optimizers: list[torch.optim.Optimizer] = []
    if matrices := groups(muon=True):
        # Scaled to the root mean square of AdamW's steps, one learning rate serves both.
        optimizers.append(Muon(matrices, lr=config.lr, momentum=config.momentum))
    if others := groups(muon=False):
        optimizers.append(torch.optim.AdamW(others, lr=config.lr, betas=config.betas, eps=config.eps))
    return optimizers

"""FSDP2: parameters, gradients and optimizer states shared out over all processes. What is saved is always whole.

Accelerate's own sharding refuses CPUs, where this is tested; `fully_shard` is the same code underneath.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(reader: nn.Module, blocks: Iterable[nn.Module], processes: int, device: torch.device) -> FSDPModule:
    """Share out a module that is called once per pass; each block is gathered on its own, when it is needed."""
    if processes < 2 or not torch.distributed.is_initialized():
        raise ValueError("loop.sharding='fsdp2' needs several processes: torchrun --nproc-per-node N -m atlas_memory …")
    mesh = init_device_mesh(device.type, (processes,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(reader, mesh=mesh)


def gathered(tree: Any) -> Any:
    """The same with whole tensors on the host; every process has to ask."""
    if isinstance(tree, Mapping):
        return {name: gathered(leaf) for name, leaf in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(gathered(leaf) for leaf in tree)
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    return tree.detach().cpu() if isinstance(tree, Tensor) else tree


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor shared out as a parameter is; other tensors, such as counts of steps, stay as they are."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    # Every process has read the whole: each takes its part, and nothing has to be sent.
    return distribute_tensor(
        whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[set[str], set[str]]:
    """Put whole tensors into a model, sharded or not; the names that are missing, and those that are unexpected.

    A tensor of another shape is both, and nothing is put anywhere.
    """
    parameters = dict(model.named_parameters())  # each once: a tied one under its first name
    fitting = {name for name in parameters if name in weights and weights[name].shape == parameters[name].shape}
    if len(fitting) == len(parameters):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(like(weights[name], parameter))
    return parameters.keys() - fitting, weights.keys() - fitting


def optimizer_state(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """A whole state_dict, shared out as the optimizer's parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shared = {
        place: {
            name: like(leaf, parameters[place]) if isinstance(leaf, Tensor) else leaf for name, leaf in leaves.items()
        }
        for place, leaves in state["state"].items()
    }
    return {**state, "state": shared}


def total(norm: Tensor) -> float:
    """A norm over sharded gradients is a number on every process."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

"""FSDP2 on a CPU mesh: Accelerate's own refuses CPUs, so `fully_shard` is called directly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.support import environment

PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from atlas_memory.train.optimizers import make_optimizers
from atlas_memory.train.recipe import OptimizerConfig
from tests.models.support import small_model, token_ids

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
backbone, preset = sys.argv[1:]
config = OptimizerConfig(lr=0.01)

def losses(model, rows):
    optimizer, = make_optimizers(model, config)
    found = []
    for step in range(3):
        ids = token_ids(4, 13, seed=step)
        loss = model(input_ids=ids[rows], labels=ids[rows], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)

whole = small_model(backbone=backbone, preset=preset)
expected = losses(whole, slice(None))
model = small_model(backbone=backbone, preset=preset)
mesh = init_device_mesh("cpu", (world,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
found = losses(model, slice(rank, None, world))
dist.all_reduce(found)
torch.testing.assert_close(found / world, expected)
for (name, sharded), plain in zip(model.named_parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(sharded.full_tensor(), plain, msg=name)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "preset"), [("lmm", "titans"), ("mag", "atlas")])
def test_sharded_training_is_plain_training(tmp_path: Path, backbone: str, preset: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        [*launcher, str(program), backbone, preset],
        env={**environment(), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr

"""FSDP2 on a CPU mesh: Accelerate's own refuses CPUs, so `fully_shard` is called directly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atlas_memory.train import load_recipe, train
from atlas_memory.train.learner import _check_equal_shares
from tests.train.support import (
    SEGMENTS,
    STEPS,
    cut_back,
    environment,
    logged,
    run,
    tiny_recipe,
    weights,
    write_recipe,
)

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


def test_a_sharded_run_is_a_plain_run_and_so_are_its_checkpoints(tmp_path: Path) -> None:
    """Segments with carried states, three of four rows in a pass; then a plain process goes on from a sharded one."""
    loop = {"steps": STEPS, "rows_per_pass": 3}
    fields = tiny_recipe(tmp_path, data=SEGMENTS, loop=loop)
    fields["checkpoint"] = {"every": 1, "keep": STEPS}
    plain = write_recipe(tmp_path / "plain.yaml", fields)
    sharded = write_recipe(tmp_path / "sharded.yaml", {**fields, "loop": {**loop, "sharding": "fsdp2"}})
    run(1, plain, tmp_path / "one")
    run(2, sharded, tmp_path / "two")
    losses = logged(tmp_path / "one")
    assert logged(tmp_path / "two") == pytest.approx(losses, rel=1e-4)
    assert logged(tmp_path / "two", "gradient_norm") == pytest.approx(
        logged(tmp_path / "one", "gradient_norm"), rel=1e-3
    )
    one, two = (weights(tmp_path / name / "final") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].shape == two[name].shape for name in one)
    run(1, plain, cut_back(tmp_path / "two", "sharded to plain", 3), resume=True)
    assert logged(tmp_path / "sharded to plain") == pytest.approx(losses, rel=1e-4)
    run(2, sharded, cut_back(tmp_path / "one", "plain to sharded", 3), resume=True)
    assert logged(tmp_path / "plain to sharded") == pytest.approx(losses, rel=1e-4)


def test_sharded_runs_keep_the_precision_of_the_recipe(tmp_path: Path) -> None:
    def first_loss(name: str, processes: int, **loop: str) -> float:
        fields = tiny_recipe(tmp_path, loop={"steps": 1, **loop})
        run(processes, write_recipe(tmp_path / f"{name}.yaml", fields), tmp_path / name)
        return logged(tmp_path / name)[0]

    exact = first_loss("exact", 2)
    rounded = first_loss("rounded", 1, precision="bfloat16")
    sharded = first_loss("sharded", 2, precision="bfloat16", sharding="fsdp2")
    assert rounded != exact
    assert abs(sharded - rounded) < 0.2 * abs(rounded - exact)


def test_sharding_says_what_it_needs(tmp_path: Path) -> None:
    fields = tiny_recipe(tmp_path, loop={"steps": 1, "sharding": "fsdp2"})
    with pytest.raises(ValueError, match="needs several processes"):
        train(load_recipe(write_recipe(tmp_path / "recipe.yaml", fields)), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match="multiple of the 3 processes"):
        _check_equal_shares(load_recipe(tmp_path / "recipe.yaml"), 3)
    fields["optimizer"]["name"] = "muon"
    with pytest.raises(ValueError, match=r"needs optimizer\.name='adamw'"):
        load_recipe(write_recipe(tmp_path / "recipe.yaml", fields))


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

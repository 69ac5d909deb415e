"""What every test runs under: one thread, reproducible random numbers, and one hypothesis profile."""

from __future__ import annotations

import os
from pathlib import Path

# No test asks the network. Read by the Hugging Face libraries as they are imported, hence before everything else.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

SHARED = Path(__file__).parents[2] / "shared"

# Examples are the same in every run, and no test is timed: machines differ.
settings.register_profile(
    "atlas",
    deadline=None,
    derandomize=True,
    max_examples=20,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("atlas")


def pytest_configure(config: pytest.Config) -> None:
    # Matrices are tiny here: a second thread has nothing to do but to be waited for, and on a busy machine that wait
    # made the same tests twenty times slower.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SHARED.is_dir():
        return
    absent = pytest.mark.skip(reason=f"{SHARED} is absent")
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(absent)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

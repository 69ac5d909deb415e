"""Random specs and random ways to read, for hypothesis. Specs are valid by construction: nothing is filtered out."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from atlas_memory import MemorySpec
from atlas_memory.spec import CHOICES, SITES


@st.composite
def specs(draw: st.DrawFn) -> MemorySpec:
    """Any point of the space, with widths and chunks small enough to be quick."""
    network = draw(st.sampled_from(list(SITES)))
    fields: dict[str, Any] = {
        "network": network,
        "feature": draw(st.sampled_from(["identity", "polynomial"])),
        "degree": draw(st.integers(1, 3)),
        "activation": draw(st.sampled_from(CHOICES["activation"])),
        "objective": draw(st.sampled_from(["regression", "dot"])),
        "window": draw(st.sampled_from([1, 3, 7])),
        "optimizer": draw(st.sampled_from(["gd", "momentum", "muon"])),
        "interval": draw(st.sampled_from([None, 1, 2, 3, 7])),
        "newton_schulz_steps": draw(st.sampled_from([1, 3])),
        "gradient_at": draw(st.sampled_from(["state", "decayed"])),
        "chunk": draw(st.sampled_from([1, 3, 4, 5])),
        "retention": draw(st.sampled_from(["learned", "learned", "one"])),
        "step": draw(st.sampled_from(["learned", "learned", "one"])),
        "key_width": draw(st.sampled_from([2, 3])),
        "expansion": 2,
        "write_cap": draw(st.sampled_from([None, None, 0.7])),
        "limiter": draw(st.sampled_from([True, True, False])),
        "retraction": draw(st.sampled_from([None, 0.3, 100.0])),
    }
    if draw(st.integers(0, 3)) == 0:
        horizon = draw(st.sampled_from([None, fields["window"], fields["window"] + 2]))
        fields |= {"feature": "exponential", "optimizer": "gd", "horizon": horizon}
        fields["initial_pairs"] = 0 if network == "matrix" else draw(st.sampled_from([0, 2]))
    if fields["gradient_at"] == "state" and fields["retention"] == "learned":
        fields["surprise_retention"] = draw(st.sampled_from([None, None, 1.0]))
    fields |= draw(_matrix_widths() if network == "matrix" else _deep_choices(network, fields["key_width"]))
    return MemorySpec(**fields)


def _matrix_widths() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"value_width": st.sampled_from([2, 4])})


@st.composite
def _deep_choices(draw: st.DrawFn, network: str, key_width: int) -> dict[str, Any]:
    fast = draw(st.sets(st.sampled_from(SITES[network]), min_size=1))
    residual = draw(st.booleans())
    value_width = key_width if residual else draw(st.sampled_from([2, 4]))
    # the order in which layers are named must not matter
    ordered = draw(st.permutations(sorted(fast)))
    return {"fast": tuple(ordered), "residual": residual, "value_width": value_width}


@st.composite
def splits(draw: st.DrawFn, count: int, most: int = 3) -> list[int]:
    """Places to cut `count` tokens at. Calls without any token are among them."""
    return sorted(draw(st.lists(st.integers(0, count), max_size=most)))


@st.composite
def readings(draw: st.DrawFn) -> dict[str, Any]:
    """How many tokens two rows read, in which calls; and how many each of them had read before, if any."""
    count = draw(st.sampled_from([1, 4, 7, 11]))
    lengths = draw(st.none() | st.lists(st.integers(0, count), min_size=2, max_size=2))
    before = draw(st.none() | st.lists(st.integers(0, 7), min_size=2, max_size=2))
    return {"count": count, "splits": draw(splits(count)), "lengths": lengths, "before": before}

"""Writing on from a prompt: the tokens that `generate` would give."""

from __future__ import annotations

import pytest

from atlas_memory.models.saved import load_saved
from atlas_memory.models.writing import Sampling, write
from tests.models.support import small_model, token_ids

PROMPT = token_ids(1, 20)[0].tolist()


@pytest.mark.parametrize("pieces", [[PROMPT], [PROMPT[:7], [], PROMPT[7:8], PROMPT[8:]], [[token] for token in PROMPT]])
def test_greedy_writing_is_greedy_generation(pieces: list[list[int]]) -> None:
    model = small_model(backbone="mag")
    expected = model.generate(token_ids(1, 20), max_new_tokens=6, do_sample=False)[0, 20:].tolist()
    assert list(write(model, pieces, Sampling(6, temperature=0), progress=False)) == expected


def test_nothing_follows_the_end() -> None:
    model = small_model(backbone="mag")
    tokens = list(write(model, [PROMPT], Sampling(6, temperature=0), progress=False))
    stopped = list(write(model, [PROMPT], Sampling(6, temperature=0), end=tokens[2], progress=False))
    assert stopped == tokens[: tokens.index(tokens[2])]


def test_a_seed_decides_what_is_sampled() -> None:
    model = small_model(backbone="lmm")
    first, again, other = (
        list(write(model, [PROMPT], Sampling(8, 1.5, 0.9, 20, seed), progress=False)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("fields", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_sampling(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Sampling(**fields)  # type: ignore[arg-type]


def test_a_folder_without_a_model() -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        load_saved("nowhere")

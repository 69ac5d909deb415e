"""torch.compile of whole blocks: one graph, and few of them however far a stream has come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atlas_memory.layers import Block

DIM, CHUNK, WINDOW = 16, 4, 8
PIECE, PIECES, WARM_UP = 12, 7, 4  # tokens of a call; calls; of which so many may still be compiled

# The compiler makes an object of every autograd function that it traces, which torch itself warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def _check_stream(mixer: str, preset: str) -> None:
    torch.manual_seed(0)
    memory = {"key_width": 8, "chunk": CHUNK}
    sizes = {"inner": DIM, "heads": 2, "window": WINDOW, "segment": 2 * CHUNK, "memory_heads": 2}
    block = Block(DIM, mixer, preset=preset, memory=memory, **sizes)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, PIECE * PIECES, DIM)
    with torch.inference_mode():
        expected, _ = block(x)
        answers, state = [], None
        for number, piece in enumerate(x.split(PIECE, dim=1)):
            if number == WARM_UP:
                torch.compiler.set_stance("fail_on_recompile")
            answer, state = compiled(piece, state)
            answers.append(answer)
    torch.testing.assert_close(torch.cat(answers, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_attention_is_compiled_once_for_a_stream() -> None:
    _check_stream("sliding_attention", "atlas")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "preset"), [("mal", "gated_deltanet"), ("lmm", "titans"), ("mag", "omeganet"), ("lmm", "atlas")]
)
def test_memories_are_compiled_once_for_a_stream(mixer: str, preset: str) -> None:
    _check_stream(mixer, preset)

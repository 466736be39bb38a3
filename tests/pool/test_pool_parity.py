"""Tokens equal the reference's whatever the pool has of the prompt.

Pool blocks are read in place, copied, or continued by copy on write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool.in_process_nodes import BLOCK_TOKENS, InProcessHost, reference_tokens
from tests.unit.node_roles.role_bench import make_work

CHUNKS = 150  # tokens: three steps
LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, CHUNKS)
HITS = ("nothing", "a block", "half", "all but one token", "all")


@pytest.fixture(params=[True, False], ids=["in place", "copied"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InProcessHost]:
    host = InProcessHost(tmp_path, prefill=2, decode=2, num_blocks=64, in_place=request.param)
    yield host
    host.close()


def pooled_tokens(hit: str, length: int) -> int:
    return {
        "nothing": 0,
        "a block": BLOCK_TOKENS,
        "half": length // 2,
        "all but one token": length - 1,
        "all": length,
    }[hit]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("hit", HITS)
def test_tokens_are_those_of_the_reference(host: InProcessHost, hit: str, length: int) -> None:
    prompt = tuple(range(100, 100 + length))
    shared = prompt[: pooled_tokens(hit, length)]
    if shared:
        first = make_work((*shared, 3), request="a", max_tokens=20)
        assert host.serve_request(first) == reference_tokens(first)
        host.run_publications()
    second = make_work(prompt, request="b", max_tokens=20)
    assert host.serve_request(second, prefill=1, decode=1) == reference_tokens(second)
    known = len(shared) // BLOCK_TOKENS * BLOCK_TOKENS
    computed = sum(
        message.computed_tokens for message in host.prefill[1].pop_messages("prefill_ended")
    )
    computed += sum(message.computed_tokens for message in host.decode[1].pop_messages("admitted"))
    assert computed <= max(1, length - known)
    if hit == "all" and length > BLOCK_TOKENS:
        assert computed < BLOCK_TOKENS, "the last block goes on from a copy"
    host.run_publications()
    host.check()

"""Tokens are those of the reference whatever the pool has of the prompt: in place, copied, and with a block continued
by copy on write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool.nodes import BLOCK, Host, reference
from tests.unit.roles.bench import work

CHUNKS = 150  # tokens: three steps
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNKS)
HITS = ("nothing", "a block", "half", "all but one token", "all")


@pytest.fixture(params=[True, False], ids=["in place", "copied"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, prefill=2, decode=2, num_blocks=64, in_place=request.param)
    yield made
    made.close()


def pooled(hit: str, length: int) -> int:
    return {"nothing": 0, "a block": BLOCK, "half": length // 2, "all but one token": length - 1, "all": length}[hit]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("hit", HITS)
def test_tokens_are_those_of_the_reference(host: Host, hit: str, length: int) -> None:
    prompt = tuple(range(100, 100 + length))
    shared = prompt[: pooled(hit, length)]
    if shared:
        first = work((*shared, 3), request="a", max_tokens=20)
        assert host.serve(first) == reference(first)
        host.settle()
    second = work(prompt, request="b", max_tokens=20)
    assert host.serve(second, prefill=1, decode=1) == reference(second)
    known = len(shared) // BLOCK * BLOCK
    computed = sum(each.computed_tokens for each in host.prefill[1].take("prefill_ended"))
    computed += sum(each.computed_tokens for each in host.decode[1].take("admitted"))
    assert computed <= max(1, length - known)
    if hit == "all" and length > BLOCK:
        assert computed < BLOCK, "the last block goes on from a copy"
    host.settle()
    host.check()

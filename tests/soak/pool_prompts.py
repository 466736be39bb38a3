"""Prompts for the users of a pool: families that share a prefix and fork inside a block.

A block repeats its own hash, so that a reader sees whether it is whole and which block it is."""

import ctypes
from dataclasses import dataclass
from random import Random

from baton.kv.blocks import HASH_BYTES, compute_packed_hashes, pack_tokens
from tests.pool.harness import LAYOUT, UNSALTED_ROOT

FAMILIES, BRANCHES = 120, 3
PROMPT_BLOCKS = 10  # of each prompt


@dataclass(frozen=True, slots=True)
class PoolPrompt:
    """`tokens`, and the same `packed_tokens`; `block_hashes` of its full blocks, 32 bytes each."""

    tokens: tuple[int, ...]
    packed_tokens: bytes
    block_hashes: bytes

    def block_hash(self, number: int) -> bytes:
        return self.block_hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def block_tokens(self, number: int) -> tuple[int, ...]:
        """The tokens of block `number`."""
        return self.tokens[number * LAYOUT.block_size : (number + 1) * LAYOUT.block_size]

    def prefix(self, blocks: int) -> "PoolPrompt":
        return make_prompt(self.tokens[: blocks * LAYOUT.block_size])


def make_prompt(tokens: tuple[int, ...]) -> PoolPrompt:
    packed = pack_tokens(tokens)
    return PoolPrompt(
        tokens, packed, compute_packed_hashes(UNSALTED_ROOT, packed, LAYOUT.block_size)
    )


def all_prompts() -> list[PoolPrompt]:
    return [_prompt(family, branch) for family in range(FAMILIES) for branch in range(BRANCHES)]


def _prompt(family: int, branch: int) -> PoolPrompt:
    common, own = Random(f"family {family}"), Random(f"family {family}, branch {branch}")
    shared = common.randrange(1, PROMPT_BLOCKS * LAYOUT.block_size)
    tokens = [common.randrange(32000) for _ in range(shared)]
    tokens += [own.randrange(32000) for _ in range(PROMPT_BLOCKS * LAYOUT.block_size - shared)]
    return make_prompt(tuple(tokens))


def block_content(name: bytes) -> bytes:
    """Return the content of the block with this hash."""
    return name * (LAYOUT.block_bytes // HASH_BYTES)


class BlockChecker:
    """Reads blocks in place and says what is wrong with them."""

    def __init__(self, prompts: list[PoolPrompt]) -> None:
        self._tokens = {
            one.block_hash(number): one.block_tokens(number)
            for one in prompts
            for number in range(PROMPT_BLOCKS)
        }

    def find_error(self, address: int, name: bytes) -> str | None:
        """Return what is wrong with the block at `address`, which must hold the block with this
        hash."""
        found = ctypes.string_at(address, LAYOUT.block_bytes)
        return (
            None
            if found == block_content(name)
            else f"{name.hex()[:16]} was to be read, {_describe_bytes(found)} was"
        )

    def find_prefix_error(self, address: int, tokens: tuple[int, ...]) -> str | None:
        """Return what is wrong with the block at `address`, which must begin with these tokens."""
        found = ctypes.string_at(address, LAYOUT.block_bytes)
        name = found[:HASH_BYTES]
        if found != block_content(name) or self._tokens.get(name, ())[: len(tokens)] != tokens:
            return f"a block that begins with {tokens} was to be read, {_describe_bytes(found)} was"
        return None


def _describe_bytes(found: bytes) -> str:
    names = {found[at : at + HASH_BYTES].hex()[:16] for at in range(0, len(found), HASH_BYTES)}
    return f"{len(names)} names, {sorted(names)[:3]} among them,"

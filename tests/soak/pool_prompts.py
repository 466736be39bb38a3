"""What the users of a soaked pool ask for: families of prompts that share a beginning and fork inside a block. A block
holds its own name over and over, so whoever reads it sees at once whether it is whole, and whose it is."""

import ctypes
from dataclasses import dataclass
from random import Random

from baton.block_hash import HASH_BYTES, chain_names, pack_tokens
from tests.pool.rig import LAYOUT, SALTLESS

FAMILIES, BRANCHES = 120, 3
BLOCKS = 10  # of each prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens`, and the same `packed`; `names` of its full blocks, 32 bytes each."""

    tokens: tuple[int, ...]
    packed: bytes
    names: bytes

    def name(self, number: int) -> bytes:
        return self.names[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def block(self, number: int) -> tuple[int, ...]:
        """The tokens of block `number`."""
        return self.tokens[number * LAYOUT.block_size : (number + 1) * LAYOUT.block_size]

    def upto(self, blocks: int) -> "Prompt":
        return prompt_of(self.tokens[: blocks * LAYOUT.block_size])


def prompt_of(tokens: tuple[int, ...]) -> Prompt:
    packed = pack_tokens(tokens)
    return Prompt(tokens, packed, chain_names(SALTLESS, packed, LAYOUT.block_size))


def every_prompt() -> list[Prompt]:
    return [_prompt(family, branch) for family in range(FAMILIES) for branch in range(BRANCHES)]


def _prompt(family: int, branch: int) -> Prompt:
    common, own = Random(f"family {family}"), Random(f"family {family}, branch {branch}")
    shared = common.randrange(1, BLOCKS * LAYOUT.block_size)
    tokens = [common.randrange(32000) for _ in range(shared)]
    tokens += [own.randrange(32000) for _ in range(BLOCKS * LAYOUT.block_size - shared)]
    return prompt_of(tuple(tokens))


def content(name: bytes) -> bytes:
    """Of the block with this name."""
    return name * (LAYOUT.block_bytes // HASH_BYTES)


class Reader:
    """Reads blocks in place and says what is wrong with them."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._tokens = {one.name(number): one.block(number) for one in prompts for number in range(BLOCKS)}

    def wrong(self, address: int, name: bytes) -> str | None:
        """With the block at `address`, which is to hold the one with this name."""
        found = ctypes.string_at(address, LAYOUT.block_bytes)
        return None if found == content(name) else f"{name.hex()[:16]} was to be read, {_seen(found)} was"

    def wrong_beginning(self, address: int, tokens: tuple[int, ...]) -> str | None:
        """With the block at `address`, whose first tokens are to be these."""
        found = ctypes.string_at(address, LAYOUT.block_bytes)
        name = found[:HASH_BYTES]
        if found != content(name) or self._tokens.get(name, ())[: len(tokens)] != tokens:
            return f"a block that begins with {tokens} was to be read, {_seen(found)} was"
        return None


def _seen(found: bytes) -> str:
    names = {found[at : at + HASH_BYTES].hex()[:16] for at in range(0, len(found), HASH_BYTES)}
    return f"{len(names)} names, {sorted(names)[:3]} among them,"

"""The radix index: finds the block that holds a given prefix of a prompt.

A request names a prompt by a `PromptChain`: root hash, hashes of its full blocks, and token ids.

The index has one entry per block, linked to its parent; a path from a root down is a prompt, block
by block. A block's parent is always in the index, because insertion requires it and only leaves are
removed. So a prompt's first blocks are present and the rest are not, and binary search over the
block hashes finds the last one present: O(log n) look-ups, and then the path down to it
(kv_pool/core/index/path_table.py). Entries are looked up by the first 8 bytes of their block hash,
after which the whole hash, the root and the token ids of the whole path are compared. A block whose
first 8 bytes equal those of an indexed block is refused, and so are all blocks after it.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.kv.blocks import (
    HASH_BYTES,
    TOKEN_BYTES,
    BlockHash,
    compute_packed_hashes,
    pack_tokens,
)
from kv_pool.core.index.block_hash_table import BlockHashTable
from kv_pool.core.index.path_table import ROOT as ROOT
from kv_pool.core.index.path_table import PathTable
from kv_pool.core.index.token_table import TokenTable, common_prefix_tokens
from kv_pool.core.ledger import require_invariant

_KEY_BYTES = 8
_NO_CHILD, _SEVERAL_CHILDREN = -1, -2


@dataclass(frozen=True, slots=True)
class PromptChain:
    """The block hashes and tokens of a prompt. Raises InvalidRequest if their lengths do not fit.

    It is not checked that the hashes are those of the tokens: a match in the index compares both.
    """

    root_hash: BlockHash  # of model, layout and salt: what the first block's hash builds on
    packed_hashes: bytes  # 32 bytes for each full block
    packed_tokens: bytes  # 4 bytes each, big endian: all full blocks, and what follows them
    block_size: int  # tokens

    def __post_init__(self) -> None:
        full = len(self.packed_tokens) // (self.block_size * TOKEN_BYTES)
        if (
            len(self.root_hash) != HASH_BYTES
            or len(self.packed_tokens) % TOKEN_BYTES
            or len(self.packed_hashes) != full * HASH_BYTES
        ):
            raise InvalidRequest(
                f"a chain of {len(self.packed_tokens)} bytes of tokens in blocks of "
                f"{self.block_size} needs {full} block hashes and a root hash of {HASH_BYTES} "
                f"bytes each; got {len(self.packed_hashes)} and {len(self.root_hash)} bytes"
            )

    @classmethod
    def from_tokens(cls, root: BlockHash, tokens: Sequence[int], block_size: int) -> "PromptChain":
        packed = pack_tokens(tokens)
        return cls(root, compute_packed_hashes(root, packed, block_size), packed, block_size)

    def prefix(self, blocks: int) -> "PromptChain":
        """Return a chain of the first `blocks` full blocks."""
        tokens = self.packed_tokens[: blocks * self.block_size * TOKEN_BYTES]
        return PromptChain(
            self.root_hash, self.packed_hashes[: blocks * HASH_BYTES], tokens, self.block_size
        )

    def __len__(self) -> int:
        """Return the number of full blocks."""
        return len(self.packed_hashes) // HASH_BYTES

    def block_hash(self, number: int) -> bytes:
        return self.packed_hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def index_key(self, number: int) -> int:
        """Return the key of an index entry: the first 8 bytes of the block hash."""
        start = number * HASH_BYTES
        return int.from_bytes(self.packed_hashes[start : start + _KEY_BYTES], "big")

    def block_tokens(self, number: int) -> bytes:
        """Return the packed tokens of a block, which may be the last, partial one."""
        size = self.block_size * TOKEN_BYTES
        return self.packed_tokens[number * size : (number + 1) * size]


def index_key_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_KEY_BYTES], "big")


class RadixIndex:
    """An index over blocks 0 to `num_blocks` - 1, of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._hash_table = BlockHashTable(num_blocks)
        self.tokens = TokenTable(num_blocks, block_size)  # packed token ids of each block
        self.paths = PathTable(num_blocks)  # parent, depth and path of each block
        # By block: its only child, _NO_CHILD or _SEVERAL_CHILDREN.
        self._only_child = array("i", [_NO_CHILD]) * num_blocks
        # Children by block with several, and first blocks by root hash; both sorted by token ids.
        self._siblings: dict[int, list[int]] = {}
        self._first_blocks: dict[bytes, list[int]] = {}
        self._root_of: dict[int, bytes] = {}  # root hash by first block

    def __len__(self) -> int:
        return len(self._hash_table)

    def __contains__(self, block: int) -> bool:
        return block in self.paths

    def is_leaf(self, block: int) -> bool:
        return self._only_child[block] == _NO_CHILD

    def block_hash(self, block: int) -> bytes:
        return self._hash_table.block_hash(block)

    def chain(self, block: int) -> PromptChain:
        """Return the prompt that ends with `block`."""
        path = self.paths.path(block)
        hashes, tokens = (
            b"".join(map(get, path)) for get in (self.block_hash, self.tokens.get_tokens)
        )
        return PromptChain(BlockHash(self._root_of[path[0]]), hashes, tokens, self._block_size)

    def root_hash(self, block: int) -> BlockHash:
        """Return the root hash of the prompt that `block` belongs to."""
        return BlockHash(self._root_of[self.paths.path(block)[0]])

    def list_subtree(self, block: int) -> list[int]:
        """Return `block` and all blocks below it, leaves first."""
        subtree = [block]
        for member in subtree:
            subtree += self._children(member)
        return subtree[::-1]

    # finding

    def find_block(self, block_hash: bytes) -> int | None:
        block = self._hash_table.find_block(block_hash)
        return block if block is not None and self.block_hash(block) == block_hash else None

    def match_prefix(self, chain: PromptChain, max_blocks: int | None = None) -> "array[int]":
        """Return the blocks of the longest indexed prefix of `chain`, first to last."""
        # Blocks below `present` are indexed; those from `absent` on are not, or not requested.
        present, absent = 0, len(chain) if max_blocks is None else min(max_blocks, len(chain))
        deepest = ROOT
        while present < absent:
            middle = (present + absent) // 2
            block = self.find_block(chain.block_hash(middle))
            if block is not None and self.paths.depth(block) == middle:
                present, deepest = middle + 1, block
            else:
                absent = middle
        if deepest == ROOT:
            return array("i")
        path = self.paths.path(deepest)
        if self._root_of[path[0]] != chain.root_hash:
            return array("i")
        return path[: self.tokens.count_matching_blocks(path, chain.packed_tokens)]

    def match_partial_block(self, chain: PromptChain, path: "array[int]") -> tuple[int, int] | None:
        """Find the block after `path` that has most of the next tokens of `chain` in common.

        `path` is a match of `chain`. Returns the block and the number of tokens, or None if no
        block has the next token.
        """
        tokens = chain.block_tokens(len(path))
        children = self._children(path[-1]) if path else self._first_blocks.get(chain.root_hash, [])
        position = bisect_left(children, tokens, key=self.tokens.get_tokens)
        best: tuple[int, int] | None = None
        for block in children[max(0, position - 1) : position + 1]:
            shared = common_prefix_tokens(self.tokens.get_tokens(block), tokens)
            if shared > (best[1] if best else 0):
                best = block, shared
        return best

    def _children(self, parent: int) -> list[int]:
        child = self._only_child[parent]
        if child == _SEVERAL_CHILDREN:
            return self._siblings[parent]
        return [child] if child != _NO_CHILD else []

    # changing

    def insert_block(self, block: int, chain: PromptChain, number: int, parent: int) -> bool:
        """Index `block` as block `number` of `chain`, after `parent` (ROOT for the first block).

        Returns False and changes nothing if an indexed block hash has the same first 8 bytes.
        """
        require_invariant(
            number == 0 if parent == ROOT else self.paths.depth(parent) + 1 == number,
            f"block {block} is inserted without its parent",
        )
        return self.add_block(
            block, chain.block_hash(number), chain.block_tokens(number), parent, chain.root_hash
        )

    def add_block(
        self, block: int, block_hash: bytes, tokens: bytes, parent: int, root: BlockHash
    ) -> bool:
        """Index `block` like `insert_block`, given its own hash and tokens instead of a chain."""
        require_invariant(block not in self, f"block {block} is in the index already")
        if not self._hash_table.add_block(block, block_hash):
            return False
        self.tokens.set_tokens(block, tokens)
        self.paths.add_block(block, parent)
        if parent == ROOT:
            self._root_of[block] = root
            self._add_sorted(self._first_blocks.setdefault(root, []), block)
        else:
            self._add_child(parent, block)
        return True

    def remove_leaf(self, block: int) -> None:
        require_invariant(
            block in self and self.is_leaf(block), f"block {block} is not a leaf of the index"
        )
        self._hash_table.remove_block(block)
        parent = self.paths.remove_block(block)
        if parent != ROOT:
            self._remove_child(parent, block)
            return
        root = self._root_of.pop(block)
        firsts = self._first_blocks[root]
        self._remove_sorted(firsts, block)
        if not firsts:
            del self._first_blocks[root]

    def _add_child(self, parent: int, block: int) -> None:
        child = self._only_child[parent]
        if child == _NO_CHILD:
            self._only_child[parent] = block
            return
        if child != _SEVERAL_CHILDREN:
            self._siblings[parent], self._only_child[parent] = [child], _SEVERAL_CHILDREN
        self._add_sorted(self._siblings[parent], block)

    def _remove_child(self, parent: int, block: int) -> None:
        if self._only_child[parent] != _SEVERAL_CHILDREN:
            self._only_child[parent] = _NO_CHILD
            return
        siblings = self._siblings[parent]
        self._remove_sorted(siblings, block)
        if len(siblings) == 1:
            self._only_child[parent] = siblings[0]
            del self._siblings[parent]

    def _add_sorted(self, blocks: list[int], block: int) -> None:
        tokens = self.tokens.get_tokens(block)
        blocks.insert(bisect_left(blocks, tokens, key=self.tokens.get_tokens), block)

    def _remove_sorted(self, blocks: list[int], block: int) -> None:
        """Remove `block`; with a forged block hash, several blocks may have its tokens."""
        tokens = self.tokens.get_tokens(block)
        start = bisect_left(blocks, tokens, key=self.tokens.get_tokens)
        del blocks[blocks.index(block, start)]

    def check(self) -> None:
        """Raise PoolLedgerError unless all tables are consistent. Slow, for tests: O(blocks)."""
        present = [block for block in range(len(self.paths)) if block in self]
        require_invariant(sorted(self._hash_table.blocks()) == present, "block hashes and parents")
        children: dict[int, list[int]] = {}
        for block in present:
            require_invariant(
                self.find_block(self.block_hash(block)) == block, f"block hash of block {block}"
            )
            parent = self.paths.parent(block)
            require_invariant(
                (parent == ROOT) == (block in self._root_of), f"root of block {block}"
            )
            if parent != ROOT:
                require_invariant(parent in self, f"the parent of block {block} is not indexed")
                require_invariant(
                    self.paths.depth(block) == self.paths.depth(parent) + 1,
                    f"depth of block {block}",
                )
                children.setdefault(parent, []).append(block)
            path = self.paths.path(block)
            require_invariant(
                list(map(self.paths.parent, path)) == [ROOT, *path[:-1]], f"path of block {block}"
            )
        for block in present:
            require_invariant(
                sorted(self._children(block)) == sorted(children.get(block, [])),
                f"children of block {block}",
            )
        firsts = [block for blocks in self._first_blocks.values() for block in blocks]
        require_invariant(sorted(firsts) == sorted(self._root_of), "first blocks")
        for blocks in (*self._siblings.values(), *self._first_blocks.values()):
            require_invariant(
                blocks == sorted(blocks, key=self.tokens.get_tokens), "order of children"
            )

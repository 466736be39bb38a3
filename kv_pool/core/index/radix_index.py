"""The radix index: which block holds which prefix. One entry a block, linked to its parent; a path
from a root down is a prompt, block by block.

A parent is there if its child is: insertion asks for it, and only leaves are removed. So of the
names of a prompt a beginning is present and the rest is not, and the last one present is found by
binary search: a handful of look-ups for a prompt of any length, and then the path down to it
(kv_pool/core/index/path_table.py). Entries are found by the first 8 bytes of their names; the whole
name, the root and the token ids of the whole path are compared. Of two names with equal first bytes
the second is refused, and what would follow it too.
"""

from array import array
from bisect import bisect_left

from baton.kv.block_hash import BlockHash
from kv_pool.core.index.block_hash_table import BlockHashTable
from kv_pool.core.index.path_table import ROOT as ROOT
from kv_pool.core.index.path_table import PathTable
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.core.index.token_table import TokenTable, common_prefix_tokens
from kv_pool.core.ledger import require_invariant

_NO_CHILD, _SEVERAL_CHILDREN = -1, -2


class RadixIndex:
    """Blocks 0 to `num_blocks` - 1, of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._hash_table = BlockHashTable(num_blocks)
        self._token_table = TokenTable(num_blocks, block_size)
        self._path_table = PathTable(num_blocks)
        self._only_child = (
            array("i", [_NO_CHILD]) * num_blocks
        )  # the only one, or what is said above
        self._siblings: dict[int, list[int]] = {}  # parent of several -> children by token ids
        self._first_blocks: dict[bytes, list[int]] = {}  # root -> first blocks by token ids
        self._root_of: dict[int, bytes] = {}  # first block -> its root

    def __len__(self) -> int:
        return len(self._hash_table)

    def __contains__(self, block: int) -> bool:
        return block in self._path_table

    def parent(self, block: int) -> int:
        """ROOT for a first block."""
        return self._path_table.parent(block)

    def depth(self, block: int) -> int:
        """Blocks before it."""
        return self._path_table.depth(block)

    def is_leaf(self, block: int) -> bool:
        return self._only_child[block] == _NO_CHILD

    def block_hash(self, block: int) -> bytes:
        return self._hash_table.block_hash(block)

    def packed_tokens(self, block: int) -> bytes:
        return self._token_table.get_tokens(block)

    def path(self, block: int) -> "array[int]":
        """From the first block down to `block`."""
        return self._path_table.path(block)

    def chain(self, block: int) -> PromptChain:
        """The prompt that ends with `block`."""
        path = self.path(block)
        names, tokens = (b"".join(map(get, path)) for get in (self.block_hash, self.packed_tokens))
        return PromptChain(BlockHash(self._root_of[path[0]]), names, tokens, self._block_size)

    def root_hash(self, block: int) -> BlockHash:
        """What the first block of its path descends from."""
        return BlockHash(self._root_of[self.path(block)[0]])

    def list_subtree(self, block: int) -> list[int]:
        """`block` and all that follow it, leaves first."""
        found = [block]
        for one in found:
            found += self._children(one)
        return found[::-1]

    # finding

    def find_block(self, name: bytes) -> int | None:
        block = self._hash_table.find_block(name)
        return block if block is not None and self.block_hash(block) == name else None

    def match_prefix(self, chain: PromptChain, most: int | None = None) -> "array[int]":
        """The blocks of the longest prefix of `chain` that is here, at most `most`, first to
        last."""
        known, unknown, deepest = 0, len(chain) if most is None else min(most, len(chain)), ROOT
        while (
            known < unknown
        ):  # the first `known` are here; names from `unknown` on are not, or not wanted
            middle = (known + unknown) // 2
            block = self.find_block(chain.block_hash(middle))
            if block is not None and self.depth(block) == middle:
                known, deepest = middle + 1, block
            else:
                unknown = middle
        if deepest == ROOT:
            return array("i")
        path = self.path(deepest)
        if self._root_of[path[0]] != chain.root_hash:
            return array("i")
        return path[: self._token_table.count_matching_blocks(path, chain.packed_tokens)]

    def match_partial_block(self, chain: PromptChain, path: "array[int]") -> tuple[int, int] | None:
        """Of the blocks that follow `path`, a match of `chain`, the one that shares most of the
        tokens that come next, and how many; None if none shares any."""
        wanted = chain.block_tokens(len(path))
        children = self._children(path[-1]) if path else self._first_blocks.get(chain.root_hash, [])
        place = bisect_left(children, wanted, key=self._token_table.get_tokens)
        best: tuple[int, int] | None = None
        for block in children[max(0, place - 1) : place + 1]:
            shared = common_prefix_tokens(self._token_table.get_tokens(block), wanted)
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
        """`block` holds the block `number` of `chain`, whose block before that is `parent` (ROOT
        for the first). False, and nothing changed, if another name has its first bytes."""
        require_invariant(
            number == 0 if parent == ROOT else self.depth(parent) + 1 == number,
            f"block {block} without a parent",
        )
        return self.add_block(
            block, chain.block_hash(number), chain.block_tokens(number), parent, chain.root_hash
        )

    def add_block(
        self, block: int, name: bytes, tokens: bytes, parent: int, root: BlockHash
    ) -> bool:
        """The same, for a block whose prompt is not at hand."""
        require_invariant(block not in self, f"block {block} is in the index already")
        if not self._hash_table.add_block(block, name):
            return False
        self._token_table.set_tokens(block, tokens)
        self._path_table.add_block(block, parent)
        if parent == ROOT:
            self._root_of[block] = root
            self._add_sorted(self._first_blocks.setdefault(root, []), block)
        else:
            self._add_child(parent, block)
        return True

    def remove_leaf(self, block: int) -> None:
        require_invariant(
            block in self and self.is_leaf(block), f"block {block} is no leaf of the index"
        )
        self._hash_table.remove_block(block)
        parent = self._path_table.remove_block(block)
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
        blocks.insert(
            bisect_left(
                blocks, self._token_table.get_tokens(block), key=self._token_table.get_tokens
            ),
            block,
        )

    def _remove_sorted(self, blocks: list[int], block: int) -> None:
        """Equal tokens after one parent are one name, unless a name is forged: so `block` may not
        be the first."""
        place = bisect_left(
            blocks, self._token_table.get_tokens(block), key=self._token_table.get_tokens
        )
        del blocks[blocks.index(block, place)]

    def check(self) -> None:
        """Raise LedgerError unless all tables tell the same story. Looks at everything: for
        tests."""
        present = [block for block in range(len(self._path_table)) if block in self]
        require_invariant(sorted(self._hash_table.blocks()) == present, "names and parents")
        children: dict[int, list[int]] = {}
        for block in present:
            require_invariant(
                self.find_block(self.block_hash(block)) == block, f"name of block {block}"
            )
            parent = self.parent(block)
            require_invariant(
                (parent == ROOT) == (block in self._root_of), f"root of block {block}"
            )
            if parent != ROOT:
                require_invariant(parent in self, f"the parent of block {block} is gone")
                require_invariant(
                    self.depth(block) == self.depth(parent) + 1, f"depth of block {block}"
                )
                children.setdefault(parent, []).append(block)
            path = self.path(block)
            require_invariant(
                list(map(self.parent, path)) == [ROOT, *path[:-1]], f"path of block {block}"
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
                blocks == sorted(blocks, key=self._token_table.get_tokens), "order of children"
            )

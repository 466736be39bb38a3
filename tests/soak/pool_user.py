"""A user of a pool in a process of its own, to be killed and stopped at any moment: it looks up,
reads, publishes and lets go at random, and says what it has done and whatever is not as it should
be, a JSON object a line.

It ends well when its standard input does: everything is released, and the pool told.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from baton.kv.pool_types import PoolHit, PublishRequest
from baton.process import log
from baton.process.failpoints import FAILPOINTS
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.segment import create_segment, round_up_segment_bytes
from kv_pool.client.pool_client import PoolClient
from tests.pool.harness import LAYOUT, UNSALTED_ROOT, client_config, wait_until
from tests.soak.pool_prompts import (
    PROMPT_BLOCKS,
    BlockChecker,
    PoolPrompt,
    all_prompts,
    block_content,
)

TASK_COUNT = 3  # at once, in one process
MAX_HELD_HITS = 6  # hits that a task holds at most
KEPT_OPERATIONS = (
    20,
    100,
)  # operations for which what was found through a former attachment is kept, least and most
REPORT_EVERY = 16  # operations
COPY_FAULTS = (
    "corrupt*1",
    "error*1",
    "delay(0.005)*4",
    "delay(0.03)*1",
)  # what may happen to a copy on its way


class PoolUserClient:
    """One client, from its first dial to its close. What it has found stays readable until it is
    released, also after the client has closed."""

    def __init__(self, address: str, folder: Path, name: str, own: memoryview) -> None:
        self.space = BlockAddressSpace(LAYOUT.block_bytes, folder, range_bytes=1 << 28)
        self.client = PoolClient(
            client_config(address, folder, name, lookup_timeout_seconds=0.05), self.space, own
        )
        self._running = asyncio.create_task(self.client.run())

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def break_stream(self) -> None:
        """Close the stream as if its connection had broken."""
        line = self.client._connection
        if line is not None:
            line.stream.close("abandoned by the soak")

    @property
    def mapped_segments(self) -> list[str]:
        """Return the segments of pools that this process has mapped."""
        return [span.segment for span in self.space.address_map._spans]


@dataclass(frozen=True, slots=True, eq=False)
class HeldHit:
    user_client: PoolUserClient
    hit: PoolHit
    prompt: PoolPrompt


class PoolUser:
    def __init__(self, address: str, folder: Path, name: str, seed: int) -> None:
        self._client_arguments = address, folder, name
        self._seed = seed
        own_blocks = TASK_COUNT * PROMPT_BLOCKS
        self._arena = create_segment(
            folder,
            "arena",
            round_up_segment_bytes(own_blocks * LAYOUT.block_bytes, LAYOUT.block_bytes),
        )
        self._own_blocks = np.frombuffer(self._arena.view, dtype=np.uint8).reshape(
            -1, LAYOUT.block_bytes
        )
        self._prompts = all_prompts()
        self._reader = BlockChecker(self._prompts)
        self._user_client = self._make_client()
        self._counts: Counter[str] = Counter()
        self._replacing = asyncio.Lock()

    def _make_client(self) -> PoolUserClient:
        return PoolUserClient(*self._client_arguments, self._arena.view)

    async def run(self, over: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(TASK_COUNT):
                tasks.create_task(
                    _PoolUserTask(self, number, Random(f"{self._seed}/{number}")).run(over)
                )
        membership = self._user_client
        mapped = len(membership.mapped_segments)
        await membership.close()
        if mapped > 1 or membership.mapped_segments:
            write_message(
                wrong=f"{mapped} segments were mapped before the end, "
                f"{len(membership.mapped_segments)} are after it"
            )
        self._report_counts()
        self._arena.close()
        write_message(over=True)

    @property
    def user_client(self) -> PoolUserClient:
        return self._user_client

    def count_operation(self, what: str, count: int = 1) -> None:
        self._counts[what] += count
        self._counts["operations"] += count if what in OPERATIONS else 0
        if self._counts["operations"] >= REPORT_EVERY:
            self._report_counts()

    def _report_counts(self) -> None:
        if self._counts:
            write_message(**self._counts)
        self._counts.clear()

    def write_blocks(self, task: int, prompt: PoolPrompt) -> tuple[int, ...]:
        """Write what a model would into the task's own blocks, and return them."""
        first = task * PROMPT_BLOCKS
        for number in range(len(prompt.block_hashes) // 32):
            self._own_blocks[first + number] = np.frombuffer(
                block_content(prompt.block_hash(number)), dtype=np.uint8
            )
        return tuple(range(first, first + len(prompt.block_hashes) // 32))

    def check_blocks(self, held: HeldHit) -> None:
        hit, prompt, base = held.hit, held.prompt, held.user_client.space.base_address
        for number, block in enumerate(hit.blocks):
            wrong = self._reader.find_error(
                base + block * LAYOUT.block_bytes, prompt.block_hash(number)
            )
            if wrong:
                write_message(wrong=f"block {number}: {wrong}")
        if hit.partial_block is not None:
            block, tokens = hit.partial_block
            begun = prompt.block_tokens(len(hit.blocks))[:tokens]
            wrong = self._reader.find_prefix_error(base + block * LAYOUT.block_bytes, begun)
            if wrong:
                write_message(wrong=wrong)
        self.count_operation("blocks read", len(hit.blocks) + (hit.partial_block is not None))

    async def replace_client(self) -> None:
        """Close the client and open another one. Other tasks still read and release what they
        hold."""
        async with self._replacing:
            leaving = self._user_client
            await leaving.close()
            self._user_client = self._make_client()

    def choose_prompt(self, random: Random) -> PoolPrompt:
        """Choose a prompt; some are chosen more often than others."""
        return self._prompts[
            min(random.randrange(len(self._prompts)), random.randrange(len(self._prompts)))
        ]


class _PoolUserTask:
    """Makes one look-up after the other, and holds what it has found for a while."""

    def __init__(self, user: PoolUser, number: int, random: Random) -> None:
        self._user = user
        self._number = number
        self._random = random
        self._held: list[HeldHit] = []
        self._kept: list[HeldHit] = []  # through attachments that are over
        self._keep_for = 0  # operations

    async def run(self, over: asyncio.Event) -> None:
        names, weights = list(OPERATIONS), list(OPERATIONS.values())
        while not over.is_set():
            if not self._attached:
                self._check_all()
                await wait_until("attached", lambda: self._attached or over.is_set(), patience=60.0)
                continue
            (what,) = self._random.choices(names, weights)
            if not self._held and what in ("read", "release"):
                what = "look_up"
            await _ACTS[what](self)
            self._user.count_operation(what)
            self._keep_for -= 1
            if self._kept and self._keep_for <= 0:
                self._release_kept()
        self._release_kept()
        while self._held:
            self._release_one()

    @property
    def _attached(self) -> bool:
        """Return the present client of the user."""
        return self._user.user_client.client.is_attached

    async def look_up(self) -> None:
        membership, prompt = self._user.user_client, self._user.choose_prompt(self._random)
        found: asyncio.Future[PoolHit] = asyncio.get_running_loop().create_future()
        most = self._random.randrange(len(prompt.tokens) + 1)
        membership.client.find_prefix(
            UNSALTED_ROOT, prompt.block_hashes, prompt.packed_tokens, most, found.set_result
        )
        self._add_hit(membership, await found, prompt)

    async def publish(self) -> None:
        """Publish a whole prompt as prefill does, or its last blocks as decode does."""
        user = self._user
        membership, prompt = (
            user.user_client,
            user.choose_prompt(self._random).prefix(self._random.randrange(1, PROMPT_BLOCKS + 1)),
        )
        first = self._random.choice((0, 0, self._random.randrange(len(prompt.block_hashes) // 32)))
        sources = user.write_blocks(self._number, prompt)[first:]
        ended: asyncio.Future[PoolHit | None] = asyncio.get_running_loop().create_future()
        paced = self._random.random() < 0.5
        order = PublishRequest(
            UNSALTED_ROOT,
            prompt.block_hashes,
            prompt.packed_tokens,
            first,
            sources,
            ended.set_result,
            paced,
        )
        if membership.client.publish_blocks(order):
            hit = await ended
            self._user.count_operation("published" if hit is not None else "not published")
            if hit is not None:
                self._add_hit(membership, hit, prompt)

    async def spoil(self) -> None:
        """Publish with copies that fail, are corrupt or take long, maybe while another task
        publishes the same."""
        FAILPOINTS.arm(f"pool.copy.before={self._random.choice(COPY_FAULTS)}")
        try:
            await self.publish()
        finally:
            FAILPOINTS.arm("")

    async def read(self) -> None:
        self._user.check_blocks(self._random.choice(self._held))

    async def release(self) -> None:
        self._release_one()

    async def abandon(self) -> None:
        self._keep_held()
        self._user.user_client.break_stream()

    async def goodbye(self) -> None:
        self._keep_held()
        await self._user.replace_client()

    def _add_hit(self, membership: PoolUserClient, hit: PoolHit, prompt: PoolPrompt) -> None:
        if hit.pin is not None:
            self._user.count_operation("hits")
            self._held.append(HeldHit(membership, hit, prompt))
        while len(self._held) > MAX_HELD_HITS:
            self._release_one()

    def _release_one(self) -> None:
        """Release one of the blocks that are held, after checking it once more."""
        held = self._held.pop(self._random.randrange(len(self._held)))
        self._user.check_blocks(held)
        assert held.hit.pin is not None
        held.user_client.client.release_pin(held.hit.pin)

    def _keep_held(self) -> None:
        """Hold what was found until much more has been published."""
        self._kept += self._held
        self._held = []
        self._keep_for = self._random.randrange(*KEPT_OPERATIONS)

    def _release_kept(self) -> None:
        self._held, self._kept = self._held + self._kept, []
        while len(self._held) > MAX_HELD_HITS:
            self._release_one()

    def _check_all(self) -> None:
        for held in (*self._held, *self._kept):
            self._user.check_blocks(held)


OPERATIONS = {
    "look_up": 32,
    "read": 24,
    "release": 20,
    "publish": 20,
    "spoil": 2,
    "abandon": 1,
    "goodbye": 1,
}
_ACTS: dict[str, Callable[[_PoolUserTask], Awaitable[None]]] = {
    name: getattr(_PoolUserTask, name) for name in OPERATIONS
}


def write_message(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def _main(address: str, folder: str, name: str, seed: str) -> None:
    reader, over = asyncio.StreamReader(), asyncio.Event()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )

    async def end() -> None:
        await reader.read()
        over.set()

    ending = asyncio.create_task(end())
    await PoolUser(address, Path(folder), name, int(seed)).run(over)
    await ending


if __name__ == "__main__":
    log.configure_logging("error", "json")
    asyncio.run(_main(*sys.argv[1:]))

"""A user of a pool in a process of its own, to be killed and stopped at any moment: it looks up, reads, publishes and
lets go at random, and says what it has done and whatever is not as it should be, a JSON object a line.

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

from baton import log
from baton.addressing import AddressSpace
from baton.failpoints import FAILPOINTS
from baton.pool_terms import PoolHit, Publish
from baton.segment import create, segment_bytes
from kv_pool.client import PoolClient
from tests.pool.rig import LAYOUT, SALTLESS, client_config, until
from tests.soak.pool_prompts import BLOCKS, Prompt, Reader, content, every_prompt

TASKS = 3  # at once, in one process
HELD = 6  # hits that a task holds at most
KEPT = (20, 100)  # operations for which what was found through a former attachment is kept, least and most
SAY_EVERY = 16  # operations
SPOILED = ("corrupt*1", "error*1", "delay(0.005)*4", "delay(0.03)*1")  # what may happen to a copy on its way


class Membership:
    """One client, from its first dial to its goodbye. What it has found stays readable until it is released, also after
    the client has gone."""

    def __init__(self, address: str, folder: Path, name: str, own: memoryview) -> None:
        self.space = AddressSpace(LAYOUT.block_bytes, folder, range_bytes=1 << 28)
        self.client = PoolClient(client_config(address, folder, name, find_patience=0.05), self.space, own)
        self._running = asyncio.create_task(self.client.run())

    async def end(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def abandon(self) -> None:
        """As if its stream had broken."""
        line = self.client._line
        if line is not None:
            line.session.end("abandoned by the soak")

    @property
    def mapped(self) -> list[str]:
        """Pools' segments."""
        return [span.segment for span in self.space.map._spans]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    membership: Membership
    hit: PoolHit
    prompt: Prompt


class User:
    def __init__(self, address: str, folder: Path, name: str, seed: int) -> None:
        self._where = address, folder, name
        self._seed = seed
        own_blocks = TASKS * BLOCKS
        self._arena = create(folder, "arena", segment_bytes(own_blocks * LAYOUT.block_bytes, LAYOUT.block_bytes))
        self._own = np.frombuffer(self._arena.view, dtype=np.uint8).reshape(-1, LAYOUT.block_bytes)
        self._prompts = every_prompt()
        self._reader = Reader(self._prompts)
        self._membership = self._join()
        self._done: Counter[str] = Counter()
        self._moving = asyncio.Lock()

    def _join(self) -> Membership:
        return Membership(*self._where, self._arena.view)

    async def run(self, over: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(TASKS):
                tasks.create_task(_Task(self, number, Random(f"{self._seed}/{number}")).run(over))
        membership = self._membership
        mapped = len(membership.mapped)
        await membership.end()
        if mapped > 1 or membership.mapped:
            say(wrong=f"{mapped} segments were mapped at the end, {len(membership.mapped)} are after it")
        self._say()
        self._arena.close()
        say(over=True)

    @property
    def membership(self) -> Membership:
        return self._membership

    def did(self, what: str, count: int = 1) -> None:
        self._done[what] += count
        self._done["operations"] += count if what in OPERATIONS else 0
        if self._done["operations"] >= SAY_EVERY:
            self._say()

    def _say(self) -> None:
        if self._done:
            say(**self._done)
        self._done.clear()

    def write(self, task: int, prompt: Prompt) -> tuple[int, ...]:
        """What a model would, into the task's own blocks. Returns those."""
        first = task * BLOCKS
        for number in range(len(prompt.names) // 32):
            self._own[first + number] = np.frombuffer(content(prompt.name(number)), dtype=np.uint8)
        return tuple(range(first, first + len(prompt.names) // 32))

    def read(self, held: Held) -> None:
        hit, prompt, base = held.hit, held.prompt, held.membership.space.base
        for number, block in enumerate(hit.blocks):
            wrong = self._reader.wrong(base + block * LAYOUT.block_bytes, prompt.name(number))
            if wrong:
                say(wrong=f"block {number}: {wrong}")
        if hit.partial is not None:
            block, tokens = hit.partial
            begun = prompt.block(len(hit.blocks))[:tokens]
            wrong = self._reader.wrong_beginning(base + block * LAYOUT.block_bytes, begun)
            if wrong:
                say(wrong=wrong)
        self.did("blocks read", len(hit.blocks) + (hit.partial is not None))

    async def move(self) -> None:
        """Goodbye, and another client in its place. What other tasks still hold, they read and release all the same."""
        async with self._moving:
            leaving = self._membership
            await leaving.end()
            self._membership = self._join()

    def prompt(self, random: Random) -> Prompt:
        """Some are asked for more often than others."""
        return self._prompts[min(random.randrange(len(self._prompts)), random.randrange(len(self._prompts)))]


class _Task:
    """Asks for one thing after the other, and holds what it has found for a while."""

    def __init__(self, user: User, number: int, random: Random) -> None:
        self._user = user
        self._number = number
        self._random = random
        self._held: list[Held] = []
        self._kept: list[Held] = []  # through attachments that are over
        self._keep_for = 0  # operations

    async def run(self, over: asyncio.Event) -> None:
        names, weights = list(OPERATIONS), list(OPERATIONS.values())
        while not over.is_set():
            if not self._attached:
                self._read_all()
                await until("attached", lambda: self._attached or over.is_set(), patience=60.0)
                continue
            (what,) = self._random.choices(names, weights)
            if not self._held and what in ("read", "release"):
                what = "look_up"
            await _ACTS[what](self)
            self._user.did(what)
            self._keep_for -= 1
            if self._kept and self._keep_for <= 0:
                self._let_go_of_kept()
        self._let_go_of_kept()
        while self._held:
            self._let_go()

    @property
    def _attached(self) -> bool:
        """Whoever is the user's client now."""
        return self._user.membership.client.attached

    async def look_up(self) -> None:
        membership, prompt = self._user.membership, self._user.prompt(self._random)
        found: asyncio.Future[PoolHit] = asyncio.get_running_loop().create_future()
        most = self._random.randrange(len(prompt.tokens) + 1)
        membership.client.find(SALTLESS, prompt.names, prompt.packed, most, found.set_result)
        self._hold(membership, await found, prompt)

    async def publish(self) -> None:
        """All of a prompt as prefill does, or its last blocks as decode does."""
        user = self._user
        membership, prompt = user.membership, user.prompt(self._random).upto(self._random.randrange(1, BLOCKS + 1))
        first = self._random.choice((0, 0, self._random.randrange(len(prompt.names) // 32)))
        sources = user.write(self._number, prompt)[first:]
        ended: asyncio.Future[PoolHit | None] = asyncio.get_running_loop().create_future()
        paced = self._random.random() < 0.5
        order = Publish(SALTLESS, prompt.names, prompt.packed, first, sources, ended.set_result, paced)
        if membership.client.publish(order):
            hit = await ended
            self._user.did("published" if hit is not None else "not published")
            if hit is not None:
                self._hold(membership, hit, prompt)

    async def spoil(self) -> None:
        """A publication some of whose copies fail, go wrong or take long; another task's may meet with it instead."""
        FAILPOINTS.arm(f"pool.copy.before={self._random.choice(SPOILED)}")
        try:
            await self.publish()
        finally:
            FAILPOINTS.arm("")

    async def read(self) -> None:
        self._user.read(self._random.choice(self._held))

    async def release(self) -> None:
        self._let_go()

    async def abandon(self) -> None:
        self._keep()
        self._user.membership.abandon()

    async def goodbye(self) -> None:
        self._keep()
        await self._user.move()

    def _hold(self, membership: Membership, hit: PoolHit, prompt: Prompt) -> None:
        if hit.pin is not None:
            self._user.did("hits")
            self._held.append(Held(membership, hit, prompt))
        while len(self._held) > HELD:
            self._let_go()

    def _let_go(self) -> None:
        """Of any, after a last look."""
        held = self._held.pop(self._random.randrange(len(self._held)))
        self._user.read(held)
        assert held.hit.pin is not None
        held.membership.client.release(held.hit.pin)

    def _keep(self) -> None:
        """Until much has been published since."""
        self._kept += self._held
        self._held = []
        self._keep_for = self._random.randrange(*KEPT)

    def _let_go_of_kept(self) -> None:
        self._held, self._kept = self._held + self._kept, []
        while len(self._held) > HELD:
            self._let_go()

    def _read_all(self) -> None:
        for held in (*self._held, *self._kept):
            self._user.read(held)


OPERATIONS = {"look_up": 32, "read": 24, "release": 20, "publish": 20, "spoil": 2, "abandon": 1, "goodbye": 1}
_ACTS: dict[str, Callable[[_Task], Awaitable[None]]] = {name: getattr(_Task, name) for name in OPERATIONS}


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def _main(address: str, folder: str, name: str, seed: str) -> None:
    reader, over = asyncio.StreamReader(), asyncio.Event()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def end() -> None:
        await reader.read()
        over.set()

    ending = asyncio.create_task(end())
    await User(address, Path(folder), name, int(seed)).run(over)
    await ending


if __name__ == "__main__":
    log.configure("error", "json")
    asyncio.run(_main(*sys.argv[1:]))

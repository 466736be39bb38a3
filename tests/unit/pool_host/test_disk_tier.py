"""The disk behind a pool's memory, in one process: what goes there comes back, and what is wrong is never served."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton import clock
from baton.block_hash import BlockHash, root_hash
from baton.failpoints import FAILPOINTS
from kv_pool.core.chain import Chain
from kv_pool.core.ledger import PoolState
from kv_pool.core.policies import POLICIES
from kv_pool.disk_file import HEADER_BYTES, NAME, DiskFile
from kv_pool.disk_mount import DiskTerms
from kv_pool.host import Applicant, Desk, PoolHost, Question
from kv_pool.terms import PROTOCOL_VERSION
from tests.pool.rig import DIGEST, LAYOUT, SALTLESS, content, until

pytestmark = pytest.mark.asyncio

SIZE = LAYOUT.block_size
SLOTS = 96
USED = "baton_pool_disk_slots_used"


class Rig:
    def __init__(self, host: PoolHost, desk: Desk) -> None:
        self.host, self.desk = host, desk
        self.seeds = iter(range(1000, 100000))

    @property
    def writing(self) -> int:
        """Slots."""
        ledger = self.host.disk_ledger()
        return ledger.counts[PoolState.WRITING] if ledger else 0

    def count(self, name: str) -> float:
        return self.host.all_counters().get(name, 0.0)

    async def publish(self, tokens: Sequence[int], root: BlockHash = SALTLESS) -> None:
        chain = Chain.of(root, tokens, SIZE)
        granted, room_made = self.host.reserve(self.desk, chain, 0)
        if room_made is not None:
            await room_made
        if granted.publication is None:
            return
        rows, sums = self.host._it.store.rows, []
        for number, block in enumerate(granted.blocks, granted.first):
            rows.row(block)[:] = memoryview(content(tokens[: (number + 1) * SIZE]))
            sums.append(rows.checksum(block))
        found = await self.host.seal(self.desk, granted.publication, sums)
        self.release(found.pin)

    def release(self, pin: int | None) -> None:
        if pin is not None:
            self.host.release(self.desk, [pin])

    async def find(
        self, tokens: Sequence[int], root: BlockHash = SALTLESS, token_seconds: float | None = None
    ) -> tuple[int, int]:
        """Blocks that are there at first, and in the end; all of them hold what they should."""
        asked = Question(Chain.of(root, tokens, SIZE), len(tokens), False, token_seconds)
        found, arrival = self.host.find(self.desk, asked)
        first = len(found.blocks)
        if arrival is not None:
            self.release(found.pin)
            found = await self.host.find_more(self.desk, asked, arrival, first)
        for number, block in enumerate(found.blocks, 1):
            assert bytes(self.host._it.store.rows.row(block)) == content(tokens[: number * SIZE]).tobytes()
        self.release(found.pin)
        return first, len(found.blocks)

    async def push_out(self) -> None:
        """All that was in memory."""
        for _ in range(4):
            tokens = tokens_of(next(self.seeds), 128)
            await self.publish(tokens)

    async def on_disk(self, *prompts: Sequence[int]) -> None:
        """Publish, hit, evict and write them."""
        for prompt in prompts:
            await self.publish(prompt)
            await self.find(prompt)
        await self.push_out()
        await until("written", lambda: not self.writing)


def tokens_of(seed: int, blocks: int) -> tuple[int, ...]:
    return tuple(seed * 1000 + number for number in range(blocks * SIZE))


@asynccontextmanager
async def rig(folder: Path, *, ready: bool = True, slots: int = SLOTS) -> AsyncIterator[Rig]:
    """Memory of 512 blocks, which evicts the least recently used."""
    segments = folder / "segments"
    segments.mkdir(exist_ok=True)
    terms = DiskTerms(folder / "disk", HEADER_BYTES + slots * LAYOUT.block_bytes)
    host = PoolHost(segments, 2 << 20, POLICIES["lru"], clock.steady, disk=terms)
    try:
        desk = await host.attach(Applicant(PROTOCOL_VERSION, "node", "1", host.host_id, DIGEST.hex(), LAYOUT))
        assert len(host._it.store.rows) == 512
        await host._it.disk._opening  # type: ignore[union-attr]
        assert bool(host.disk_ledger()) == ready
        made = Rig(host, desk)
        yield made
        ledger = host.disk_ledger()
        assert ledger is None or ledger.balanced
        host.pool.check()
    finally:
        FAILPOINTS.arm("")
        await host.close()


async def test_what_was_hit_goes_there_and_comes_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        tokens = tokens_of(1, 40)
        await it.on_disk(tokens)
        assert it.count(USED) == 40
        assert it.count("baton_pool_disk_written_bytes_total") == 40 * LAYOUT.block_bytes
        assert await it.find(tokens) == (0, 40)
        assert await it.find(tokens) == (40, 40)
        assert it.count('baton_pool_found_blocks_total{tier="disk"}') == 40
        assert it.count("baton_pool_loads_total") == 1
        await it.push_out()
        assert it.count("baton_pool_disk_written_bytes_total") == 40 * LAYOUT.block_bytes, "it is there already"


async def test_it_survives_a_restart(tmp_path: Path) -> None:
    prompts = [tokens_of(number, 30) for number in (1, 2)]
    async with rig(tmp_path) as it:
        await it.on_disk(*prompts)
    async with rig(tmp_path) as it:
        assert it.count(USED) == 60
        for prompt in prompts:
            assert await it.find(prompt) == (0, 30)


async def test_tenants_share_nothing_there(tmp_path: Path) -> None:
    tokens = tokens_of(1, 20)
    salted = root_hash(DIGEST, LAYOUT, b"another tenant")
    async with rig(tmp_path) as it:
        await it.on_disk(tokens)
        assert await it.find(tokens, salted) == (0, 0)
    async with rig(tmp_path) as it:
        assert await it.find(tokens, salted) == (0, 0)
        assert await it.find(tokens) == (0, 20)


async def test_a_full_disk_drops_its_own_leaves(tmp_path: Path) -> None:
    async with rig(tmp_path, slots=50) as it:
        old, new = tokens_of(1, 40), tokens_of(2, 40)
        await it.on_disk(old)
        await it.on_disk(new)
        assert it.count(USED) == 50
        assert it.count('baton_pool_evictions_total{tier="disk"}') == 30
        assert await it.find(new) == (0, 40)
        assert await it.find(old) == (0, 10)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_flipped_bit_anywhere_is_never_served(tmp_path: Path, restarted: bool) -> None:
    """`find` compares every block with what it should hold. A damaged one is dropped with all behind it, and what is
    published again is good again."""
    tokens = tokens_of(1, 12)
    path = tmp_path / "disk" / NAME
    if restarted:
        async with rig(tmp_path) as it:
            await it.on_disk(tokens)
    async with rig(tmp_path) as it:
        if not restarted:
            await it.on_disk(tokens)
        for place in (11, 7, 3, 0):
            fd = os.open(path, os.O_RDWR)
            at = HEADER_BYTES + place * LAYOUT.block_bytes + 37 * place
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
            os.close(fd)
            _, came = await it.find(tokens)
            assert came == place
            assert it.count(USED) == place
            await it.push_out()
        assert it.count("baton_pool_disk_bad_blocks_total") == 4
        assert it.count("baton_pool_load_failures_total") == 4
        await it.on_disk(tokens)
        assert await it.find(tokens) == (0, 12)


async def test_what_is_damaged_on_its_way_there_does_not_come_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        FAILPOINTS.arm("pool.disk.write=corrupt+5*1")
        tokens = tokens_of(1, 12)
        await it.on_disk(tokens)
        assert await it.find(tokens) == (0, 5)


async def test_a_file_that_is_cut_off_costs_what_was_in_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        tokens = tokens_of(1, 12)
        await it.on_disk(tokens)
        os.truncate(tmp_path / "disk" / NAME, HEADER_BYTES + 6 * LAYOUT.block_bytes + 1)
        assert await it.find(tokens) == (0, 6)


@pytest.mark.parametrize("point", ["pool.disk.write", "pool.disk.read"])
async def test_a_disk_that_fails_is_used_no_more_and_said_once(
    tmp_path: Path, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rig(tmp_path) as it:
        tokens = tokens_of(1, 12)
        if point.endswith("read"):
            await it.on_disk(tokens)
        FAILPOINTS.arm(f"{point}=error")
        if point.endswith("write"):
            await it.on_disk(tokens)
        assert await it.find(tokens) == (0, 0)
        await until("off", lambda: it.host.disk_ledger() is None)
        for number in range(3):
            await it.publish(tokens_of(number, 12))
            assert await it.find(tokens_of(number, 12)) == (12, 12)
        await it.push_out()
        told = capsys.readouterr()
        assert (told.out + told.err).count("the disk has failed") == 1
    async with rig(tmp_path) as it:
        assert it.host.disk_ledger() is not None, "a restart tries again"


async def test_a_disk_that_is_behind_costs_admissions_and_no_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(DiskFile, "write", lambda *_: go.wait())
    async with rig(tmp_path, slots=2048) as it:
        for number in range(3):
            prompt = tokens_of(number, 400)
            async with asyncio.timeout(30):
                await it.publish(prompt)
                assert await it.find(prompt) == (400, 400)
        await it.push_out()
        assert it.count("baton_pool_disk_dropped_blocks_total") > 0
        ledger = it.host.disk_ledger()
        assert ledger is not None
        assert [(one.holder, one.state.value) for one in ledger.entries] == [("disk", "writing")]
        go.set()


async def test_what_is_computed_sooner_is_not_loaded(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        tokens = tokens_of(1, 12)
        await it.on_disk(tokens)
        FAILPOINTS.arm("pool.disk.read=delay(0.005)")
        assert await it.find(tokens) == (0, 12), "nothing is known of the disk yet"
        await it.push_out()
        assert await it.find(tokens, token_seconds=1e-6) == (0, 0)
        assert it.count("baton_pool_loads_declined_total") == 1
        assert await it.find(tokens, token_seconds=10.0) == (0, 12)


async def test_a_disk_that_cannot_be_had_is_a_pool_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with rig(tmp_path, ready=False, slots=0) as it:
        await it.publish(tokens_of(1, 5))
        assert await it.find(tokens_of(1, 5)) == (5, 5)
    told = capsys.readouterr()
    assert (told.out + told.err).count("the pool has no disk") == 1

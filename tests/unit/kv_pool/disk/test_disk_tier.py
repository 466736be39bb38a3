"""The disk behind a pool's memory, in one process: what goes there comes back, and what is wrong is
never served."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.kv.blocks import BlockHash, root_hash
from baton.process import clock
from baton.process.failpoints import FAILPOINTS
from kv_pool.common.protocol import POOL_PROTOCOL_VERSION
from kv_pool.core.eviction.policies import EVICTION_POLICIES
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.core.ledger import PoolBlockState
from kv_pool.disk.data_file import DISK_FILE_NAME, HEADER_BYTES, DiskFile
from kv_pool.disk.mount import DiskSettings
from kv_pool.service.open_pool import AttachRequest, PrefixQuery
from kv_pool.service.pool_manager import PoolClientSession, PoolManager
from tests.pool.harness import DIGEST, LAYOUT, UNSALTED_ROOT, make_block_content, wait_until

pytestmark = pytest.mark.asyncio

SIZE = LAYOUT.block_size
SLOTS = 96
USED_SLOTS_METRIC = "baton_pool_disk_slots_used"


class DiskTierRig:
    def __init__(self, host: PoolManager, session: PoolClientSession) -> None:
        self.manager, self.session = host, session
        self.seeds = iter(range(1000, 100000))

    @property
    def num_writing(self) -> int:
        """Slots."""
        ledger = self.manager.open_pool.disk_ledger()
        return ledger.counts[PoolBlockState.WRITING] if ledger else 0

    def read_counter(self, name: str) -> float:
        return self.manager.open_pool.collect_counters().get(name, 0.0)

    async def publish_tokens(self, tokens: Sequence[int], root: BlockHash = UNSALTED_ROOT) -> None:
        chain = PromptChain.from_tokens(root, tokens, SIZE)
        granted, room_made = self.session.reserve_blocks(chain, 0)
        if room_made is not None:
            await room_made
        if granted.publication_id is None:
            return
        rows, sums = self.manager.open_pool.store.rows, []
        for number, block in enumerate(granted.blocks, granted.first_block):
            rows.row(block)[:] = memoryview(make_block_content(tokens[: (number + 1) * SIZE]).data)
            sums.append(rows.checksum(block))
        found = await self.session.seal_publication(granted.publication_id, sums)
        self.release_pin(found.pin_id)

    def release_pin(self, pin: int | None) -> None:
        if pin is not None:
            self.session.release_pins([pin])

    async def find_blocks(
        self,
        tokens: Sequence[int],
        root: BlockHash = UNSALTED_ROOT,
        token_seconds: float | None = None,
    ) -> tuple[int, int]:
        """Blocks that are there at first, and in the end; all of them hold what they should."""
        query = PrefixQuery(
            PromptChain.from_tokens(root, tokens, SIZE), len(tokens), False, token_seconds
        )
        found, pending = self.session.find_prefix(query)
        first = len(found.blocks)
        if pending is not None:
            self.release_pin(found.pin_id)
            found = await self.session.wait_for_more(query, pending, first)
        for number, block in enumerate(found.blocks, 1):
            assert (
                bytes(self.manager.open_pool.store.rows.row(block))
                == make_block_content(tokens[: number * SIZE]).tobytes()
            )
        self.release_pin(found.pin_id)
        return first, len(found.blocks)

    async def evict_all(self) -> None:
        """All that was in memory."""
        for _ in range(4):
            tokens = make_tokens(next(self.seeds), 128)
            await self.publish_tokens(tokens)

    async def publish_to_disk(self, *prompts: Sequence[int]) -> None:
        """Publish, hit, evict and write them."""
        for prompt in prompts:
            await self.publish_tokens(prompt)
            await self.find_blocks(prompt)
        await self.evict_all()
        await wait_until("written", lambda: not self.num_writing)


def make_tokens(seed: int, blocks: int) -> tuple[int, ...]:
    return tuple(seed * 1000 + number for number in range(blocks * SIZE))


@asynccontextmanager
async def open_rig(
    folder: Path, *, ready: bool = True, slots: int = SLOTS
) -> AsyncIterator[DiskTierRig]:
    """Memory of 512 blocks, which evicts the least recently used."""
    segments = folder / "segments"
    segments.mkdir(exist_ok=True)
    terms = DiskSettings(
        folder=folder / "disk", size_bytes=HEADER_BYTES + slots * LAYOUT.block_bytes
    )
    host = PoolManager(
        segments, 2 << 20, EVICTION_POLICIES["lru"], clock.monotonic_clock, disk_settings=terms
    )
    try:
        session = await host.attach_client(
            AttachRequest(POOL_PROTOCOL_VERSION, "node", "1", host.host_id, DIGEST.hex(), LAYOUT)
        )
        assert len(host.open_pool.store.rows) == 512
        await host.open_pool.disk._opening  # type: ignore[union-attr]
        assert bool(host.open_pool.disk_ledger()) == ready
        rig = DiskTierRig(host, session)
        yield rig
        ledger = host.open_pool.disk_ledger()
        assert ledger is None or ledger.is_balanced
        host.open_pool.block_pool.check()
    finally:
        FAILPOINTS.arm("")
        await host.close()


async def test_hit_blocks_are_demoted_and_loaded_back(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = make_tokens(1, 40)
        await rig.publish_to_disk(tokens)
        assert rig.read_counter(USED_SLOTS_METRIC) == 40
        assert rig.read_counter("baton_pool_disk_written_bytes_total") == 40 * LAYOUT.block_bytes
        assert await rig.find_blocks(tokens) == (0, 40)
        assert await rig.find_blocks(tokens) == (40, 40)
        assert rig.read_counter('baton_pool_found_blocks_total{tier="disk"}') == 40
        assert rig.read_counter("baton_pool_loads_total") == 1
        await rig.evict_all()
        assert rig.read_counter("baton_pool_disk_written_bytes_total") == 40 * LAYOUT.block_bytes, (
            "it is there already"
        )


async def test_disk_contents_survive_a_restart(tmp_path: Path) -> None:
    prompts = [make_tokens(number, 30) for number in (1, 2)]
    async with open_rig(tmp_path) as rig:
        await rig.publish_to_disk(*prompts)
    async with open_rig(tmp_path) as rig:
        assert rig.read_counter(USED_SLOTS_METRIC) == 60
        for prompt in prompts:
            assert await rig.find_blocks(prompt) == (0, 30)


async def test_tenants_share_nothing_on_disk(tmp_path: Path) -> None:
    tokens = make_tokens(1, 20)
    salted = root_hash(DIGEST, LAYOUT, b"another tenant")
    async with open_rig(tmp_path) as rig:
        await rig.publish_to_disk(tokens)
        assert await rig.find_blocks(tokens, salted) == (0, 0)
    async with open_rig(tmp_path) as rig:
        assert await rig.find_blocks(tokens, salted) == (0, 0)
        assert await rig.find_blocks(tokens) == (0, 20)


async def test_full_disk_evicts_its_own_leaves(tmp_path: Path) -> None:
    async with open_rig(tmp_path, slots=50) as rig:
        old, new = make_tokens(1, 40), make_tokens(2, 40)
        await rig.publish_to_disk(old)
        await rig.publish_to_disk(new)
        assert rig.read_counter(USED_SLOTS_METRIC) == 50
        assert rig.read_counter('baton_pool_evictions_total{tier="disk"}') == 30
        assert await rig.find_blocks(new) == (0, 40)
        assert await rig.find_blocks(old) == (0, 10)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_flipped_bit_anywhere_is_never_served(tmp_path: Path, restarted: bool) -> None:
    """`find` compares every block with what it should hold. A damaged one is dropped with all
    behind it, and what is published again is good again."""
    tokens = make_tokens(1, 12)
    path = tmp_path / "disk" / DISK_FILE_NAME
    if restarted:
        async with open_rig(tmp_path) as rig:
            await rig.publish_to_disk(tokens)
    async with open_rig(tmp_path) as rig:
        if not restarted:
            await rig.publish_to_disk(tokens)
        for place in (11, 7, 3, 0):
            fd = os.open(path, os.O_RDWR)
            at = HEADER_BYTES + place * LAYOUT.block_bytes + 37 * place
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
            os.close(fd)
            _, loaded_blocks = await rig.find_blocks(tokens)
            assert loaded_blocks == place
            assert rig.read_counter(USED_SLOTS_METRIC) == place
            await rig.evict_all()
        assert rig.read_counter("baton_pool_disk_bad_blocks_total") == 4
        assert rig.read_counter("baton_pool_load_failures_total") == 4
        await rig.publish_to_disk(tokens)
        assert await rig.find_blocks(tokens) == (0, 12)


async def test_block_damaged_while_written_is_not_served(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        FAILPOINTS.arm("pool.disk.write=corrupt+5*1")
        tokens = make_tokens(1, 12)
        await rig.publish_to_disk(tokens)
        assert await rig.find_blocks(tokens) == (0, 5)


async def test_truncated_file_loses_only_its_tail(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = make_tokens(1, 12)
        await rig.publish_to_disk(tokens)
        os.truncate(tmp_path / "disk" / DISK_FILE_NAME, HEADER_BYTES + 6 * LAYOUT.block_bytes + 1)
        assert await rig.find_blocks(tokens) == (0, 6)


@pytest.mark.parametrize("point", ["pool.disk.write", "pool.disk.read"])
async def test_failed_disk_is_disabled_and_logged_once(
    tmp_path: Path, point: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = make_tokens(1, 12)
        if point.endswith("read"):
            await rig.publish_to_disk(tokens)
        FAILPOINTS.arm(f"{point}=error")
        if point.endswith("write"):
            await rig.publish_to_disk(tokens)
        assert await rig.find_blocks(tokens) == (0, 0)
        await wait_until("off", lambda: rig.manager.open_pool.disk_ledger() is None)
        for number in range(3):
            await rig.publish_tokens(make_tokens(number, 12))
            assert await rig.find_blocks(make_tokens(number, 12)) == (12, 12)
        await rig.evict_all()
        printed = capfd.readouterr()
        assert (printed.out + printed.err).count("disk tier failed") == 1
    async with open_rig(tmp_path) as rig:
        assert rig.manager.open_pool.disk_ledger() is not None, "a restart tries again"


async def test_slow_disk_drops_demotions_without_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(DiskFile, "write_slot", lambda *_: go.wait())
    async with open_rig(tmp_path, slots=2048) as rig:
        for number in range(3):
            prompt = make_tokens(number, 400)
            async with asyncio.timeout(30):
                await rig.publish_tokens(prompt)
                assert await rig.find_blocks(prompt) == (400, 400)
        await rig.evict_all()
        assert rig.read_counter("baton_pool_disk_dropped_blocks_total") > 0
        ledger = rig.manager.open_pool.disk_ledger()
        assert ledger is not None
        assert [(entry.owner, entry.state.value) for entry in ledger.entries] == [
            ("disk", "writing")
        ]
        go.set()


async def test_load_slower_than_recompute_is_declined(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = make_tokens(1, 12)
        await rig.publish_to_disk(tokens)
        FAILPOINTS.arm("pool.disk.read=delay(0.005)")
        assert await rig.find_blocks(tokens) == (0, 12), "nothing is known of the disk yet"
        await rig.evict_all()
        assert await rig.find_blocks(tokens, token_seconds=1e-6) == (0, 0)
        assert rig.read_counter("baton_pool_loads_declined_total") == 1
        assert await rig.find_blocks(tokens, token_seconds=10.0) == (0, 12)


async def test_pool_runs_without_an_unusable_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with open_rig(tmp_path, ready=False, slots=0) as rig:
        await rig.publish_tokens(make_tokens(1, 5))
        assert await rig.find_blocks(make_tokens(1, 5)) == (5, 5)
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("disk tier not mounted") == 1

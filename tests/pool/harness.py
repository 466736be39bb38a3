"""A pool process and clients of it: some in the test's process, some in processes to be killed."""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from baton.kv.blocks import BlockHash, KVLayout, compute_packed_hashes, pack_tokens, root_hash
from baton.kv.pool_types import PoolHit, PublishRequest
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.segment import (
    Segment,
    compute_host_id,
    create_segment,
    round_up_segment_bytes,
)
from kv_pool.client.pool_client import PoolClient
from kv_pool.common.protocol import PoolClientConfig
from tests.fork_server import ForkedProcess, start_process

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=2, head_dim=32, block_size=4, dtype="float32"
)  # 4 KiB a block
DIGEST = b"\1" * 32
CLUSTER_TOKEN = "a cluster's secret"
UNSALTED_ROOT = root_hash(DIGEST, LAYOUT, b"")
OWN_BLOCKS = 512
TIMEOUT_SECONDS = 60.0


class PoolProcess:
    """`python -m kv_pool`, started, killed and started again at the same port."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._port_holder.getsockname()[1]}"
        self.folder = folder
        self._settings = {
            "pool_memory": "2MiB",
            "log_level": "info",
            "log_format": "json",
        } | settings
        self._process: ForkedProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._port_holder.close()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            assert self._process.wait(TIMEOUT_SECONDS) == 0

    def start(self, **environ: str) -> None:
        settings = self._settings | {
            "listen": self.address,
            "segment_dir": self.folder,
            "cluster_token": CLUSTER_TOKEN,
            "health_port": -1,
        }
        variables = {f"BATON_{name.upper()}": str(value) for name, value in settings.items()}
        self._process = start_process(
            "kv_pool", {**os.environ, **variables, **environ}, sys.stdout.fileno()
        )

    @property
    def process(self) -> ForkedProcess:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def make_tokens(seed: int, blocks: int, *, extra: int = 0) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(0, 32000, blocks * LAYOUT.block_size + extra))


@dataclass
class PoolNode:
    """A node's pool client with an arena."""

    client: PoolClient
    space: BlockAddressSpace
    arena: Segment
    memory: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"

    def fill_blocks(self, tokens: Sequence[int], first: int = 0) -> tuple[int, ...]:
        """Write the content of these tokens' full blocks to own blocks from `first` on."""
        blocks = []
        for number in range(len(tokens) // LAYOUT.block_size):
            self.memory[first + number] = make_block_content(
                tokens[: (number + 1) * LAYOUT.block_size]
            )
            blocks.append(first + number)
        return tuple(blocks)

    async def find_prefix(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        root: BlockHash = UNSALTED_ROOT,
        **more: Any,
    ) -> PoolHit:
        packed = pack_tokens(tokens)
        found: asyncio.Future[PoolHit] = asyncio.get_running_loop().create_future()
        names = compute_packed_hashes(root, packed, LAYOUT.block_size)
        self.client.find_prefix(
            root,
            names,
            packed,
            len(tokens) if max_tokens is None else max_tokens,
            found.set_result,
            **more,
        )
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await found

    def make_publish_request(
        self,
        tokens: Sequence[int],
        sources: Sequence[int],
        then: Callable[[PoolHit | None], None],
        **more: Any,
    ) -> PublishRequest:
        root: BlockHash = more.pop("root", UNSALTED_ROOT)
        packed = pack_tokens(tokens[: len(tokens) // LAYOUT.block_size * LAYOUT.block_size])
        names = compute_packed_hashes(root, packed, LAYOUT.block_size)
        first = len(packed) // 4 // LAYOUT.block_size - len(sources)
        return PublishRequest(root, names, packed, first, tuple(sources), then, **more)

    async def publish_tokens(
        self, tokens: Sequence[int], *, own: int = 0, first: int = 0, **more: Any
    ) -> PoolHit | None:
        """Publish the chain's blocks from `first` on, out of the own blocks from `own` on."""
        sources = self.fill_blocks(tokens, own)[first:]
        ended: asyncio.Future[PoolHit | None] = asyncio.get_running_loop().create_future()
        assert self.client.publish_blocks(
            self.make_publish_request(tokens, sources, ended.set_result, **more)
        )
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await ended

    def read_blocks(self, hit: PoolHit) -> list[bytes]:
        """Return the content of the blocks of a hit."""
        size = LAYOUT.block_bytes
        return [
            ctypes.string_at(self.space.base_address + block * size, size) for block in hit.blocks
        ]

    def release_hit(self, hit: PoolHit) -> None:
        if hit.pin is not None:
            self.client.release_pin(hit.pin)

    async def wait_until_attached(self) -> None:
        await wait_until("attached", lambda: self.client.is_attached)


def make_block_content(prefix: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return the content of the block that these tokens end with."""
    seed = np.frombuffer(pack_tokens(prefix), dtype=np.uint32)
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)


def expected_blocks(tokens: Sequence[int]) -> list[bytes]:
    size = LAYOUT.block_size
    return [
        make_block_content(tokens[: end * size]).tobytes()
        for end in range(1, len(tokens) // size + 1)
    ]


async def wait_until(
    what: str, holds: Callable[[], Any], patience: float = TIMEOUT_SECONDS
) -> None:
    async with asyncio.timeout(patience):
        while not holds():
            await asyncio.sleep(0.01)
    assert holds(), what


def client_config(address: str, folder: Path, name: str, **changed: Any) -> PoolClientConfig:
    settings: dict[str, Any] = {
        "address": address,
        "token": CLUSTER_TOKEN,
        "node": name,
        "host_id": compute_host_id(folder),
        "model_digest": DIGEST.hex(),
        "layout": LAYOUT,
        "segment_folder": folder,
        "lookup_timeout_seconds": 10.0,  # so that a miss is the pool's answer, not a time-out
    }
    return PoolClientConfig(**{**settings, **changed})


@asynccontextmanager
async def run_pool_node(
    address: str, folder: Path, name: str = "decode-0", **changed: Any
) -> AsyncIterator[PoolNode]:
    """Run a node's client; it may not be attached yet."""
    arena = create_segment(
        folder, "arena", round_up_segment_bytes(OWN_BLOCKS * LAYOUT.block_bytes, LAYOUT.block_bytes)
    )
    space = BlockAddressSpace(LAYOUT.block_bytes, folder, range_bytes=1 << 30)
    client = PoolClient(client_config(address, folder, name, **changed), space, arena.view)
    memory = np.frombuffer(arena.view, dtype=np.uint8).reshape(-1, LAYOUT.block_bytes)
    running = asyncio.create_task(client.run())
    try:
        yield PoolNode(client, space, arena, memory)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        del memory
        arena.close()

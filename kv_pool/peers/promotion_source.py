"""Promotion: what this pool lacks and another host's has is fetched from there, if that is quicker
than computing.

Whoever waits does so for as long as computing would take. A fetch that takes longer goes on, and as
long as it does its pool is asked for nothing else: if it does not answer, only those who were first
wait for it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from baton.errors import BatonError, IncompleteTransfer
from baton.kv.kv_layout import KVLayout
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS
from baton.types import PeerAddress
from kv_pool.common.protocol import REMOTE_TIER
from kv_pool.core.blocks.attachments import Publication
from kv_pool.core.peers.fetch_estimator import PeerFetchEstimator
from kv_pool.memory.block_loader import LoadPlan, LoadRequest


class PeerFetcher(Protocol):
    @property
    def is_joined(self) -> bool: ...

    async def fetch_blocks(self, peer: PeerAddress, written: Publication) -> None: ...


class PromotionSource:
    """One of the sources that `BlockLoader` asks. `checksums` are those of blocks of the
    segment."""

    def __init__(
        self,
        receiver: PeerFetcher,
        layout: KVLayout,
        checksums: Callable[[Sequence[int]], Awaitable[Sequence[int]]],
        clock: Clock,
    ) -> None:
        self.counters: dict[str, float] = {}
        self._receiver = receiver
        self._layout = layout
        self._checksums = checksums
        self._clock = clock
        self._fetch_estimator = PeerFetchEstimator()
        self._in_flight: list[
            tuple[PeerAddress, float]
        ] = []  # from whom, and until when it is waited for

    def plan_load(self, wanted: LoadRequest, now: float) -> LoadPlan | None:
        there = wanted.remote_prefix
        if there is None or not self._receiver.is_joined:
            return None
        end = min(wanted.end_block, there.prefix_tokens // self._layout.block_size)
        blocks = end - wanted.first_block
        if blocks <= 0:
            return None
        # The coordinator's figure is of the node that would compute, which need not be the one that
        # asks.
        token_seconds = there.compute_seconds_per_token or wanted.compute_seconds_per_token or 0.0
        patience = token_seconds * blocks * self._layout.block_size
        if self._fetch_estimator.is_backing_off(there.pool, now) or self._is_late(there.pool, now):
            self._count_declined("resting")
        elif (
            self._fetch_estimator.predict_fetch_seconds(
                there.pool, blocks * self._layout.block_bytes
            )
            >= patience
        ):
            self._count_declined("slower")
        else:
            return LoadPlan(
                REMOTE_TIER,
                end,
                patience,
                lambda written: self._fetch(there.pool, written, now + patience),
            )
        return None

    def _is_late(self, peer: PeerAddress, now: float) -> bool:
        return any(whom == peer and now >= until for whom, until in self._in_flight)

    async def _fetch(self, peer: PeerAddress, written: Publication, until: float) -> Sequence[int]:
        started, size = self._clock(), len(written.blocks) * self._layout.block_bytes
        self._count("baton_pool_promotions_started_total")
        self._in_flight.append((peer, until))
        try:
            FAILPOINTS.hit("pool.promote.before")
            await self._receiver.fetch_blocks(peer, written)
        except BatonError as error:
            self._count(f'baton_pool_promotions_failed_total{{reason="{error.code}"}}')
            if not isinstance(error, IncompleteTransfer):  # then it has it no more, and that is all
                self._fetch_estimator.record_failure(peer, self._clock())
            raise
        finally:
            self._in_flight.remove((peer, until))
        self._fetch_estimator.record_fetch(peer, size, self._clock() - started)
        self._count("baton_pool_promotions_done_total")
        self._count("baton_pool_promoted_blocks_total", len(written.blocks))
        self._count("baton_pool_promoted_bytes_total", size)
        return await self._checksums(written.blocks)

    def _count_declined(self, why: str) -> None:
        self._count(f'baton_pool_promotions_declined_total{{reason="{why}"}}')

    def _count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

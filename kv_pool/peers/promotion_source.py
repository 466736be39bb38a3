"""Promotion: fetch missing blocks from another host's pool, if that is faster than computing them.

A look-up waits as long as computing the blocks would take. A fetch that takes longer goes on, but
until it ends no more blocks are requested from that pool: if the pool does not answer, it delays
only the look-ups that started the fetch.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from baton.errors import BatonError, IncompleteTransfer
from baton.kv.blocks import KVLayout
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS
from baton.types import PeerAddress
from kv_pool.common.protocol import REMOTE_TIER
from kv_pool.core.blocks.attachments import Publication
from kv_pool.core.peers.fetch_estimator import PeerFetchEstimator
from kv_pool.memory.pending_blocks import LoadPlan, LoadRequest


class PeerFetcher(Protocol):
    """Fetches blocks from other hosts' pools, as PromotionReceiver does."""

    @property
    def is_joined(self) -> bool: ...

    async def fetch_blocks(self, peer: PeerAddress, publication: Publication) -> None: ...


class PromotionSource:
    """A BlockSource of BlockLoader. `compute_checksums` returns those of blocks of the segment."""

    def __init__(
        self,
        receiver: PeerFetcher,
        layout: KVLayout,
        compute_checksums: Callable[[Sequence[int]], Awaitable[Sequence[int]]],
        clock: Clock,
    ) -> None:
        self.counters: dict[str, float] = {}
        self._receiver = receiver
        self._layout = layout
        self._compute_checksums = compute_checksums
        self._clock = clock
        self._fetch_estimator = PeerFetchEstimator()
        # The fetches in flight: pool, and the time in seconds until which look-ups wait for it.
        self._in_flight: list[tuple[PeerAddress, float]] = []

    def plan_load(self, load_request: LoadRequest, now: float) -> LoadPlan | None:
        """Offer to fetch the blocks; None if there is no remote prefix or computing is faster."""
        remote = load_request.remote_prefix
        if remote is None or not self._receiver.is_joined:
            return None
        end = min(load_request.end_block, remote.prefix_tokens // self._layout.block_size)
        num_blocks = end - load_request.first_block
        if num_blocks <= 0:
            return None
        # The coordinator's figure is that of the node that would compute the blocks, which need not
        # be the node that looks them up.
        token_seconds = (
            remote.compute_seconds_per_token or load_request.compute_seconds_per_token or 0.0
        )
        compute_seconds = token_seconds * num_blocks * self._layout.block_size
        peer, size = remote.pool, num_blocks * self._layout.block_bytes
        if self._fetch_estimator.is_backing_off(peer, now) or self._has_late_fetch(peer, now):
            self._count_declined("resting")
        elif self._fetch_estimator.predict_fetch_seconds(peer, size) >= compute_seconds:
            self._count_declined("slower")
        else:
            deadline = now + compute_seconds
            return LoadPlan(
                REMOTE_TIER,
                end,
                compute_seconds,
                lambda publication: self._fetch(peer, publication, deadline),
            )
        return None

    def _has_late_fetch(self, peer: PeerAddress, now: float) -> bool:
        return any(pool == peer and now >= deadline for pool, deadline in self._in_flight)

    async def _fetch(
        self, peer: PeerAddress, publication: Publication, deadline: float
    ) -> Sequence[int]:
        """Fetch a publication's blocks; returns their checksums. Raises BatonError."""
        started_at, size = self._clock(), len(publication.blocks) * self._layout.block_bytes
        self._count("baton_pool_promotions_started_total")
        self._in_flight.append((peer, deadline))
        try:
            FAILPOINTS.hit("pool.promote.before")
            await self._receiver.fetch_blocks(peer, publication)
        except BatonError as error:
            self._count(f'baton_pool_promotions_failed_total{{reason="{error.code}"}}')
            # An incomplete transfer only means that the pool has evicted the blocks.
            if not isinstance(error, IncompleteTransfer):
                self._fetch_estimator.record_failure(peer, self._clock())
            raise
        finally:
            self._in_flight.remove((peer, deadline))
        self._fetch_estimator.record_fetch(peer, size, self._clock() - started_at)
        self._count("baton_pool_promotions_done_total")
        self._count("baton_pool_promoted_blocks_total", len(publication.blocks))
        self._count("baton_pool_promoted_bytes_total", size)
        return await self._compute_checksums(publication.blocks)

    def _count_declined(self, reason: str) -> None:
        self._count(f'baton_pool_promotions_declined_total{{reason="{reason}"}}')

    def _count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

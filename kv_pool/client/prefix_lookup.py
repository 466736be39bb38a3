"""One look-up of a prefix in the pool: answered in time, or a miss."""

import asyncio
from collections.abc import Callable

from baton.cluster_link.pb_conversion import remote_prefix_to_pb
from baton.kv.blocks import BlockHash
from baton.kv.pool_types import PoolHit, RemotePrefix
from baton.pb.pool_pb2 import Chain, FindPrefix, PoolAnswer, PoolQuestion
from kv_pool.client.connection import POOL_MISS, PoolConnection
from kv_pool.common.protocol import MAX_LOAD_WAIT_SECONDS

_AnswerFuture = asyncio.Future[PoolAnswer]


def make_lookup_question(
    root: BlockHash,
    packed_hashes: bytes,
    packed_tokens: bytes,
    max_tokens: int,
    *,
    partial: bool,
    token_seconds: float | None,
    remote_prefix: RemotePrefix | None,
) -> PoolQuestion:
    """Build the question of a look-up; the arguments are those of PoolClient.find_prefix."""
    return PoolQuestion(
        find=FindPrefix(
            chain=Chain(root=root, names=packed_hashes, tokens=packed_tokens),
            max_tokens=max_tokens,
            partial=partial,
            token_seconds=token_seconds or 0.0,
            elsewhere=remote_prefix_to_pb(remote_prefix),
        )
    )


class PrefixLookup:
    """One look-up, which calls `on_result` once, on the event loop.

    If the first answer says that more blocks are pending, the look-up waits for a second answer as
    long as that pays off; on a time-out the first answer is the result. Pins of answers that come
    too late are released at once.
    """

    def __init__(
        self,
        connection: PoolConnection,
        question: PoolQuestion,
        on_result: Callable[[PoolHit], None],
        count: Callable[[str], None],
        timeout_seconds: float,
    ) -> None:
        """`count` increments a metric; `timeout_seconds` is that of the first answer."""
        self._connection = connection
        self._on_result = on_result
        self._count = count
        self._is_open = True
        self._first_hit = POOL_MISS  # result of the first answer, while a second one is expected
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(
            timeout_seconds, self._on_timeout, "baton_pool_lookups_late_total"
        )
        second_answer: _AnswerFuture = self._loop.create_future()
        second_answer.add_done_callback(self._on_second_answer)
        first_answer = connection.stream.send_question(question, second_answer)
        first_answer.add_done_callback(self._on_first_answer)

    def _on_first_answer(self, answer: _AnswerFuture) -> None:
        hit = self._register_hit(answer)
        found = answer.result().found if answer.exception() is None else None
        if found is None or not found.loading or not self._is_open:
            self._finish(hit)
            return
        self._first_hit = hit
        self._timer.cancel()
        wait_seconds = min(found.patience, MAX_LOAD_WAIT_SECONDS)
        self._timer = self._loop.call_later(
            wait_seconds, self._on_timeout, "baton_pool_loads_late_total"
        )

    def _on_second_answer(self, answer: _AnswerFuture) -> None:
        hit = self._register_hit(answer)
        if self._is_open and hit.pin is None:
            self._finish(self._first_hit)
            return
        if self._is_open:
            self._release_hit(self._first_hit)
        self._finish(hit)

    def _on_timeout(self, metric: str) -> None:
        if self._is_open:
            self._count(metric)
            self._finish(self._first_hit)

    def _finish(self, hit: PoolHit) -> None:
        if not self._is_open:
            self._release_hit(hit)
            return
        self._is_open = False
        self._timer.cancel()
        self._on_result(hit)

    def _register_hit(self, answer: _AnswerFuture) -> PoolHit:
        return (
            self._connection.attachment.register_hit(answer.result().found)
            if answer.exception() is None
            else POOL_MISS
        )

    def _release_hit(self, hit: PoolHit) -> None:
        if hit.pin is not None:
            self._connection.release_pin(hit.pin)

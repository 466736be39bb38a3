"""How long a request may be: what the largest decode node can hold. A prefill node is needed by no request, since a
decode node computes what no prefill node can hold.

A node that joins with a smaller cache or `--max-model-len` takes nothing away from others: requests that it cannot hold
are placed elsewhere. A node that left still counts for a while, so that its restart does not turn what clients may ask
for into their fault. What no node that is here can hold waits, and nobody waits behind it.
"""

from collections.abc import Collection, Iterable, Mapping

from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.limits import ModelBounds
from baton.types import NodeName, RequestId, Role
from coordinator.core.identity import JoinInfo
from coordinator.core.queue import WaitingQueue
from coordinator.core.record import Record
from coordinator.core.registry import Registry
from coordinator.core.settings import QueueLimits

REMEMBERED = 600.0  # seconds: within them a node that restarts has loaded its model again
_RETRY = 1.0  # seconds that a client is told to wait


class Capacity:
    """`hands_off`: prefill nodes compute prompts, and answer alone what ends with its first token."""

    def __init__(self, registry: Registry, *, hands_off: bool) -> None:
        self._registry = registry
        self._hands_off = hands_off
        self._left: dict[NodeName, tuple[JoinInfo, float]] = {}  # and until when it is remembered
        self._bounds: ModelBounds | None = None

    def node_joined(self, info: JoinInfo) -> None:
        """Called after it was added to the registry."""
        self._left = {
            name: one for name, one in self._left.items() if name != info.name and one[0].model == self._registry.model
        }
        self._compute_bounds()

    def node_left(self, info: JoinInfo, now: float) -> None:
        """Called after it was removed from the registry."""
        self._left[info.name] = (info, now + REMEMBERED)
        self._compute_bounds()

    def expire(self, now: float) -> None:
        """Forget who left too long ago, if others are here."""
        gone = [name for name, (_, until) in self._left.items() if until <= now]
        if gone and self._registry.nodes:
            for name in gone:
                del self._left[name]
            self._compute_bounds()

    def bounds(self) -> ModelBounds | None:
        """None before the first join."""
        return self._bounds

    def why_too_long(self, record: Record) -> str:
        """Why no node that may be given work can hold the request, "" if one can or if there is no decode node."""
        alone = self._hands_off and record.remaining <= 1
        if alone and self._registry.can_hold(Role.PREFILL, record.context_tokens + 1):
            return ""
        contexts = (node.info.context for node in self._registry.in_service(Role.DECODE))
        largest = max(contexts, default=record.length)
        if largest >= record.length:
            return ""
        return (
            f"no decode node that is here can hold its {record.length} tokens, the largest holds {largest}"
            " (--max-model-len, --kv-memory)"
        )

    def _compute_bounds(self) -> None:
        here = [node.info for node in self._registry.nodes.values()]
        largest = _largest([*here, *(info for info, _ in self._left.values())])
        self._bounds = ModelBounds(
            vocab_size=largest.vocab_size,
            max_model_len=largest.max_model_len,
            cache_tokens=largest.num_blocks * largest.layout.block_size,
            model_digest=largest.model_digest,
            dtype=largest.layout.dtype,
            present_context=_largest(here).context if here else 0,
        )


class TooLongToPlace:
    """Requests that no node which is here can hold, because one that could has left. They are out of the queue, and of
    its bounds, until another comes, or until their deadline. Of those that were never placed no more are held than the
    queue may have, in requests and in prompt tokens; the others are as many as nodes had begun."""

    def __init__(
        self, records: Mapping[RequestId, Record], queue: WaitingQueue, capacity: Capacity, limits: QueueLimits
    ) -> None:
        self._records = records
        self._queue = queue
        self._capacity = capacity
        self._limits = limits
        self._held: set[RequestId] = set()

    def hold(self, record: Record) -> BatonError | None:
        """Take a request that is too long, see `Capacity`, out of the queue. If there are too many of them, what it is
        to end with instead."""
        if not record.attempts and (why := self._why_full(record)):
            too_long = self._capacity.why_too_long(record)
            return Unavailable(f"{too_long}, and {why} already wait for a larger one", retry_after=_RETRY)
        self._held.add(record.request.id)
        self._queue.set_aside(record.request.id)
        return None

    def release(self) -> None:
        """Those that can be held by now are offered again."""
        for request in self._fitting():
            self._held.discard(request)
            self._queue.bring_back(request)

    def forget(self, request: RequestId) -> None:
        """It has ended. Idempotent."""
        self._held.discard(request)

    def deadline_error(self, record: Record) -> BatonError:
        """What the request ends with when its time is over. That no node could hold it is not its client's fault."""
        given = f"{record.request.timeout:g} s that its client or --request-timeout gave it"
        if record.request.id in self._held and (why := self._capacity.why_too_long(record)):
            return Unavailable(f"{why}, and no larger one came in the {given}", retry_after=_RETRY)
        return DeadlineExceeded(f"the request took longer than the {given}")

    def _why_full(self, record: Record) -> str:
        held = [self._records[request].request for request in self._held]
        if len(held) >= self._limits.requests:
            return f"{len(held)} requests (--max-queue)"
        tokens = sum(len(request.prompt) for request in held)
        full = held and tokens + len(record.request.prompt) > self._limits.tokens
        return f"{tokens} prompt tokens (--max-queue-tokens)" if full else ""

    def _fitting(self) -> Iterable[RequestId]:
        return [request for request in self._held if not self._capacity.why_too_long(self._records[request])]


def _largest(infos: Collection[JoinInfo]) -> JoinInfo:
    """Of the decode nodes if there are any: they serve alone what no prefill node can hold."""
    decode = [info for info in infos if info.role is Role.DECODE]
    return max(decode or infos, key=lambda info: info.context)

"""How long a request may be: what the largest decode node can hold. A prefill node is needed by no
request, since a decode node computes what no prefill node can hold.

A node that joins with a smaller cache or `--max-model-len` takes nothing away from others: requests
that it cannot hold are placed elsewhere. A node that left still counts for a while, so that its
restart does not turn what clients may ask for into their fault. What no node that is here can hold
waits, and nobody waits behind it.
"""

from collections.abc import Collection, Iterable, Mapping

from baton.errors import BatonError, DeadlineExceeded, ServiceUnavailable
from baton.limits import ModelBounds
from baton.types import NodeName, RequestId, Role
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.settings import QueueLimits
from coordinator.core.membership.join_checks import JoinInfo
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.requests.record import RequestRecord

DEPARTED_NODE_MEMORY_SECONDS = (
    600.0  # seconds: within them a node that restarts has loaded its model again
)
_RETRY_AFTER_SECONDS = 1.0  # seconds that a client is told to wait


class ContextCapacity:
    """`hands_off`: prefill nodes compute prompts, and answer alone what ends with its first
    token."""

    def __init__(self, registry: NodeRegistry, *, hands_off: bool) -> None:
        self._registry = registry
        self._hands_off = hands_off
        self._departed_nodes: dict[
            NodeName, tuple[JoinInfo, float]
        ] = {}  # and until when it is remembered
        self._bounds: ModelBounds | None = None

    def on_node_joined(self, info: JoinInfo) -> None:
        """Called after it was added to the registry."""
        self._departed_nodes = {
            name: one
            for name, one in self._departed_nodes.items()
            if name != info.name and one[0].model == self._registry.model_identity
        }
        self._compute_bounds()

    def on_node_left(self, info: JoinInfo, now: float) -> None:
        """Called after it was removed from the registry."""
        self._departed_nodes[info.name] = (info, now + DEPARTED_NODE_MEMORY_SECONDS)
        self._compute_bounds()

    def expire_departed_nodes(self, now: float) -> None:
        """Forget who left too long ago, if others are here."""
        gone = [name for name, (_, until) in self._departed_nodes.items() if until <= now]
        if gone and self._registry.nodes:
            for name in gone:
                del self._departed_nodes[name]
            self._compute_bounds()

    def get_model_bounds(self) -> ModelBounds | None:
        """None before the first join."""
        return self._bounds

    def why_too_long(self, record: RequestRecord) -> str:
        """Why no node that may be given work can hold the request, "" if one can or if there is no
        decode node."""
        alone = self._hands_off and record.remaining_tokens <= 1
        if alone and self._registry.can_fit_context(Role.PREFILL, record.context_tokens + 1):
            return ""
        contexts = (
            node.info.max_context_tokens for node in self._registry.nodes_in_service(Role.DECODE)
        )
        largest = max(contexts, default=record.max_total_tokens)
        if largest >= record.max_total_tokens:
            return ""
        return (
            f"no decode node that is here can hold its {record.max_total_tokens} tokens, the largest holds {largest}"
            " (--max-model-len, --kv-memory)"
        )

    def _compute_bounds(self) -> None:
        here = [node.info for node in self._registry.nodes.values()]
        largest = _largest_node([*here, *(info for info, _ in self._departed_nodes.values())])
        self._bounds = ModelBounds(
            vocab_size=largest.vocab_size,
            max_model_len=largest.max_model_len,
            cache_tokens=largest.num_blocks * largest.layout.block_size,
            model_digest=largest.model_digest,
            dtype=largest.layout.dtype,
            current_max_context=_largest_node(here).max_context_tokens if here else 0,
        )


class OversizedRequests:
    """Requests that no node which is here can hold, because one that could has left. They are out
    of the queue, and of its bounds, until another comes, or until their deadline. Of those that
    were never placed no more are held than the queue may have, in requests and in prompt tokens;
    the others are as many as nodes had begun."""

    def __init__(
        self,
        records: Mapping[RequestId, RequestRecord],
        queue: WaitingQueue,
        capacity: ContextCapacity,
        limits: QueueLimits,
    ) -> None:
        self._records = records
        self._queue = queue
        self._capacity = capacity
        self._limits = limits
        self._held: set[RequestId] = set()

    def hold_request(self, record: RequestRecord) -> BatonError | None:
        """Take a request that is too long, see `ContextCapacity`, out of the queue. If there are
        too many of them, what it is to end with instead."""
        if not record.attempt_count and (why := self._why_full(record)):
            too_long = self._capacity.why_too_long(record)
            return ServiceUnavailable(
                f"{too_long}, and {why} already wait for a larger one",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        self._held.add(record.request.id)
        self._queue.park_request(record.request.id)
        return None

    def release_fitting(self) -> None:
        """Those that can be held by now are offered again."""
        for request in self._list_fitting():
            self._held.discard(request)
            self._queue.unpark_request(request)

    def forget_request(self, request: RequestId) -> None:
        """It has ended. Idempotent."""
        self._held.discard(request)

    def deadline_error(self, record: RequestRecord) -> BatonError:
        """What the request ends with when its time is over. That no node could hold it is not its
        client's fault."""
        given = f"{record.request.timeout_seconds:g} s that its client or --request-timeout gave it"
        if record.request.id in self._held and (why := self._capacity.why_too_long(record)):
            return ServiceUnavailable(
                f"{why}, and no larger one came in the {given}", retry_after=_RETRY_AFTER_SECONDS
            )
        return DeadlineExceeded(f"the request took longer than the {given}")

    def _why_full(self, record: RequestRecord) -> str:
        held = [self._records[request].request for request in self._held]
        if len(held) >= self._limits.max_requests:
            return f"{len(held)} requests (--max-queue)"
        tokens = sum(len(request.prompt_token_ids) for request in held)
        full = held and tokens + len(record.request.prompt_token_ids) > self._limits.max_tokens
        return f"{tokens} prompt tokens (--max-queue-tokens)" if full else ""

    def _list_fitting(self) -> Iterable[RequestId]:
        return [
            request
            for request in self._held
            if not self._capacity.why_too_long(self._records[request])
        ]


def _largest_node(infos: Collection[JoinInfo]) -> JoinInfo:
    """Of the decode nodes if there are any: they serve alone what no prefill node can hold."""
    decode = [info for info in infos if info.role is Role.DECODE]
    return max(decode or infos, key=lambda info: info.max_context_tokens)

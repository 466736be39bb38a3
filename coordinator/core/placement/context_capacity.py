"""How long a request may be: as long as the largest decode node can hold.

Prefill nodes do not limit requests, since a decode node computes what no prefill node can hold. A
node that joins with a smaller cache or `--max-model-len` takes nothing away: requests that it
cannot hold are placed elsewhere. A node that left still counts for a while, so that its restart
does not reject requests as too long. Requests that no present node can hold wait, and block no
others.
"""

from collections.abc import Collection

from baton.limits import ModelBounds
from baton.types import NodeName, Role
from coordinator.core.membership.join_checks import JoinInfo
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.request_view import PlaceableRequest

# long enough for a restarted node to load its model
DEPARTED_NODE_MEMORY_SECONDS = 600.0


class ContextCapacity:
    """With `hands_off`, prefill nodes compute prompts, and serve one-token outputs alone."""

    def __init__(self, registry: NodeRegistry, *, hands_off: bool) -> None:
        self._registry = registry
        self._hands_off = hands_off
        self._departed_nodes: dict[
            NodeName, tuple[JoinInfo, float]
        ] = {}  # and until when it is remembered
        self._bounds: ModelBounds | None = None

    def on_node_joined(self, info: JoinInfo) -> None:
        """Must be called after the node was added to the registry."""
        self._departed_nodes = {
            name: one
            for name, one in self._departed_nodes.items()
            if name != info.name and one[0].model == self._registry.model_identity
        }
        self._compute_bounds()

    def on_node_left(self, info: JoinInfo, now: float) -> None:
        """Must be called after the node was removed from the registry."""
        self._departed_nodes[info.name] = (info, now + DEPARTED_NODE_MEMORY_SECONDS)
        self._compute_bounds()

    def expire_departed_nodes(self, now: float) -> None:
        """Forget nodes that left long ago, unless no node is left."""
        gone = [name for name, (_, until) in self._departed_nodes.items() if until <= now]
        if gone and self._registry.nodes:
            for name in gone:
                del self._departed_nodes[name]
            self._compute_bounds()

    def get_model_bounds(self) -> ModelBounds | None:
        """Return the bounds of requests; None before the first join."""
        return self._bounds

    def why_too_long(self, record: PlaceableRequest) -> str:
        """Return why no node in service can hold the request; "" if one can, or without decode
        nodes."""
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
            f"no decode node that is here can hold its {record.max_total_tokens} tokens, the"
            f" largest holds {largest}"
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


def _largest_node(infos: Collection[JoinInfo]) -> JoinInfo:
    """Return the largest decode node, or the largest node if there is no decode node."""
    decode = [info for info in infos if info.role is Role.DECODE]
    return max(decode or infos, key=lambda info: info.max_context_tokens)

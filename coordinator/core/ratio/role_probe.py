"""Probes a node in its new role by a request through it, before clients' requests go there."""

from baton.errors import BatonError, Cancelled
from baton.types import FinishReason, Request, RequestId, Role, SamplingParams
from coordinator.core.admission.tenants import INTERNAL_PRINCIPAL
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.request_placer import LatencyEstimator
from coordinator.core.ratio.role_switch import PROBE_TIMEOUT_SECONDS, PendingRoleSwitch
from coordinator.core.requests.table import RequestTable

_PROBE_OUTPUT_TOKENS = 2  # one by prefill, one by decode
_PROBE_BLOCKS = 2

ProbeResult = tuple[RequestId, FinishReason | BatonError]


class RoleProber:
    """Sends probe requests and keeps their results until they are taken."""

    def __init__(
        self, registry: NodeRegistry, table: RequestTable, latency_estimator: LatencyEstimator
    ) -> None:
        self._registry = registry
        self._table = table
        self._latency_estimator = latency_estimator
        self._results: list[ProbeResult] = []

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def send_probe(self, switch: PendingRoleSwitch, now: float) -> None:
        """Send a salted prompt of more than a block, so that no cache has it: it must be computed,
        and handed off if the mode has hand-offs. A new prefill node answers alone if no decode node
        has room: it is needed all the same, and no decode node could take the hand-off."""
        model = self._registry.model_identity
        assert model is not None, "a node has joined"
        smallest = min(node.max_context_tokens for node in self._registry.nodes.values())
        request = RequestId(f"probe-{switch.incarnation}-{switch.probe_count}")
        length = max(1, min(model.layout.block_size + 1, smallest - _PROBE_OUTPUT_TOKENS))
        prompt = tuple(token % model.vocab_size for token in range(1, length + 1))
        alone = switch.target_role is Role.PREFILL and self._latency_estimator.is_decode_full(
            blocks=_PROBE_BLOCKS
        )
        sampling = SamplingParams(
            1 if alone else _PROBE_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
        )
        switch.start_probe(request)
        probe = Request(
            request,
            prompt,
            sampling,
            PROBE_TIMEOUT_SECONDS,
            cache_salt=request.encode(),
            principal=INTERNAL_PRINCIPAL,
        )
        self._table.add_probe(probe, switch.incarnation, now, self._on_probe_ended)

    def cancel_probe(self, switch: PendingRoleSwitch, now: float) -> None:
        """End the probe of the switch if one is running."""
        record = (
            self._table.records.get(switch.probe_request)
            if switch.probe_request is not None
            else None
        )
        if record is not None:
            self._table.end_request(record, Cancelled("the node is not to be probed any more"), now)

    def take_results(self) -> list[ProbeResult]:
        """Return the results of probes that have ended since the last call."""
        results, self._results = self._results, []
        return results

    def _on_probe_ended(self, request: RequestId, result: FinishReason | BatonError) -> None:
        self._results.append((request, result))

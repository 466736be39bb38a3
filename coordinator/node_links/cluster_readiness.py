"""Decides whether the cluster is ready, and sends the warm-up request.

The cluster is ready once a warm-up request has passed through the real path, while nodes can serve
and running requests make progress.
"""

import asyncio
import contextlib
from collections.abc import Callable

from baton.config.coordinator_config import CoordinatorConfig
from baton.errors import BatonError
from baton.process import log
from baton.types import Request, RequestId, SamplingParams, mint_id
from coordinator.core.admission.tenants import INTERNAL_PRINCIPAL
from coordinator.node_links.dispatcher import Dispatcher

WARMUP_PROMPT_TOKENS = 4
WARMUP_OUTPUT_TOKENS = 2  # one by prefill, one by decode
# How long the warm-up waits for a prefill node that may still be starting, once decode serves.
PREFILL_WAIT_SECONDS = 30.0

_log = log.get_logger("warmup")


class ClusterReadiness:
    """The cluster's readiness. `run` warms the cluster up once."""

    def __init__(self, config: CoordinatorConfig, dispatcher: Dispatcher) -> None:
        # Called with (ready, reason) when the state has changed.
        self.on_change: list[Callable[[bool, str], None]] = []
        self._config = config
        self._dispatcher = dispatcher
        self._not_warm_reason = "the warm-up request has not been sent yet"
        self._last_state: tuple[bool, str] | None = None
        self._cluster_changed = asyncio.Event()
        dispatcher.on_cluster_change.append(self._notify_if_changed)

    def state(self) -> tuple[bool, str]:
        """Return (True, ""), or (False, the reason why the cluster is not ready)."""
        reason = self._why_not_ready()
        return not reason, reason

    async def run(self) -> None:
        """Warm up as soon as the cluster can serve.

        The request passes a hand-off if the mode has them and a prefill node joins in time. After
        a failure it is sent again when a node has joined or reported.
        """
        brain = self._dispatcher.brain
        while self._not_warm_reason:
            await self._wait_while(brain.why_not_serving)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PREFILL_WAIT_SECONDS):
                    await self._wait_while(brain.why_no_prefill)
            if not brain.why_not_serving():
                await self._warm_up()
                self._notify_if_changed()
                if self._not_warm_reason:
                    await self._wait_for_change()

    async def _wait_while(self, missing: Callable[[], str]) -> None:
        while reason := missing():
            self._not_warm_reason = f"{reason}: the warm-up request has not been sent yet"
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._cluster_changed.clear()
        await self._cluster_changed.wait()

    async def _warm_up(self) -> None:
        try:
            vocab = self._dispatcher.get_model_bounds().vocab_size
            prompt = tuple(token % vocab for token in range(1, WARMUP_PROMPT_TOKENS + 1))
            sampling = SamplingParams(WARMUP_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            request = Request(
                RequestId(mint_id()),
                prompt,
                sampling,
                self._config.request_timeout,
                principal=INTERNAL_PRINCIPAL,
            )
            stream = await self._dispatcher.submit_request(request, internal=True)
            async for _ in stream:
                pass
        except BatonError as error:
            self._not_warm_reason = f"the warm-up request failed: {error.message}"
            _log.warning("warm-up request failed", reason=error.message, code=error.code)
        else:
            self._not_warm_reason = ""
            _log.info("warm-up request succeeded")

    def _why_not_ready(self) -> str:
        brain = self._dispatcher.brain
        if brain.is_draining:
            return "the cluster is stopping"
        missing = brain.why_not_serving()
        if missing or self._not_warm_reason:
            return missing or self._not_warm_reason
        seconds = brain.seconds_without_progress(self._dispatcher.clock())
        if seconds > self._config.stall:
            here = f"{brain.running_requests} requests run, {brain.queued_requests} wait"
            return (
                f"{here}, and none has got any further for {seconds:.0f} s "
                f"(--stall {self._config.stall:g})"
            )
        return ""

    def _notify_if_changed(self) -> None:
        self._cluster_changed.set()
        now = self.state()
        if now != self._last_state:
            self._last_state = now
            for callback in self.on_change:
                callback(*now)

"""Is the cluster ready? A warm-up request went through the real path, decode nodes are here, and what runs moves on."""

import asyncio
import contextlib
from collections.abc import Callable

from baton import log
from baton.config import Config
from baton.errors import BatonError
from baton.types import SamplingParams
from coordinator.dispatcher import Dispatcher
from coordinator.generation import Submission

PROMPT_TOKENS = 4
OUTPUT_TOKENS = 2  # one by prefill, one by decode
PREFILL_PATIENCE = 30.0  # seconds that it waits for a prefill node which may be starting still, once decode serves

_log = log.get("warmup")


class Readiness:
    """`run` is a task that warms the cluster up once. `state` may be asked at any time; `on_change` callbacks are
    called with (ready, reason) when it has changed."""

    def __init__(self, config: Config, dispatcher: Dispatcher) -> None:
        self.on_change: list[Callable[[bool, str], None]] = []
        self._config = config
        self._dispatcher = dispatcher
        self._not_warm = "the warm-up request has not been sent yet"
        self._last: tuple[bool, str] | None = None
        self._changed = asyncio.Event()
        dispatcher.on_change.append(self._look)

    def state(self) -> tuple[bool, str]:
        """(True, "") or (False, why not)."""
        reason = self._reason()
        return not reason, reason

    async def run(self) -> None:
        """Warm up as soon as the cluster can serve, by a hand-off if the mode has them and a prefill node comes in
        time; after a failure, again when a node has come or reported."""
        brain = self._dispatcher.brain
        while self._not_warm:
            await self._wait_while(brain.missing)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PREFILL_PATIENCE):
                    await self._wait_while(brain.missing_prefill)
            if not brain.missing():
                await self._warm_up()
                self._look()
                if self._not_warm:
                    await self._next_change()

    async def _wait_while(self, missing: Callable[[], str]) -> None:
        while reason := missing():
            self._not_warm = f"{reason}: the warm-up request has not been sent yet"
            await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _warm_up(self) -> None:
        try:
            vocab = self._dispatcher.bounds().vocab_size
            prompt = tuple(token % vocab for token in range(1, PROMPT_TOKENS + 1))
            sampling = SamplingParams(OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            submission = Submission(prompt, sampling, self._config.request_timeout)
            stream = await self._dispatcher.submit(submission, internal=True)
            async for _ in stream:
                pass
        except BatonError as error:
            self._not_warm = f"the warm-up request failed: {error.message}"
            _log.warning("warm-up failed", reason=error.message, code=error.code)
        else:
            self._not_warm = ""
            _log.info("warm-up passed")

    def _reason(self) -> str:
        brain = self._dispatcher.brain
        if brain.draining:
            return "the cluster is stopping"
        missing = brain.missing()
        if missing or self._not_warm:
            return missing or self._not_warm
        quiet = brain.stood_still(self._dispatcher.clock())
        if quiet > self._config.stall:
            here = f"{brain.running} requests run, {brain.queued} wait"
            return f"{here}, and none has got any further for {quiet:.0f} s (--stall {self._config.stall:g})"
        return ""

    def _look(self) -> None:
        self._changed.set()
        now = self.state()
        if now != self._last:
            self._last = now
            for callback in self.on_change:
                callback(*now)

"""A coordinator and its one node in this process, as an application without a port."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import httpx2

from baton.errors import NodeFailed
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.structured_output.grammar_checker import GrammarChecker
from coordinator.text.text_workers import TextWorkers
from node_engine.host.command_stages import CommandStages
from node_engine.host.compute_thread import ComputeThread
from node_engine.host.host_arena import HostArena


class InProcessServer(httpx2.ASGITransport):
    """The transport of HTTP clients of this process. Used on one event loop."""

    compute_thread: ComputeThread
    stages: CommandStages
    heartbeats: asyncio.Task[NoReturn]

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: TextWorkers,
        grammar_checker: GrammarChecker,
        arena: HostArena,
    ) -> None:
        """The caller sets `app` and the attributes above next."""
        self.on_change: list[Callable[[bool, str], None]] = []  # see Readiness
        self._dispatcher = dispatcher
        self._workers = workers
        self._grammar_checker = grammar_checker
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self._failure: NodeFailed | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()
        super().__init__(_no_application)

    def state(self) -> tuple[bool, str]:
        return (True, "") if self._failure is None else (False, self._failure.message)

    def on_node_failed(self, error: BaseException) -> None:
        """End all requests: the compute thread has failed. Called on that thread."""
        self._loop.call_soon_threadsafe(self._end_requests, "engine", error)

    def on_scheduling_failed(self, error: Exception) -> None:
        """End all requests: what a report of the node says could not be carried out."""
        self._end_requests("scheduling", error)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request. Raises NodeFailed if the engine or its scheduling has failed.

        That does not wait for the dispatcher to end the request: it may be what has failed.
        """
        if self._failure is not None:
            raise self._failure
        answering = asyncio.ensure_future(super().handle_async_request(request))
        try:
            await asyncio.wait((answering, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return answering.result()
        finally:
            answering.cancel()

    async def aclose(self) -> None:
        """End all requests, then the threads, and free the cache.

        It waits for the threads on the event loop, which has nothing else to do then: when Python
        ends, nothing can be moved to other threads.
        """
        self.heartbeats.cancel()
        try:
            await self._dispatcher.drain_requests(0.0)
            await self._grammar_checker.close()
        finally:  # also if this is interrupted
            self._end_threads()

    def _end_threads(self) -> None:
        """End the threads, and drop all references to the model and its cache.

        They are in no reference cycle, so their memory is free when this returns, and not when
        Python collects garbage.
        """
        self._dispatcher.close()
        self.stages.release_all()
        self.compute_thread.stop()
        self.stages.close()
        self._workers.close()
        self._arena.close()
        del self.compute_thread, self.stages, self.heartbeats, self._arena
        self.app = _no_application

    def _end_requests(self, part: str, error: BaseException) -> None:
        """Raise an error in all requests, and abort what is computed for them."""
        if self._failure is not None:
            return
        self._failure = failure = NodeFailed(
            f"the {part} failed: {type(error).__name__}: make a new LLM"
        )
        self._failed.set_result(None)
        dispatcher = self._dispatcher
        for request in dispatcher.brain.list_active_requests():
            dispatcher.apply_effects(
                dispatcher.brain.cancel_request(request, failure, dispatcher.clock())
            )
        for incarnation in list(dispatcher.node_connections):
            dispatcher.remove_member(incarnation, failure)


async def _no_application(scope: object, receive: object, send: object) -> None:
    raise AssertionError("the application is not set yet")

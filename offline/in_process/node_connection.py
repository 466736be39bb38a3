"""Connects the dispatcher and the one node of its own process: no sockets and no encoding."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from baton.cluster_link.messages import Heartbeat, LedgerReport, LinkControl, NodeOrder, NodeReport
from baton.cluster_link.report_types import NodeStats
from baton.process import log
from baton.types import Incarnation
from coordinator.node_links.dispatcher import Dispatcher
from node_engine.host.compute_thread import ComputeThread

HEARTBEAT_SECONDS = 1.0


class InProcessNodeConnection:
    """The coordinator's connection to the node of its own process.

    Orders go to the node's compute thread at once, reports to the coordinator's event loop.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        loop: asyncio.AbstractEventLoop,
        on_failed: Callable[[Exception], None],
    ) -> None:
        """`on_failed` is called on the loop when the dispatcher fails to handle a report.

        Reports after that one are ignored.
        """
        self._dispatcher = dispatcher
        self._loop = loop
        self._on_failed = on_failed
        self._has_failed = False
        self._compute_thread: ComputeThread | None = None

    def connect(self, compute_thread: ComputeThread) -> None:
        """Deliver orders to this thread from now on."""
        self._compute_thread = compute_thread

    def send_report(self, report: NodeReport | LedgerReport, sender: Incarnation) -> None:
        """Pass on a report of the node. Called on the compute thread."""
        if not isinstance(report, LedgerReport):
            self._loop.call_soon_threadsafe(self._deliver_report, sender, report)

    async def send_heartbeats(
        self, build_stats: Callable[[], NodeStats], sender: Incarnation
    ) -> NoReturn:
        """Report statistics periodically, on the event loop.

        A node that has refused a request for lack of blocks gets it again when it reports room.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._deliver_report(sender, Heartbeat(build_stats()))

    def send_order(self, order: NodeOrder | LinkControl) -> None:
        if self._compute_thread is not None and isinstance(order, NodeOrder):
            self._compute_thread.submit_command(order)

    def close(self) -> None:
        self._compute_thread = None

    def _deliver_report(self, sender: Incarnation, report: NodeReport) -> None:
        if self._has_failed:
            return
        try:
            self._dispatcher.receive_report(sender, report)
        except Exception as error:  # a bug; in a cluster it ends the node's stream
            self._has_failed = True
            log.get_logger("dispatcher").error(
                "report could not be handled", **log.get_error_fields(error)
            )
            self._on_failed(error)

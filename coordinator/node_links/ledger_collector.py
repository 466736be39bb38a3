"""Queries every node and pool for its block ledger."""

import asyncio
from itertools import chain, count
from operator import attrgetter

from baton.cluster_link.messages import LedgerQuery, LedgerReport
from baton.cluster_link.pb_conversion import ledger_to_pb
from baton.cluster_link.report_types import MemberLedger
from baton.pb.cluster_pb2 import LedgerResponse
from baton.types import Incarnation
from coordinator.node_links.dispatcher import Dispatcher

REPLY_TIMEOUT_SECONDS = 2.0


class LedgerCollector:
    """Sends ledger queries over the node links and gathers the replies."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._query_numbers = count(1)
        self._open_queries: dict[int, dict[Incarnation, asyncio.Future[list[MemberLedger]]]] = {}

    async def collect_ledgers(
        self, timeout_seconds: float = REPLY_TIMEOUT_SECONDS
    ) -> LedgerResponse:
        """Return all ledgers, including those of the pools' disks, and the names of silent nodes.

        A node is silent if it does not answer within `timeout_seconds`.
        """
        number = next(self._query_numbers)
        loop = asyncio.get_running_loop()
        names = {
            member.incarnation: member.info.name for member in self._dispatcher.brain.list_members()
        }
        waiting: dict[Incarnation, asyncio.Future[list[MemberLedger]]] = {
            node: loop.create_future() for node in names
        }
        self._open_queries[number] = waiting
        try:
            for node in names:
                link = self._dispatcher.node_connections.get(node)
                if link is not None:
                    link.send_order(LedgerQuery(number))
            if waiting:
                await asyncio.wait(waiting.values(), timeout=timeout_seconds)
        finally:
            del self._open_queries[number]
        answered = {node: future.result() for node, future in waiting.items() if future.done()}
        ledgers = sorted(chain.from_iterable(answered.values()), key=attrgetter("name"))
        return LedgerResponse(
            ledgers=map(ledger_to_pb, ledgers),
            silent=sorted(name for node, name in names.items() if node not in answered),
        )

    def on_ledger_report(self, sender: Incarnation, report: LedgerReport) -> None:
        """Accept a reply. Late and repeated replies are ignored."""
        future = self._open_queries.get(report.query_id, {}).get(sender)
        if future is not None and not future.done():
            future.set_result([report.ledger, *([report.disk] if report.disk else [])])

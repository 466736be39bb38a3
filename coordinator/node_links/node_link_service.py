"""NodeLink.Attach: the one stream between the coordinator and each node.

A stream is one incarnation of a node. It starts with a Join within `JOIN_TIMEOUT_SECONDS`. It ends
when the node disconnects, when the brain removes the node, or when the node reads so slowly that
its bounded outbox is full.
"""

import asyncio
import hmac
from collections.abc import Coroutine
from typing import Any

import grpc

from baton.cluster_link.dialer import PROOF_METADATA_KEY, derive_link_proof
from baton.cluster_link.join_codec import decode_join
from baton.cluster_link.messages import (
    JoinInfo,
    JoinRefusal,
    LedgerReport,
    PoolJoinInfo,
    Welcome,
)
from baton.cluster_link.order_codec import encode_order
from baton.cluster_link.report_codec import decode_report
from baton.cluster_link.stream import MessagesLost, NodeStream, SequenceNumbers
from baton.config.coordinator_config import CoordinatorConfig
from baton.errors import ConfigError, NodeLost
from baton.pb.cluster_pb2 import Join, NodeMessage
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger
from baton.types import Incarnation, mint_id
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.node_links.ledger_collector import LedgerCollector

JOIN_TIMEOUT_SECONDS = 5.0

StreamContext = Any  # grpc.aio.ServicerContext, which ships without types

_log = log.get_logger("node_link")
_limited = RateLimitedLogger()  # for lines that any client of the port can cause


class NodeLinkService:
    """Serves the streams of all nodes and pools."""

    def __init__(
        self, config: CoordinatorConfig, dispatcher: Dispatcher, ledgers: LedgerCollector
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._ledger_collector = ledgers
        self._proof = derive_link_proof(config.cluster_token)

    async def Attach(self, _: object, context: StreamContext) -> None:
        """Serve one node's stream, from its Join to its end."""
        await self._authenticate(context)
        node_stream = NodeStream(self._config.heartbeat)
        first = await self._read_join(context)
        try:
            join = self._decode_join(first.join)
            if isinstance(join, PoolJoinInfo):
                incarnation = self._join_pool(join, node_stream)
            else:
                incarnation = self._join_node(join, node_stream)
        except ConfigError as error:
            _limited.log_event(
                _log.warning, "join refused", node=first.join.name, reason=error.message
            )
            await context.write(encode_order(JoinRefusal(error, error.retry_after or 0.0)))
            return
        try:
            await self._run_until_first_ends(
                self._receive_messages(context, incarnation),
                node_stream.write_messages(context),
                node_stream.closed.wait(),
            )
        except grpc.RpcError as error:
            _limited.log_event(
                _log.info, "node stream failed", node=first.join.name, error=str(error)
            )
        finally:
            node_stream.close()
            self._dispatcher.remove_member(
                incarnation, NodeLost(f"the stream of node {first.join.name} ended")
            )

    def _join_node(self, info: JoinInfo, link: NodeStream) -> Incarnation:
        """Make a node a member and send it Welcome. Raises ConfigError if it may not join."""
        incarnation, brain = Incarnation(mint_id(64)), self._dispatcher.brain
        effects = brain.join_node(info, incarnation, self._dispatcher.clock())
        link.send_order(Welcome(incarnation, self._config.heartbeat, self._config.silence))
        _log.info(
            "node joined",
            node=info.name,
            role=info.role.value,
            incarnation=incarnation,
            pid=info.pid,
        )
        self._dispatcher.add_member(incarnation, link, effects)
        return incarnation

    def _join_pool(self, info: PoolJoinInfo, link: NodeStream) -> Incarnation:
        """Make the shared pool of a host a member. Raises ConfigError if it may not join."""
        incarnation, brain = Incarnation(mint_id(64)), self._dispatcher.brain
        effects = brain.join_pool(info, incarnation, self._dispatcher.clock())
        link.send_order(Welcome(incarnation, self._config.heartbeat, self._config.silence))
        _log.info("pool joined", node=info.name, incarnation=incarnation, pid=info.pid)
        self._dispatcher.add_member(incarnation, link, effects)
        return incarnation

    def _decode_join(self, join: Join) -> JoinInfo | PoolJoinInfo:
        """Raises ConfigError, and counts it, for a join that is no node's."""
        try:
            return decode_join(join)
        except ConfigError:
            self._dispatcher.brain.counters.joins["refused"] += 1
            raise

    async def _authenticate(self, context: StreamContext) -> None:
        """Check the proof that the node has the cluster token.

        Its certificate has proved that already, but the proof also holds behind a proxy that
        terminates TLS.
        """
        given = dict(context.invocation_metadata()).get(PROOF_METADATA_KEY, b"")
        if hmac.compare_digest(given if isinstance(given, bytes) else b"", self._proof):
            return
        self._dispatcher.brain.counters.joins["unauthenticated"] += 1
        _limited.log_event(_log.warning, "join refused: wrong cluster token", peer=context.peer())
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, f"metadata {PROOF_METADATA_KEY} is missing or wrong"
        )

    async def _read_join(self, context: StreamContext) -> NodeMessage:
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_SECONDS):
                message = await context.read()
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no Join within {JOIN_TIMEOUT_SECONDS:g} s"
            )
        if message is None or message is grpc.aio.EOF or not message.HasField("join"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Join")
        return message  # type: ignore[no-any-return]

    async def _receive_messages(self, context: StreamContext, incarnation: Incarnation) -> None:
        counters, numbers = self._dispatcher.brain.counters, SequenceNumbers()
        while (message := await context.read()) is not grpc.aio.EOF:
            if message is None:
                counters.dropped_messages["damaged"] += 1
                return
            try:
                if not numbers.accept_message(message):
                    counters.dropped_messages["repeated"] += 1
                    continue
            except MessagesLost as error:
                _limited.log_event(_log.warning, "messages from a node lost", error=str(error))
                counters.dropped_messages["lost"] += 1
                return
            if message.incarnation != incarnation:
                counters.dropped_messages["stale"] += 1
                return
            try:
                report = decode_report(message)
            except ValueError as error:
                _limited.log_event(_log.warning, "malformed message from a node", error=str(error))
                counters.dropped_messages["damaged"] += 1
                return
            match report:
                case None:
                    counters.dropped_messages["unexpected"] += 1
                case LedgerReport():
                    self._ledger_collector.on_ledger_report(incarnation, report)
                case _:
                    self._dispatcher.receive_report(incarnation, report)

    @staticmethod
    async def _run_until_first_ends(*parts: Coroutine[Any, Any, object]) -> None:
        """Run all coroutines until one ends, then cancel the others. Raises its error."""
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

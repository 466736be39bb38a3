"""NodeLink.Attach: the one stream between the coordinator and each node.

A stream is one incarnation. It starts with a Join within `JOIN_TIMEOUT` seconds and ends when the node goes, when the
brain gives the incarnation up, or when the node reads so slowly that its bounded outbox fills.
"""

import asyncio
import hmac
from collections import deque
from collections.abc import Coroutine
from typing import Any

import grpc

from baton import link_codec, log, wire
from baton.config import Config
from baton.errors import ConfigError, NodeGone
from baton.limits import MAX_UNSENT
from baton.link_dialer import PROOF_KEY, link_proof
from baton.pb.cluster_pb2 import CoordinatorMessage, Join, NodeMessage, Ping, Refusal
from baton.process.log_rate import RateLimitedLog
from baton.types import Incarnation
from coordinator.core.identity import JoinInfo
from coordinator.core.pools import ROLE
from coordinator.dispatcher import Dispatcher
from coordinator.ledgers import Ledgers
from coordinator.node_messages import input_from_pb, join_from_pb, pool_from_pb

JOIN_TIMEOUT = 5.0  # seconds
_LAST_WRITE = 1.0  # seconds
_FAILPOINT = "link.coordinator.send"

Context = Any  # grpc.aio.ServicerContext, which ships without types

_log = log.get("node_link")
_limited = RateLimitedLog()  # of lines that whoever reaches the port can cause


class NodeStream:
    """The sending half of one node's stream: a bounded outbox, and a ping when nothing else is to be said."""

    def __init__(self, heartbeat: float) -> None:
        self.closed = asyncio.Event()
        self._heartbeat = heartbeat
        self._outbox: deque[CoordinatorMessage] = deque()
        self._wake = asyncio.Event()

    def send(self, message: CoordinatorMessage) -> None:
        if len(self._outbox) >= MAX_UNSENT and not self.closed.is_set():
            _log.error("a node reads too slowly and is given up", unsent=MAX_UNSENT)
            self.close()
        if not self.closed.is_set():
            self._outbox.append(message)
            self._wake.set()

    def close(self) -> None:
        self.closed.set()

    async def drain_to(self, context: Context) -> None:
        """Write what is sent, until cancelled."""
        numbers = link_codec.Numbers()
        while True:
            while self._outbox:
                message = self._outbox.popleft()
                numbers.stamp(message)
                await _write(context, message)
            self._wake.clear()
            try:
                async with asyncio.timeout(self._heartbeat):
                    await self._wake.wait()
            except TimeoutError:
                self.send(CoordinatorMessage(ping=Ping()))


async def _write(context: Context, message: CoordinatorMessage) -> None:
    """What is being written when this is cancelled is written to its end, unless the node takes nothing: gRPC cannot
    end a stream that still writes, and the node would not learn that it has ended."""
    writing = asyncio.ensure_future(link_codec.write(context.write, message, _FAILPOINT))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=_LAST_WRITE)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        raise


class NodeLink:
    def __init__(self, config: Config, dispatcher: Dispatcher, ledgers: Ledgers) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._ledgers = ledgers
        self._proof = link_proof(config.cluster_token)

    async def Attach(self, _: object, context: Context) -> None:
        """One node's stream, from its Join to its end."""
        await self._authenticate(context)
        stream = NodeStream(self._config.heartbeat)
        first = await self._first(context)
        try:
            if first.join.role == ROLE:
                incarnation = self._dispatcher.join_pool(pool_from_pb(first.join), stream)
            else:
                incarnation = self._dispatcher.join(self._announcement(first.join), stream)
        except ConfigError as error:
            _limited.write(_log.warning, "join refused", node=first.join.name, reason=error.message)
            refusal = Refusal(error=wire.error_to_pb(error), retry_seconds=error.retry_after or 0.0)
            await context.write(CoordinatorMessage(refusal=refusal))
            return
        try:
            await self._until_one_ends(self._read(context, incarnation), stream.drain_to(context), stream.closed.wait())
        except grpc.RpcError as error:
            _limited.write(_log.info, "stream broke", node=first.join.name, error=str(error))
        finally:
            stream.close()
            self._dispatcher.leave(incarnation, NodeGone(f"the stream of node {first.join.name} ended"))

    def _announcement(self, join: Join) -> JoinInfo:
        """Raises ConfigError, counted, for one that is no node's."""
        try:
            return join_from_pb(join)
        except ConfigError:
            self._dispatcher.brain.counters.joins["refused"] += 1
            raise

    async def _authenticate(self, context: Context) -> None:
        """The certificate has shown already that the node has the token. This proof of it also holds where somebody in
        between has ended TLS."""
        given = dict(context.invocation_metadata()).get(PROOF_KEY, b"")
        if hmac.compare_digest(given if isinstance(given, bytes) else b"", self._proof):
            return
        self._dispatcher.brain.counters.joins["unauthenticated"] += 1
        _limited.write(_log.warning, "wrong cluster token: a node was refused", peer=context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"metadata {PROOF_KEY} is missing or wrong")

    async def _first(self, context: Context) -> NodeMessage:
        try:
            async with asyncio.timeout(JOIN_TIMEOUT):
                message = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Join within {JOIN_TIMEOUT:g} s")
        if message is None or message is grpc.aio.EOF or not message.HasField("join"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Join")
        return message  # type: ignore[no-any-return]

    async def _read(self, context: Context, incarnation: Incarnation) -> None:
        counters, numbers = self._dispatcher.brain.counters, link_codec.Numbers()
        while (message := await context.read()) is not grpc.aio.EOF:
            if message is None:
                counters.dropped_messages["damaged"] += 1
                return
            try:
                if not numbers.is_new(message):
                    counters.dropped_messages["repeated"] += 1
                    continue
            except link_codec.MessagesLost as error:
                _limited.write(_log.warning, "messages lost", error=str(error))
                counters.dropped_messages["lost"] += 1
                return
            if message.incarnation != incarnation:
                counters.dropped_messages["stale"] += 1
                return
            try:
                report = input_from_pb(message)
            except ValueError as error:
                _limited.write(_log.warning, "a message makes no sense", error=str(error))
                counters.dropped_messages["damaged"] += 1
                return
            if report is not None:
                self._dispatcher.receive(incarnation, report)
            elif message.HasField("ledger"):
                self._ledgers.answered(incarnation, message.ledger)
            else:
                counters.dropped_messages["unexpected"] += 1

    @staticmethod
    async def _until_one_ends(*parts: Coroutine[Any, Any, object]) -> None:
        """Run all until one is done, then stop the others. Raises what it raised."""
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

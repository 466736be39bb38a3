"""Scripted nodes: they speak the real NodeLink over real gRPC and compute nothing.

A `FakeNode` does nothing by itself: a test reads its orders and sends its answers. `serve_prefill` and `serve_decode`
are scripts for those that need nodes which simply work; `expected_tokens` is what they answer.
"""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from baton import link_codec, wire
from baton.errors import BatonError, ConfigError
from baton.kv_layout import KVLayout
from baton.link_dialer import LinkDialer
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2
from baton.types import (
    AttemptKey,
    FinishReason,
    Incarnation,
    NodeName,
    PeerAddress,
    SegmentRef,
    Ticket,
    TicketId,
    TokenEvent,
    Work,
    mint_id,
)

VOCAB = 1000
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")


def token_at(prompt: Sequence[int], position: int) -> int:
    """A token that depends on the prompt and its place in the output."""
    return (sum(prompt) * 31 + position * 7 + len(prompt)) % VOCAB


def expected_tokens(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(token_at(prompt, position) for position in range(count))


def join_message(name: str, role: str, **changes: Any) -> pb.Join:
    fields: dict[str, Any] = {
        "protocol_version": wire.PROTOCOL_VERSION,
        "name": name,
        "role": role,
        "host_id": "fake-host",
        "transfer_endpoint": f"tcp://127.0.0.1:1#{name}",
        "pid": os.getpid(),
        "model_digest": "ab" * 32,
        "layout": wire.layout_to_pb(LAYOUT),
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_batched_tokens": 64,
        "max_model_len": 512,
        "vocab_size": VOCAB,
        "eos_token_ids": [2],
        "engine": "paced",
        "process": name,
    }
    return pb.Join(**(fields | changes))


@dataclass
class FakeNode:
    """One node's stream. Use as `async with FakeNode(address, "d0", "decode") as node`."""

    address: str
    name: str
    role: str
    token: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    incarnation: str = ""
    pings: int = 0

    def __post_init__(self) -> None:
        self.orders: asyncio.Queue[pb.CoordinatorMessage | None] = asyncio.Queue()
        self.cancelled: set[AttemptKey] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.die()

    def dial(self) -> Any:
        """A stream on which nothing has been said."""
        dialer = LinkDialer(self.token)
        self._channel = dialer.open_channel(self.address)
        self._call = dialer.dial(self._channel)
        return self._call

    async def join(self) -> pb.Welcome:
        """Dial and join. Raises the ConfigError of a refusal, or grpc's error."""
        self.dial()
        await self._call.write(pb.NodeMessage(join=join_message(self.name, self.role, **self.changes)))
        first = await self._call.read()
        if first is grpc.aio.EOF:
            raise ConfigError("the stream ended before a Welcome")
        if first.HasField("refusal"):
            await self._channel.close()
            raise wire.error_from_pb(first.refusal.error)
        self.incarnation = first.welcome.incarnation
        self.numbers = link_codec.Numbers()
        self._tasks.append(asyncio.create_task(self._read(first)))
        return first.welcome  # type: ignore[no-any-return]

    async def _read(self, welcome: pb.CoordinatorMessage) -> None:
        numbers = link_codec.Numbers()
        numbers.is_new(welcome)
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if not numbers.is_new(message):
                    continue
                if message.HasField("ping"):
                    self.pings += 1
                    continue
                if message.HasField("cancel"):
                    self.cancelled.add(wire.key_from_pb(message.cancel.key))
                self.orders.put_nowait(message)
        except grpc.RpcError:
            pass  # a cut stream ends like any other
        self.orders.put_nowait(None)

    async def order(self, kind: str, patience: float = 30.0) -> Any:
        """The next order, which must be of `kind`."""
        async with asyncio.timeout(patience):
            message = await self.orders.get()
        assert message is not None, f"{self.name}: the stream ended, expected {kind}"
        assert message.WhichOneof("message") == kind, f"{self.name}: expected {kind}, got {message}"
        return getattr(message, kind)

    async def ended(self, patience: float = 30.0) -> None:
        """Until the coordinator has ended the stream; orders before that are dropped."""
        async with asyncio.timeout(patience):
            while await self.orders.get() is not None:
                pass

    async def send(self, *, incarnation: str | None = None, **message: Any) -> None:
        stamp = self.incarnation if incarnation is None else incarnation
        async with self._writing:
            report = pb.NodeMessage(incarnation=stamp, **message)
            self.numbers.stamp(report)
            await self._call.write(report)

    async def heartbeat(self, **stats: Any) -> None:
        fields = {"blocks_total": 64, "blocks_free": 64} | stats
        await self.send(heartbeat=pb.Heartbeat(stats=pb.NodeStats(**fields)))

    async def reserve(self, submit: pb.Submit) -> Ticket:
        """Answer a Submit with a ticket for its writer."""
        ticket = self.ticket_for(submit)
        reserved = pb.Reserved(key=submit.work.key, ticket=wire.ticket_to_pb(ticket))
        await self.send(reserved=reserved)
        return ticket

    def ticket_for(self, submit: pb.Submit) -> Ticket:
        mine = Incarnation(self.incarnation)
        me = PeerAddress(NodeName(self.name), mine, "fake-host", "tcp://127.0.0.1:1")
        return Ticket(
            id=TicketId(mint_id()),
            key=wire.key_from_pb(submit.work.key),
            decode=me,
            writer=Incarnation(submit.writer.incarnation),
            first_block=0,
            offsets=(0,),
            num_tokens=len(submit.work.prompt.ids),
            ttl=10.0,
            transport="memory",
            segment=SegmentRef("fake", mine),
            fence=1,
        )

    async def tokens(self, key: AttemptKey, first: int, tokens: Sequence[int], finish: FinishReason | None) -> None:
        """Tokens `first`.. of the output in one message, the last one with `finish`."""
        events = [
            TokenEvent(key, first + n, token, finish if n == len(tokens) - 1 else None)
            for n, token in enumerate(tokens)
        ]
        await self.send(tokens=pb.Tokens(tokens=[wire.token_to_pb(event) for event in events]))

    async def failed(self, key: AttemptKey, error: BatonError) -> None:
        await self.send(failed=pb.AttemptFailed(key=wire.key_to_pb(key), error=wire.error_to_pb(error)))

    def run(self, script: Coroutine[Any, Any, None]) -> None:
        """A script that runs until the node dies."""
        self._tasks.append(asyncio.create_task(script))

    async def die(self) -> None:
        """As a killed process would: the connection is gone without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._channel.close(grace=None)


@dataclass
class FakePlane:
    """What stands for the transfer plane between scripted nodes: a commit is a future."""

    committed: dict[AttemptKey, asyncio.Future[None]] = field(default_factory=dict)

    def commit_of(self, key: AttemptKey) -> asyncio.Future[None]:
        return self.committed.setdefault(key, asyncio.get_running_loop().create_future())


async def serve_prefill(node: FakeNode, plane: FakePlane) -> None:
    """Computes at once, hands over when the ticket is there; answers alone when told to."""
    waiting: dict[AttemptKey, Work] = {}
    while (message := await node.orders.get()) is not None:
        match message.WhichOneof("message"):
            case "prefill":
                work = wire.work_from_pb(message.prefill.work)
                ended = pb.PrefillEnded(key=message.prefill.work.key, computed_tokens=len(work.context))
                await node.send(prefill_ended=ended)
                if message.prefill.alone:
                    token = token_at(work.request.prompt, len(work.emitted))
                    await node.tokens(work.key, len(work.emitted), [token], FinishReason.LENGTH)
                else:
                    waiting[work.key] = work
            case "ticket":
                key = wire.key_from_pb(message.ticket.ticket.key)
                if waiting.pop(key, None):
                    plane.commit_of(key).set_result(None)
                    report = common_pb2.HandoffReport(transport="memory", bytes=4096, slabs=2)
                    await node.send(handed_off=pb.HandedOff(key=message.ticket.ticket.key, report=report))
            case "cancel":
                waiting.pop(wire.key_from_pb(message.cancel.key), None)


async def serve_decode(node: FakeNode, plane: FakePlane, *, burst: int = 4, gap: float = 0.0) -> None:
    """Reserves, waits for the commit, and sends `burst` tokens a message until max_tokens."""
    known: set[AttemptKey] = set()
    async with asyncio.TaskGroup() as sequences:
        while (message := await node.orders.get()) is not None:
            if message.HasField("submit") and (key := wire.key_from_pb(message.submit.work.key)) not in known:
                known.add(key)
                sequences.create_task(_sequence(node, plane, message.submit, burst, gap))


async def _sequence(node: FakeNode, plane: FakePlane, submit: pb.Submit, burst: int, gap: float) -> None:
    work = wire.work_from_pb(submit.work)
    context = len(work.context)
    if submit.HasField("writer"):
        await node.reserve(submit)
        await plane.commit_of(work.key)
        await node.send(admitted=pb.Admitted(key=submit.work.key, received_tokens=context))
    else:
        await node.send(reserved=pb.Reserved(key=submit.work.key))
        await node.send(admitted=pb.Admitted(key=submit.work.key, computed_tokens=context))
    count, last = len(work.emitted), work.request.sampling.max_tokens
    while count < last and work.key not in node.cancelled:
        stop = min(count + burst, last)
        fresh = [token_at(work.request.prompt, position) for position in range(count, stop)]
        await node.tokens(work.key, count, fresh, FinishReason.LENGTH if stop == last else None)
        count = stop
        await asyncio.sleep(gap)

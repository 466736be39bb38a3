"""Scripted nodes: they speak the real NodeLink over real gRPC and compute nothing.

A `FakeNode` does nothing by itself: a test reads its orders and sends its answers. `serve_prefill`
and `serve_decode` are scripts for those that need nodes which simply work; `expected_tokens` is
what they answer.
"""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.dialer import CoordinatorDialer
from baton.cluster_link.messages import PROTOCOL_VERSION
from baton.cluster_link.order_codec import (
    attempt_key_from_pb,
    attempt_key_to_pb,
    attempt_spec_from_pb,
    ticket_to_pb,
)
from baton.cluster_link.report_codec import token_event_to_pb
from baton.cluster_link.stream import SequenceNumbers
from baton.errors import BatonError, ConfigError
from baton.kv.blocks import KVLayout
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2
from baton.types import (
    AttemptKey,
    AttemptSpec,
    FinishReason,
    Incarnation,
    NodeName,
    PeerAddress,
    SegmentRef,
    Ticket,
    TicketId,
    TokenEvent,
    mint_id,
)

VOCAB_SIZE = 1000
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")


def expected_token(prompt: Sequence[int], position: int) -> int:
    """A token that depends on the prompt and its place in the output."""
    return (sum(prompt) * 31 + position * 7 + len(prompt)) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(expected_token(prompt, position) for position in range(count))


def make_join_message(name: str, role: str, **changes: Any) -> pb.Join:
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
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
        "vocab_size": VOCAB_SIZE,
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
    cluster_token: str = ""
    join_overrides: dict[str, Any] = field(default_factory=dict)
    incarnation: str = ""
    ping_count: int = 0

    def __post_init__(self) -> None:
        self.orders: asyncio.Queue[pb.CoordinatorMessage | None] = asyncio.Queue()
        self.cancelled_keys: set[AttemptKey] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        await self.drop_connection()

    def open_stream(self) -> Any:
        """A stream on which nothing has been said."""
        dialer = CoordinatorDialer(self.cluster_token)
        self._channel = dialer.open_channel(self.address)
        self._call = dialer.open_stream(self._channel)
        return self._call

    async def join(self) -> pb.Welcome:
        """Dial and join. Raises the ConfigError of a refusal, or grpc's error."""
        self.open_stream()
        await self._call.write(
            pb.NodeMessage(join=make_join_message(self.name, self.role, **self.join_overrides))
        )
        first = await self._call.read()
        if first is grpc.aio.EOF:
            raise ConfigError("the stream ended before a Welcome")
        if first.HasField("refusal"):
            await self._channel.close()
            raise wire.error_from_pb(first.refusal.error)
        self.incarnation = first.welcome.incarnation
        self.sequence_numbers = SequenceNumbers()
        self._tasks.append(asyncio.create_task(self._read_orders(first)))
        return first.welcome  # type: ignore[no-any-return]

    async def _read_orders(self, welcome: pb.CoordinatorMessage) -> None:
        numbers = SequenceNumbers()
        numbers.accept_message(welcome)
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if not numbers.accept_message(message):
                    continue
                if message.HasField("ping"):
                    self.ping_count += 1
                    continue
                if message.HasField("cancel"):
                    self.cancelled_keys.add(attempt_key_from_pb(message.cancel.key))
                self.orders.put_nowait(message)
        except grpc.RpcError:
            pass  # a cut stream ends like any other
        self.orders.put_nowait(None)

    async def next_order(self, kind: str, patience: float = 30.0) -> Any:
        """The next order, which must be of `kind`."""
        async with asyncio.timeout(patience):
            message = await self.orders.get()
        assert message is not None, f"{self.name}: the stream ended, expected {kind}"
        assert message.WhichOneof("message") == kind, f"{self.name}: expected {kind}, got {message}"
        return getattr(message, kind)

    async def wait_stream_end(self, patience: float = 30.0) -> None:
        """Until the coordinator has ended the stream; orders before that are dropped."""
        async with asyncio.timeout(patience):
            while await self.orders.get() is not None:
                pass

    async def send_message(self, *, incarnation: str | None = None, **message: Any) -> None:
        stamp = self.incarnation if incarnation is None else incarnation
        async with self._writing:
            report = pb.NodeMessage(incarnation=stamp, **message)
            self.sequence_numbers.number_message(report)
            await self._call.write(report)

    async def send_heartbeat(self, **stats: Any) -> None:
        fields = {"blocks_total": 64, "blocks_free": 64} | stats
        await self.send_message(heartbeat=pb.Heartbeat(stats=pb.NodeStats(**fields)))

    async def send_reserved(self, submit: pb.Submit) -> Ticket:
        """Answer a Submit with a ticket for its writer."""
        ticket = self.make_ticket(submit)
        reserved = pb.Reserved(key=submit.work.key, ticket=ticket_to_pb(ticket))
        await self.send_message(reserved=reserved)
        return ticket

    def make_ticket(self, submit: pb.Submit) -> Ticket:
        mine = Incarnation(self.incarnation)
        me = PeerAddress(NodeName(self.name), mine, "fake-host", "tcp://127.0.0.1:1")
        return Ticket(
            id=TicketId(mint_id()),
            key=attempt_key_from_pb(submit.work.key),
            decode_peer=me,
            writer_incarnation=Incarnation(submit.writer.incarnation),
            first_block=0,
            block_offsets=(0,),
            num_tokens=len(submit.work.prompt.ids),
            ttl_seconds=10.0,
            transport="memory",
            segment=SegmentRef("fake", mine),
            fence_byte=1,
        )

    async def send_tokens(
        self, key: AttemptKey, first: int, tokens: Sequence[int], finish: FinishReason | None
    ) -> None:
        """Tokens `first`.. of the output in one message, the last one with `finish`."""
        events = [
            TokenEvent(key, first + n, token, finish if n == len(tokens) - 1 else None)
            for n, token in enumerate(tokens)
        ]
        await self.send_message(
            tokens=pb.Tokens(tokens=[token_event_to_pb(event) for event in events])
        )

    async def send_failed(self, key: AttemptKey, error: BatonError) -> None:
        await self.send_message(
            failed=pb.AttemptFailed(key=attempt_key_to_pb(key), error=wire.error_to_pb(error))
        )

    def run_script(self, script: Coroutine[Any, Any, None]) -> None:
        """A script that runs until the node dies."""
        self._tasks.append(asyncio.create_task(script))

    async def drop_connection(self) -> None:
        """As a killed process would: the connection is gone without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._channel.close(grace=None)


@dataclass
class FakeTransferPlane:
    """What stands for the transfer plane between scripted nodes: a commit is a future."""

    commits: dict[AttemptKey, asyncio.Future[None]] = field(default_factory=dict)

    def get_commit(self, key: AttemptKey) -> asyncio.Future[None]:
        return self.commits.setdefault(key, asyncio.get_running_loop().create_future())


async def serve_prefill(node: FakeNode, plane: FakeTransferPlane) -> None:
    """Computes at once, hands over when the ticket is there; answers alone when told to."""
    waiting: dict[AttemptKey, AttemptSpec] = {}
    while (message := await node.orders.get()) is not None:
        match message.WhichOneof("message"):
            case "prefill":
                work = attempt_spec_from_pb(message.prefill.work)
                ended = pb.PrefillEnded(
                    key=message.prefill.work.key, computed_tokens=len(work.context_token_ids)
                )
                await node.send_message(prefill_ended=ended)
                if message.prefill.alone:
                    token = expected_token(
                        work.request.prompt_token_ids, len(work.emitted_token_ids)
                    )
                    await node.send_tokens(
                        work.key, len(work.emitted_token_ids), [token], FinishReason.LENGTH
                    )
                else:
                    waiting[work.key] = work
            case "ticket":
                key = attempt_key_from_pb(message.ticket.ticket.key)
                if waiting.pop(key, None):
                    plane.get_commit(key).set_result(None)
                    report = common_pb2.HandoffReport(transport="memory", bytes=4096, slabs=2)
                    await node.send_message(
                        handed_off=pb.HandedOff(key=message.ticket.ticket.key, report=report)
                    )
            case "cancel":
                waiting.pop(attempt_key_from_pb(message.cancel.key), None)


async def serve_decode(
    node: FakeNode, plane: FakeTransferPlane, *, burst: int = 4, gap: float = 0.0
) -> None:
    """Reserves, waits for the commit, and sends `burst` tokens a message until max_tokens."""
    known: set[AttemptKey] = set()
    async with asyncio.TaskGroup() as sequences:
        while (message := await node.orders.get()) is not None:
            if (
                message.HasField("submit")
                and (key := attempt_key_from_pb(message.submit.work.key)) not in known
            ):
                known.add(key)
                sequences.create_task(_serve_sequence(node, plane, message.submit, burst, gap))


async def _serve_sequence(
    node: FakeNode, plane: FakeTransferPlane, submit: pb.Submit, burst: int, gap: float
) -> None:
    work = attempt_spec_from_pb(submit.work)
    context = len(work.context_token_ids)
    if submit.HasField("writer"):
        await node.send_reserved(submit)
        await plane.get_commit(work.key)
        await node.send_message(admitted=pb.Admitted(key=submit.work.key, received_tokens=context))
    else:
        await node.send_message(reserved=pb.Reserved(key=submit.work.key))
        await node.send_message(admitted=pb.Admitted(key=submit.work.key, computed_tokens=context))
    count, last = len(work.emitted_token_ids), work.request.sampling.max_tokens
    while count < last and work.key not in node.cancelled_keys:
        stop = min(count + burst, last)
        fresh = [
            expected_token(work.request.prompt_token_ids, position)
            for position in range(count, stop)
        ]
        await node.send_tokens(
            work.key, count, fresh, FinishReason.LENGTH if stop == last else None
        )
        count = stop
        await asyncio.sleep(gap)

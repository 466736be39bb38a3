"""`python -m benchmarks.clusters.instant_nodes`: a prefill and a decode node without a model.

They answer at once over the node link with its real codec, so that what is left of a request's time
is the coordinator's. Decode sends one message per step with a token of every sequence, as a real
node does; steps follow each other after `--step` seconds, or as fast as the stream takes them. The
process ends with the coordinator.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import deque
from typing import Any

import grpc

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.dialer import CoordinatorDialer
from baton.cluster_link.messages import PROTOCOL_VERSION
from baton.cluster_link.stream import SequenceNumbers
from baton.kv.blocks import KVLayout
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2
from baton.types import Role, mint_id

_LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")
_MAX_SEQUENCES = 4096
_TOTAL_BLOCKS = 1 << 20
_MAX_CONTEXT = 1 << 16
# The coordinator may start later than the nodes.
_RETRY_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
)


class InstantNode:
    """One stream to the coordinator: reports in order, and a heartbeat when there are none."""

    def __init__(self, role: Role, vocabulary: int) -> None:
        self._role = role
        self._vocabulary = vocabulary
        self._incarnation = ""
        self._unsent: deque[pb.NodeMessage] = deque()
        self._has_report = asyncio.Event()
        self._all_sent = asyncio.Event()  # whether every queued report has been written

    async def run(self, address: str, token: str) -> None:
        dialer = CoordinatorDialer(token)
        async with dialer.open_channel(address, _RETRY_OPTIONS) as channel:
            await channel.channel_ready()
            call = dialer.open_stream(channel)
            await call.write(pb.NodeMessage(join=self._join()))
            welcome = (await call.read()).welcome
            self._incarnation = welcome.incarnation
            writing = asyncio.create_task(self._write_reports(call, welcome.heartbeat_seconds))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    self.on_message(message)
            except grpc.RpcError:
                pass  # the coordinator has ended, so the nodes do too
            finally:
                writing.cancel()

    def on_message(self, message: pb.CoordinatorMessage) -> None:
        raise NotImplementedError

    def send_report(self, **report: Any) -> None:
        self._unsent.append(pb.NodeMessage(incarnation=self._incarnation, **report))
        self._has_report.set()
        self._all_sent.clear()

    async def _write_reports(self, call: Any, heartbeat: float) -> None:
        numbers = SequenceNumbers()
        while True:
            while self._unsent:
                message = self._unsent.popleft()
                numbers.number_message(message)
                await call.write(message)
            self._all_sent.set()
            self._has_report.clear()
            try:
                async with asyncio.timeout(heartbeat):
                    await self._has_report.wait()
            except TimeoutError:
                stats = pb.NodeStats(blocks_total=_TOTAL_BLOCKS, blocks_free=_TOTAL_BLOCKS)
                self.send_report(heartbeat=pb.Heartbeat(stats=stats))

    def _join(self) -> pb.Join:
        return pb.Join(
            protocol_version=PROTOCOL_VERSION,
            name=f"instant-{self._role.value}",
            role=self._role.value,
            host_id="bench",
            transfer_endpoint=f"tcp://127.0.0.1:1#{self._role.value}",
            pid=os.getpid(),
            model_digest="00" * 32,
            layout=wire.layout_to_pb(_LAYOUT),
            num_blocks=_TOTAL_BLOCKS,
            max_num_seqs=_MAX_SEQUENCES,
            max_batched_tokens=_MAX_CONTEXT,
            max_model_len=_MAX_CONTEXT,
            vocab_size=self._vocabulary,
            engine="model",
            process=f"instant-{self._role.value}",
        )


class InstantPrefill(InstantNode):
    """Reports a prompt as computed at once, and as handed over when its ticket comes."""

    def __init__(self, vocabulary: int, decode: "InstantDecode") -> None:
        super().__init__(Role.PREFILL, vocabulary)
        self._decode = decode

    def on_message(self, message: pb.CoordinatorMessage) -> None:
        if message.HasField("prefill"):
            work = message.prefill.work
            self.send_report(
                prefill_ended=pb.PrefillEnded(key=work.key, computed_tokens=len(work.prompt.ids))
            )
            if message.prefill.alone:
                token = pb.Token(
                    key=work.key,
                    index=len(work.emitted.ids),
                    finish=common_pb2.FINISH_REASON_LENGTH,
                )
                self.send_report(tokens=pb.Tokens(tokens=[token]))
        elif message.HasField("ticket"):
            key = message.ticket.ticket.key
            self._decode.start_decoding(key)
            report = common_pb2.HandoffReport(transport="none", bytes=1, slabs=1)
            self.send_report(handed_off=pb.HandedOff(key=key, report=report))


class InstantDecode(InstantNode):
    """Grants a ticket at once, and then sends a token of every sequence in each step."""

    def __init__(self, vocabulary: int, step: float) -> None:
        super().__init__(Role.DECODE, vocabulary)
        self._step = step
        self._submitted: dict[str, pb.Work] = {}
        self._running: dict[str, tuple[pb.AttemptKey, list[int]]] = {}  # next index, last index
        self._has_running = asyncio.Event()

    def on_message(self, message: pb.CoordinatorMessage) -> None:
        if message.HasField("submit"):
            work = message.submit.work
            self._submitted[work.key.request_id] = work
            if message.submit.HasField("writer"):
                self.send_report(
                    reserved=pb.Reserved(key=work.key, ticket=self._make_ticket(message.submit))
                )
            else:
                self.start_decoding(work.key)
        elif message.HasField("cancel"):
            self._submitted.pop(message.cancel.key.request_id, None)
            self._running.pop(message.cancel.key.request_id, None)

    def start_decoding(self, key: pb.AttemptKey) -> None:
        """Start a sequence whose hand-off has committed."""
        work = self._submitted.pop(key.request_id, None)
        if work is not None:
            self.send_report(admitted=pb.Admitted(key=key, received_tokens=len(work.prompt.ids)))
            sequence = (key, [len(work.emitted.ids), work.sampling.max_tokens - 1])
            self._send_tokens([sequence])
            if sequence[1][0] <= sequence[1][1]:
                self._running[key.request_id] = sequence
                self._has_running.set()

    async def run_steps(self) -> None:
        """Run steps for ever."""
        due = time.monotonic()
        while True:
            if not self._running:
                self._has_running.clear()
                await self._has_running.wait()
                due = time.monotonic()
            due += self._step
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._all_sent.wait()
            self._send_tokens(list(self._running.values()))
            self._running = {
                request_id: sequence
                for request_id, sequence in self._running.items()
                if sequence[1][0] <= sequence[1][1]
            }

    def _send_tokens(self, sequences: list[tuple[pb.AttemptKey, list[int]]]) -> None:
        tokens = pb.Tokens()
        for key, place in sequences:
            index, last = place
            finish = (
                common_pb2.FINISH_REASON_LENGTH
                if index == last
                else common_pb2.FINISH_REASON_UNSPECIFIED
            )
            tokens.tokens.add(
                key=key, index=index, token=index * 7 % self._vocabulary, finish=finish
            )
            place[0] += 1
        self.send_report(tokens=tokens)

    def _make_ticket(self, submit: pb.Submit) -> pb.Ticket:
        me = pb.Peer(
            name="instant-decode",
            incarnation=self._incarnation,
            host_id="bench",
            transfer_endpoint="none",
        )
        return pb.Ticket(
            id=mint_id(),
            key=submit.work.key,
            decode=me,
            writer=submit.writer.incarnation,
            offsets=[0],
            num_tokens=len(submit.work.prompt.ids),
            ttl_seconds=10.0,
            transport="none",
            segment="none",
            fence=1,
        )


async def run_instant_nodes(address: str, token: str, vocabulary: int, step: float) -> None:
    """Run both nodes until the coordinator ends."""
    decode = InstantDecode(vocabulary, step)
    prefill = InstantPrefill(vocabulary, decode)
    stepping = asyncio.create_task(decode.run_steps())
    await asyncio.gather(prefill.run(address, token), decode.run(address, token))
    stepping.cancel()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clusters.instant_nodes", description=__doc__
    )
    parser.add_argument("address", help="HOST:PORT of the coordinator's cluster port")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--step", type=float, default=0.0, help="seconds (default 0)")
    options = parser.parse_args(arguments)
    asyncio.run(
        run_instant_nodes(
            options.address,
            os.environ.get("BATON_CLUSTER_TOKEN", ""),
            options.vocabulary,
            options.step,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

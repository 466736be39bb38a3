"""The stream of a node or pool to the coordinator: join, heartbeats, commands, reports, rejoin.

The life of a link:

    dial -> Join -> Welcome(incarnation) -> commands and reports -> broken or silent -> dial again
                 -> Refusal: the process ends with a line that names the field that differs,
                    or keeps trying if it was a member before
                 -> Refusal with a retry time: the process logs the reason and dials again then

A member that stops closes its stream in order: everything queued is written, the member's direction
is closed, and the coordinator, which has then read all of it, ends the stream.

After a broken stream the member dials at once, then with growing pauses. It drops the work of the
old incarnation when the new Welcome arrives, or after `silence` seconds without one, whichever is
first. Everything here runs on the member's event loop. gRPC errors do not leave this file.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import grpc

from baton.cluster_link import stream as link_stream
from baton.cluster_link.dialer import CoordinatorDialer, describe_link_failure, is_token_mismatch
from baton.cluster_link.join_codec import encode_join
from baton.cluster_link.messages import (
    ArmFailpoints,
    Heartbeat,
    JoinInfo,
    JoinRefusal,
    LedgerReport,
    LinkControl,
    NodeOrder,
    NodeReport,
    Ping,
    PoolJoinInfo,
    Welcome,
)
from baton.cluster_link.order_codec import decode_order
from baton.cluster_link.report_codec import encode_report
from baton.cluster_link.report_types import NodeStats
from baton.errors import ConfigError
from baton.limits import MAX_UNSENT_MESSAGES
from baton.process import log
from baton.process.failpoints import FAILPOINTS
from baton.process.log_rate_limit import RateLimitedLogger
from baton.types import Incarnation, mint_id

CLOSE_TIMEOUT_SECONDS = 3.0  # for the coordinator to read what is queued and to end the stream

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between dials
_REFUSED_PAUSE = 5.0  # longest pause in seconds between dials to a coordinator that refuses us
_REMINDERS_PER_SECOND = 1 / 30  # log lines about a coordinator that is unreachable or refuses us
_REFUSED_CODES = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED})


class _JoinDeferred(Exception):
    """The coordinator refuses this member for at least `seconds`."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.seconds = seconds


class _MemberChanged(Exception):
    """The member has changed since it sent its Join."""


class LinkMember(Protocol):
    """What the link calls, on the event loop and in the order of the stream's messages."""

    def build_join(self) -> JoinInfo | PoolJoinInfo:
        """Describe the member as it is now; the link fills in `process`."""
        ...

    def build_stats(self) -> NodeStats:
        """Return the statistics that the next heartbeat carries."""
        ...

    def on_joined(self, incarnation: Incarnation) -> None:
        """Drop the work of the previous incarnation: the member has joined under a new one."""
        ...

    def on_coordinator_lost(self) -> None:
        """Drop the work of the last incarnation: the coordinator has been silent for too long."""
        ...


class CoordinatorLink:
    """Keeps one member joined to the coordinator. Owns the stream."""

    def __init__(
        self,
        member: LinkMember,
        *,
        on_order: Callable[[NodeOrder], None],
        address: str,
        token: str,
        silence: float,
    ) -> None:
        """`on_order` is called with each order, as the methods of `member` are."""
        self._member = member
        self._on_order = on_order
        self._address = address
        self._dialer = CoordinatorDialer(token)
        self._silence = silence
        self._incarnation = Incarnation("")
        # None is the end of the member's direction: `close` puts it behind the last report.
        self._unsent: asyncio.Queue[NodeReport | LedgerReport | None] = asyncio.Queue(
            MAX_UNSENT_MESSAGES
        )
        self._overflow = asyncio.Event()  # the coordinator reads too slowly
        self._member_changed = asyncio.Event()  # the last Join is out of date
        self._is_closing = False  # no more reports are queued, and no more streams opened
        self._session_ended = asyncio.Event()
        self._was_member = False
        self._process_id = mint_id(64)  # distinguishes processes of equal name
        self._heard_at = 0.0  # time of the coordinator's last message, on the loop's clock
        self._lost_timer: asyncio.TimerHandle | None = None
        self._log = log.get_logger("link")
        self._rate_limited_log = RateLimitedLogger(burst=1, per_second=_REMINDERS_PER_SECOND)

    @property
    def is_joined(self) -> bool:
        return bool(self._incarnation)

    def send(self, report: NodeReport | LedgerReport, sender: Incarnation) -> None:
        """Queue a report. A report of another incarnation than the present one is dropped."""
        if self.is_joined and sender == self._incarnation and not self._is_closing:
            self._queue_message(report)

    async def wait_until_flushed(self) -> None:
        """Wait until every queued message is written, or its stream has ended."""
        await self._unsent.join()

    def rejoin(self) -> None:
        """End the stream, if there is one, and join again: the member has changed."""
        if not self._is_closing:
            self._member_changed.set()

    async def close(self) -> None:
        """Write every queued message, close the member's direction, and await the stream's end.

        Returns after CLOSE_TIMEOUT_SECONDS at the latest, and at once if there is no stream. It
        opens no other stream; cancel `run` afterwards.
        """
        self._is_closing = True
        if not self.is_joined:
            return
        self._queue_message(None)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await self._session_ended.wait()
        except TimeoutError:
            self._log.warning(
                "the coordinator did not end the stream, disconnecting",
                address=self._address,
                seconds=CLOSE_TIMEOUT_SECONDS,
            )

    async def run(self) -> None:
        """Keep the stream until cancelled or closed.

        Raises ConfigError when the coordinator refuses us.
        """
        pause = _FIRST_PAUSE
        self._heard_at = asyncio.get_running_loop().time()  # silence is counted from here
        while not self._is_closing:
            longest, least = _LONGEST_PAUSE, 0.0
            try:
                async with self._dialer.open_channel(self._address) as channel:
                    await self._run_session(self._dialer.open_stream(channel))
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSED_CODES or is_token_mismatch(error):
                    longest = _REFUSED_PAUSE
                self._on_unreachable(error)
            except ConfigError as error:
                longest = _REFUSED_PAUSE
                self._on_refused(error.message)
            except _JoinDeferred as refusal:
                least = min(refusal.seconds, _REFUSED_PAUSE)
                self._log_refusal("join refused for now, retrying", refusal.reason)
            except TimeoutError:
                self._log.warning(
                    "no message from the coordinator, reconnecting",
                    address=self._address,
                    seconds=self._silence,
                )
            except _MemberChanged:
                self._log.info("role or pool changed, rejoining")
            if self.is_joined:
                self._on_disconnected()
                pause = _FIRST_PAUSE
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # A task group that raises an error of its own forgets the cancellation.
                raise asyncio.CancelledError
            await asyncio.sleep(max(least, pause * random.uniform(0.5, 1.0)))
            pause = min(pause * 2, longest)

    def _on_unreachable(self, error: grpc.aio.AioRpcError) -> None:
        """Log a failed dial. Raises ConfigError if dialling again cannot succeed."""
        if is_token_mismatch(error):
            self._on_refused(
                f"coordinator {self._address}: wrong cluster token: "
                "give this process its --cluster-token"
            )
        elif error.code() in _REFUSED_CODES:
            self._on_refused(
                f"coordinator {self._address}: {error.details()}: check --cluster-token"
            )
        else:
            self._log_unreachable(describe_link_failure(error))

    def _log_unreachable(self, code: str) -> None:
        """Log at debug level at first: a coordinator that restarts is away for a moment."""
        seconds_away = asyncio.get_running_loop().time() - self._heard_at
        if seconds_away < self._silence:
            self._log.debug("coordinator unreachable", address=self._address, code=code)
            return
        self._rate_limited_log.log_event(
            self._log.warning,
            "coordinator unreachable",
            address=self._address,
            code=code,
            seconds=round(seconds_away, 1),
        )

    def _on_refused(self, reason: str) -> None:
        """Raise ConfigError, unless this process was a member before.

        A former member keeps trying: the coordinator may be being replaced, or the link be damaged.
        """
        if not self._was_member:
            raise ConfigError(reason)
        self._log_refusal("rejoin refused, retrying", reason)

    def _log_refusal(self, event: str, reason: str) -> None:
        """Log a refusal at a bounded rate."""
        self._rate_limited_log.log_event(self._log.error, event, reason=reason)

    def _on_disconnected(self) -> None:
        self._incarnation = Incarnation("")
        loop = asyncio.get_running_loop()
        self._lost_timer = loop.call_at(
            self._heard_at + self._silence, self._member.on_coordinator_lost
        )

    async def _run_session(self, call: grpc.aio.StreamStreamCall) -> None:
        """Run one stream from Join to its end.

        Raises AioRpcError, TimeoutError or _MemberChanged when it ends for that reason, and what
        `_receive_welcome` raises.
        """
        self._member_changed.clear()
        self._session_ended.clear()
        try:
            join = replace(self._member.build_join(), process=self._process_id)
            await call.write(encode_join(join))
            numbers = link_stream.SequenceNumbers()
            heartbeat = await self._receive_welcome(call, numbers)
            async with asyncio.TaskGroup() as tasks:
                loops = (
                    self._wait_for_change(),
                    self._send_queued(call),
                    self._send_heartbeats(heartbeat),
                    self._wait_for_overflow(),
                )
                running = [tasks.create_task(loop) for loop in loops]
                await self._receive_messages(call, numbers)
                for task in running:
                    task.cancel()
        except* (grpc.aio.AioRpcError, TimeoutError, _MemberChanged) as group:
            raise _first_error(group) from None
        finally:
            call.cancel()
            self._session_ended.set()

    async def _receive_welcome(
        self, call: grpc.aio.StreamStreamCall, numbers: link_stream.SequenceNumbers
    ) -> float:
        """Wait for the Welcome and start the new incarnation. Returns the heartbeat in seconds.

        Raises ConfigError for a refusal, _JoinDeferred for one with a retry time, and TimeoutError
        if there is no Welcome.
        """
        async with asyncio.timeout(self._silence):
            first = await call.read()
        if first is grpc.aio.EOF or first is None:
            raise TimeoutError
        match decode_order(first):
            case Welcome() as welcome:
                pass
            case JoinRefusal(error, retry_seconds):
                if retry_seconds > 0:
                    raise _JoinDeferred(error.message, retry_seconds)
                raise ConfigError(f"the coordinator refused this node: {error.message}")
            case _:
                self._log.warning("no welcome from the coordinator, reconnecting")
                raise TimeoutError
        self._heard_at = asyncio.get_running_loop().time()
        numbers.accept_message(first)
        while not self._unsent.empty():
            self._unsent.get_nowait()
            self._unsent.task_done()
        if self._lost_timer is not None:
            self._lost_timer.cancel()
        self._overflow.clear()
        self._was_member = True
        self._silence = welcome.silence_seconds
        self._incarnation = welcome.incarnation
        self._member.on_joined(self._incarnation)
        self._log.info("joined the cluster", incarnation=self._incarnation)
        return welcome.heartbeat_seconds

    async def _receive_messages(
        self, call: grpc.aio.StreamStreamCall, numbers: link_stream.SequenceNumbers
    ) -> None:
        while True:
            async with asyncio.timeout(self._silence):
                message = await call.read()
            if message is grpc.aio.EOF:
                return
            if message is None:
                self._log.warning("corrupt message from the coordinator, reconnecting")
                return
            self._heard_at = asyncio.get_running_loop().time()
            try:
                order = decode_order(message) if numbers.accept_message(message) else None
            except link_stream.MessagesLost as error:
                self._log.warning(
                    "messages from the coordinator lost, reconnecting", error=str(error)
                )
                return
            except ValueError as error:
                self._log.warning(
                    "malformed message from the coordinator, reconnecting", error=str(error)
                )
                return
            self._handle_order(order)

    def _handle_order(self, order: NodeOrder | LinkControl | None) -> None:
        match order:
            case ArmFailpoints(spec):
                FAILPOINTS.arm(spec)
            case Welcome() | JoinRefusal() | Ping() | None:  # None: repeated, or of a later version
                pass
            case _:
                self._on_order(order)

    def _queue_message(self, message: NodeReport | LedgerReport | None) -> None:
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self._overflow.set()

    async def _send_queued(self, call: grpc.aio.StreamStreamCall) -> None:
        numbers = link_stream.SequenceNumbers()
        while True:
            report = await self._unsent.get()
            try:
                if report is None:
                    await call.done_writing()
                    return
                message = encode_report(report, self._incarnation)
                numbers.number_message(message)
                await link_stream.send_message(call.write, message, "link.node.send")
            except asyncio.InvalidStateError:  # the call has ended: the reader gets the error
                return
            finally:
                self._unsent.task_done()

    async def _wait_for_overflow(self) -> None:
        await self._overflow.wait()
        self._log.error(
            "send queue to the coordinator full, reconnecting", unsent=MAX_UNSENT_MESSAGES
        )
        raise TimeoutError

    async def _wait_for_change(self) -> None:
        await self._member_changed.wait()
        raise _MemberChanged

    async def _send_heartbeats(self, seconds: float) -> None:
        while True:
            self.send(Heartbeat(self._member.build_stats()), self._incarnation)
            await asyncio.sleep(seconds)


def _first_error(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

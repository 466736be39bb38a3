"""Clients that misbehave, as a process of their own: `python -m tests.abuse.attacks KIND SECONDS
ADDRESSES`.

ADDRESSES is a JSON object of host:port by the name of a port (http, grpc, admin, cluster). The
process takes the lowest priority, prints a line when it is ready, attacks for SECONDS, and prints
how often which answer came, as JSON.
"""

import asyncio
import json
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.pb import generation_pb2, generation_pb2_grpc
from tests.abuse.hostile_grammars import encode_grammar_bodies

Addresses = Mapping[str, str]
AnswerCounts = Counter[str]
_Item = TypeVar("_Item")
_MIB = 1 << 20
_SOCKETS = 1200  # at each port
_WATCHES = 5000
END_GRACE_SECONDS = 40.0  # for answers that are still to come when an attack's time is over
_HALF_BODIES = 150
_SILENT_CALLS = 200
_STALLED_SMALL, _STALLED_LARGE = 80, 40  # bodies
_SLOW_READERS = 8
_GRAMMARS, _GRAMMAR_LANES = 240, 2
_ALPHABET = "abc ÄÖß 漢字かな 🙂\n\t🚀{}[]\\"


def mixed_text(length: int, seed: int) -> str:
    """Text of scripts that a tokenizer finds few merges for; `length` in characters."""
    return "".join(random.Random(seed).choices(_ALPHABET, k=length))


def hostile_bodies() -> list[tuple[bytes, dict[str, str]]]:
    """Bodies just within the bound of 4 MiB, and headers: long texts, many small things, deep and
    doubled ones."""
    text = mixed_text(_MIB, 1)
    json_type = {"content-type": "application/json"}
    biases = {str(token): 1.0 for token in range(300_000)}
    values: list[object] = [
        {"prompt": text, "max_tokens": 1},
        {"prompt": [mixed_text(8192, seed) for seed in range(128)], "max_tokens": 1},
        {"prompt": "a", "max_tokens": 1, "logit_bias": biases},
        {"prompt": [[1]] * 400_000, "max_tokens": 1},
        {"prompt": "a", "max_tokens": 1, "stop": ["x"] * 300_000},
    ]
    bodies = [(json.dumps(value, ensure_ascii=False).encode(), json_type) for value in values]
    chat = {
        "messages": [{"role": "user", "content": mixed_text(1500, seed)} for seed in range(700)],
        "max_tokens": 1,
    }
    bodies.append(
        (
            json.dumps(chat, ensure_ascii=False).encode(),
            {**json_type, "path": "/v1/chat/completions"},
        )
    )
    bodies.append((b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", json_type))
    bodies.append(
        (b"{" + b", ".join(b'"k%d": 0' % (n % 7) for n in range(300_000)) + b"}", json_type)
    )
    page = {"content-type": "text/plain", "origin": "http://elsewhere.example"}
    bodies.append((json.dumps(values[0], ensure_ascii=False).encode(), page))
    return [(body, headers) for body, headers in bodies if len(body) <= 4 * _MIB]


async def attack_with_bodies(where: Addresses, until: float, answers: AnswerCounts) -> None:
    bodies = hostile_bodies()

    async def send_in_turn(lane: int) -> None:
        for body, headers in _cycle_until(
            bodies[lane % len(bodies) :] + bodies[: lane % len(bodies)], until
        ):
            answers[await _post(where["http"], body, headers)] += 1

    await asyncio.gather(*(send_in_turn(lane) for lane in range(8)))


async def attack_with_grammars(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Structured outputs under grammars that explode, each another one.

    Outputs are short and few at once, so that the grammars are the attack: eight clients with
    outputs of 32 tokens and no grammar delay others more than the bound by themselves.
    """
    bodies = encode_grammar_bodies(_GRAMMARS)

    async def send_in_turn(lane: int) -> None:
        for body in _cycle_until(bodies[lane::_GRAMMAR_LANES], until):
            answers[await _post(where["http"], body, {"content-type": "application/json"})] += 1

    await asyncio.gather(*(send_in_turn(lane) for lane in range(_GRAMMAR_LANES)))


async def attack_over_grpc(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Send long texts and long lists over gRPC."""
    requests = [
        generation_pb2.GenerateRequest(text=mixed_text(_MIB, 2), max_tokens=1),
        generation_pb2.GenerateRequest(text="a", max_tokens=1, stop=["x"] * 500_000),
        generation_pb2.GenerateRequest(
            text="a", max_tokens=1, logit_bias={token: 1.0 for token in range(200_000)}
        ),
    ]
    async with grpc.aio.insecure_channel(where["grpc"]) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        async def send_in_turn() -> None:
            for request in _cycle_until(requests, until):
                try:
                    await stub.GenerateOnce(request, timeout=30)
                    answers["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    answers[error.code().name] += 1

        await asyncio.gather(*(send_in_turn() for _ in range(4)))


async def attack_with_silent_calls(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Calls on one connection that never send a message, begun again as soon as they end."""
    async with grpc.aio.insecure_channel(where["grpc"]) as channel:
        methods = [
            channel.stream_unary(f"/baton.v1.{name}")
            for name in ("Generation/GenerateOnce", "Cluster/Status")
        ]

        async def call_in_turn() -> None:
            for method in _cycle_until(methods, until):
                call = method(timeout=max(0.1, until - time.monotonic()))
                answers[(await call.code()).name] += 1

        await asyncio.gather(*(call_in_turn() for _ in range(_SILENT_CALLS)))


async def attack_with_stalled_bodies(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Small and large bodies of which one byte comes, begun again as soon as they are refused."""

    async def stall(length: int) -> None:
        while time.monotonic() < until:
            try:
                reader, writer = await asyncio.open_connection(*_parse_address(where["http"]))
            except OSError:
                answers["refused"] += 1
                await asyncio.sleep(0.1)
                continue
            with suppress(OSError, TimeoutError):
                writer.write(
                    _request_head("/v1/completions", length, {"content-type": "application/json"})
                    + b"{"
                )
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    line = (await reader.readline()).decode().split(" ")
                answers[line[1] if len(line) > 1 else "closed"] += 1
            writer.close()

    lengths = [1000] * _STALLED_SMALL + [4 * _MIB] * _STALLED_LARGE
    await asyncio.gather(*(stall(length) for length in lengths))


async def attack_with_idle_sockets(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Open connections to every port and send nothing."""
    held: list[asyncio.StreamWriter] = []
    for address in where.values():
        for _ in range(_SOCKETS):
            try:
                _, writer = await asyncio.wait_for(
                    asyncio.open_connection(*_parse_address(address)), 2.0
                )
                held.append(writer)
                answers["connected"] += 1
            except (OSError, TimeoutError):
                answers["refused"] += 1
            if time.monotonic() > until:
                break
    await _sleep_until(until)
    for writer in held:
        writer.close()


async def attack_with_half_bodies(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Bodies of 4 MiB of which a byte a second comes once a quarter is there."""

    async def send_half() -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*_parse_address(where["http"]))
            try:
                writer.write(
                    _request_head("/v1/completions", 4 * _MIB, {"content-type": "application/json"})
                )
                writer.write(b'{"prompt": "' + b"a" * _MIB)
                answer = asyncio.create_task(reader.readline())
                while not answer.done() and time.monotonic() < until:
                    writer.write(b"a")
                    await asyncio.wait({answer}, timeout=1.0)
                answers[
                    answer.result().decode().strip() or "closed" if answer.done() else "held"
                ] += 1
                answer.cancel()
            finally:
                writer.close()

    await asyncio.gather(*(send_half() for _ in range(_HALF_BODIES)))


async def attack_with_slow_readers(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Open streams and read nothing."""
    body = json.dumps(
        {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}
    ).encode()

    async def never_read() -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(*_parse_address(where["http"]), limit=256)
            writer.write(
                _request_head("/v1/completions", len(body), {"content-type": "application/json"})
                + body
            )
            answers["asked"] += 1
            await _sleep_until(until)
            writer.close()

    await asyncio.gather(*(never_read() for _ in range(_SLOW_READERS)))


async def attack_with_watches(where: Addresses, until: float, answers: AnswerCounts) -> None:
    """Streams of Health/Watch on one connection, without a key."""
    async with grpc.aio.insecure_channel(where["grpc"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def watch() -> None:
            try:
                call = stub.Watch(
                    health_pb2.HealthCheckRequest(), timeout=max(0.1, until - time.monotonic())
                )
                async for _ in call:
                    answers["watched"] += 1
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1

        await asyncio.gather(*(watch() for _ in range(_WATCHES)))


ATTACKS: dict[str, Callable[[Addresses, float, AnswerCounts], Awaitable[None]]] = {
    "hostile bodies": attack_with_bodies,
    "hostile grammars": attack_with_grammars,
    "hostile messages over gRPC": attack_over_grpc,
    "idle sockets": attack_with_idle_sockets,
    "half-sent bodies": attack_with_half_bodies,
    "silent calls": attack_with_silent_calls,
    "stalled bodies": attack_with_stalled_bodies,
    "slow readers": attack_with_slow_readers,
    "health watches": attack_with_watches,
}


def _cycle_until(items: Sequence[_Item], until: float) -> Iterator[_Item]:
    """Run each of them in turn until the time is over."""
    while items:
        for item in items:
            if time.monotonic() >= until:
                return
            yield item


async def _post(address: str, body: bytes, headers: Mapping[str, str]) -> str:
    """Return the status of the answer, or the name of the error."""
    others = {name: value for name, value in headers.items() if name != "path"}
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*_parse_address(address))
            try:
                writer.write(
                    _request_head(headers.get("path", "/v1/completions"), len(body), others) + body
                )
                return (await reader.readline()).decode().split(" ")[1]
            finally:
                writer.close()
    except (OSError, IndexError, TimeoutError) as error:
        return type(error).__name__


def _request_head(path: str, length: int, headers: Mapping[str, str]) -> bytes:
    lines = {"host": "127.0.0.1", "content-length": str(length), "connection": "close", **headers}
    return (
        f"POST {path} HTTP/1.1\r\n"
        + "".join(f"{name}: {lines[name]}\r\n" for name in lines)
        + "\r\n"
    ).encode()


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def _sleep_until(until: float) -> None:
    await asyncio.sleep(max(0.0, until - time.monotonic()))


def main() -> None:
    kind, seconds, where = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
    os.nice(19)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    answers: AnswerCounts = Counter()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    # Some calls of thousands on one connection never end, not even when they are cancelled, where
    # the client gets little of the CPU: the attack is over some time after its end all the same.
    limit = threading.Timer(seconds + END_GRACE_SECONDS, _report_and_exit, [answers])
    limit.daemon = True
    limit.start()
    asyncio.run(_attack_for(kind, where, seconds, answers))


async def _attack_for(kind: str, where: Addresses, seconds: float, answers: AnswerCounts) -> None:
    await ATTACKS[kind](where, time.monotonic() + seconds, answers)
    _report_and_exit(answers)


def _report_and_exit(answers: AnswerCounts) -> None:
    """End the process now, whatever the event loop and the libraries still wait for."""
    line = json.dumps(answers.copy()).encode()
    os.write(sys.stdout.fileno(), line)
    os._exit(0)


if __name__ == "__main__":
    main()

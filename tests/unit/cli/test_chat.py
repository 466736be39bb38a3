"""A conversation against an endpoint of OpenAI's shape that can be told how to behave."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from baton.cli.client.chat_history import ChatHistory
from tests.unit.cli.conftest import Run

ROOT = Path(__file__).resolve().parents[3]
Capture = pytest.CaptureFixture[str]
Script = Callable[["ScriptedChatEndpoint", BaseHTTPRequestHandler, dict[str, Any]], None]


def delta(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def begin(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()


def chunk(handler: BaseHTTPRequestHandler, text: str) -> None:
    data = text.encode()
    handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    handler.wfile.flush()


def event(handler: BaseHTTPRequestHandler, data: Any) -> None:
    """Cut in two chunks where no line ends."""
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
    chunk(handler, text[:9])
    chunk(handler, text[9:])


def answer(*pieces: str, finish: str = "stop", done: bool = True) -> Script:
    def script(
        endpoint: "ScriptedChatEndpoint", handler: BaseHTTPRequestHandler, body: dict[str, Any]
    ) -> None:
        begin(handler)
        event(
            handler,
            {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]},
        )
        for piece in pieces:
            event(handler, delta(piece))
        event(handler, delta("", finish))
        event(handler, {"choices": [], "usage": {"total_tokens": 3}})
        if done:
            event(handler, "[DONE]")
        chunk(handler, "")

    return script


def refuse(status: int, **error: str) -> Script:
    def script(
        endpoint: "ScriptedChatEndpoint", handler: BaseHTTPRequestHandler, body: dict[str, Any]
    ) -> None:
        reply(handler, status, {"error": error} if error else "<html>")

    return script


def reply(handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@dataclass
class ScriptedChatEndpoint:
    """Answers one request after the other by `scripts`; the last stays."""

    scripts: list[Script] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@pytest.fixture
def endpoint() -> Iterator[ScriptedChatEndpoint]:
    endpoint = ScriptedChatEndpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            endpoint.keys.append(self.headers["Authorization"])
            reply(self, 200, {"object": "list", "data": [{"id": "demo", "object": "model"}]})

        def do_POST(self) -> None:
            endpoint.keys.append(self.headers["Authorization"])
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.bodies.append(body)
            script = endpoint.scripts.pop(0) if len(endpoint.scripts) > 1 else endpoint.scripts[0]
            script(endpoint, self, body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that leave in the middle are what some tests are for."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        endpoint.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def talk(
    endpoint: ScriptedChatEndpoint, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    def with_input(lines: str, *options: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return run("chat", "--url", endpoint.url, *options)

    return with_input


def contents(body: dict[str, Any]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in body["messages"]]


def test_a_conversation_carries_its_history(
    endpoint: ScriptedChatEndpoint, talk: Callable[..., int], capsys: Capture
) -> None:
    endpoint.scripts = [answer("Hel", "lo"), answer("wörld")]
    options = (
        "--system",
        "be brief",
        "--temperature",
        "0.5",
        "--max-tokens",
        "9",
        "--api-key",
        "sesame",
    )
    assert talk("hi\n\nand?\n", *options) == 0
    assert capsys.readouterr() == ("Hello\nwörld\n", "")
    first, second = endpoint.bodies
    assert contents(first) == ["system: be brief", "user: hi"]
    assert contents(second) == ["system: be brief", "user: hi", "assistant: Hello", "user: and?"]
    assert (first["model"], first["stream"], first["temperature"], first["max_tokens"]) == (
        "demo",
        True,
        0.5,
        9,
    )
    assert set(endpoint.keys) == {"Bearer sesame"}


def test_unset_options_are_not_sent(
    endpoint: ScriptedChatEndpoint, talk: Callable[..., int]
) -> None:
    endpoint.scripts = [answer("x")]
    assert talk("hi\n", "--model", "other") == 0
    assert endpoint.bodies[0].keys() == {"model", "messages", "stream"}
    assert endpoint.bodies[0]["model"] == "other"


def test_reset_quit_and_unknown_commands(
    endpoint: ScriptedChatEndpoint, talk: Callable[..., int], capsys: Capture
) -> None:
    endpoint.scripts = [answer("x")]
    assert talk("one\n/reset\n/what\ntwo\n/quit\nthree\n", "--system", "s") == 0
    assert [contents(body)[1:] for body in endpoint.bodies] == [["user: one"], ["user: two"]]
    assert capsys.readouterr().err.splitlines()[0] == "(forgotten)"


def test_oldest_turns_are_dropped_when_the_context_is_full(
    endpoint: ScriptedChatEndpoint, talk: Callable[..., int], capsys: Capture
) -> None:
    full = refuse(400, message="prompt has 99 tokens", code="context_length_exceeded")
    endpoint.scripts = [answer("1"), answer("2"), full, full, answer("3")]
    assert talk("a\nb\nc\n", "--system", "s") == 0
    out, err = capsys.readouterr()
    assert out == "1\n2\n3\n"
    assert err.splitlines() == ["(the context is full: the oldest turn is forgotten)"] * 2
    assert contents(endpoint.bodies[-1]) == ["system: s", "user: c"]


def test_bytes_that_are_not_utf8_are_replaced(
    endpoint: ScriptedChatEndpoint, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.scripts = [answer("1")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), "utf-8"))
    assert run("chat", "--url", endpoint.url) == 0
    assert contents(endpoint.bodies[-1]) == ["user: a\ufffdb"]


def test_a_question_that_never_fits_is_an_error_and_forgotten(
    endpoint: ScriptedChatEndpoint, talk: Callable[..., int], capsys: Capture
) -> None:
    full = refuse(400, message="prompt has 99 tokens", code="context_length_exceeded")
    endpoint.scripts = [full, answer("2")]
    assert talk("a\nb\n") == 1
    assert capsys.readouterr() == ("2\n", "(error: prompt has 99 tokens)\n")
    assert contents(endpoint.bodies[-1]) == ["user: b"]


def failing_midway(
    endpoint: ScriptedChatEndpoint, handler: BaseHTTPRequestHandler, body: dict[str, Any]
) -> None:
    begin(handler)
    event(handler, delta("half"))
    event(handler, {"error": {"message": "the node is gone", "code": "node_gone"}})
    chunk(handler, "")


def cut_off(
    endpoint: ScriptedChatEndpoint, handler: BaseHTTPRequestHandler, body: dict[str, Any]
) -> None:
    begin(handler)
    event(handler, delta("half"))
    handler.close_connection = True


def gibberish(
    endpoint: ScriptedChatEndpoint, handler: BaseHTTPRequestHandler, body: dict[str, Any]
) -> None:
    begin(handler)
    event(handler, "{oops")
    chunk(handler, "")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            refuse(429, message="1024 requests are waiting", code="overloaded"),
            "error: 1024 requests are waiting",
        ),
        (refuse(502), "error: the endpoint answers 502"),
        (failing_midway, "error: the node is gone"),
        (cut_off, "was lost"),
        (answer("half", done=False), "the response ended early"),
        (gibberish, "an event is not JSON"),
    ],
)
def test_an_error_ends_the_answer_and_not_the_conversation(
    endpoint: ScriptedChatEndpoint,
    talk: Callable[..., int],
    capsys: Capture,
    script: Script,
    message: str,
) -> None:
    endpoint.scripts = [script, answer("fine")]
    assert talk("a\nb\n") == 1
    out, err = capsys.readouterr()
    assert out in ("fine\n", "half\nfine\n", "half\n\nfine\n")
    assert message in err
    assert contents(endpoint.bodies[-1]) == ["user: b"]


def test_an_answer_that_was_cut_says_so(
    endpoint: ScriptedChatEndpoint, talk: Callable[..., int], capsys: Capture
) -> None:
    endpoint.scripts = [answer("x", finish="length")]
    assert talk("a\n") == 0
    assert "--max-tokens" in capsys.readouterr().err


def test_answers_do_not_steer_the_terminal(
    endpoint: ScriptedChatEndpoint, talk: Callable[..., int], capsys: Capture
) -> None:
    endpoint.scripts = [answer("a\x1b[2Jb\tc\n\x07\x9bd")]
    assert talk("a\n") == 0
    assert capsys.readouterr().out == "a[2Jb\tc\nd\n"


def test_unreachable_and_invalid_urls(
    endpoint: ScriptedChatEndpoint, run: Run, capsys: Capture
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert run("chat", "--url", f"http://127.0.0.1:{held.getsockname()[1]}") == 3
    assert run("chat", "--url", "ftp://x") == 2
    assert "is not an http://" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(endpoint: ScriptedChatEndpoint) -> None:
    """A process of its own, which gets a real SIGINT while its answer comes; what came stays in the
    conversation."""

    def endless(
        endpoint: ScriptedChatEndpoint, handler: BaseHTTPRequestHandler, body: dict[str, Any]
    ) -> None:
        begin(handler)
        event(handler, delta("so far"))
        handler.rfile.read(1)  # until the client hangs up
        handler.close_connection = True
        endpoint.hung_up.set()

    endpoint.scripts = [endless, answer("again")]
    command = [sys.executable, "-m", "baton.cli", "chat", "--url", endpoint.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.write(process.stdin.fileno(), b"go on\n")
        assert process.stdout.read(6) == b"so far"
        process.send_signal(signal.SIGINT)
        assert endpoint.hung_up.wait(20)
        out, err = process.communicate(b"more\n", timeout=30)
    assert (process.returncode, out, err) == (0, b"\nagain\n", b"(stopped)\n")
    assert contents(endpoint.bodies[-1]) == ["user: go on", "assistant: so far", "user: more"]


def test_chat_history() -> None:
    talk = ChatHistory("s")
    assert not talk.drop_oldest_turn()
    talk.add_question("q")
    talk.add_answer("")
    assert talk.messages == [{"role": "system", "content": "s"}]
    talk.add_question("q")
    assert not talk.drop_oldest_turn()
    talk.add_answer("a")
    talk.add_question("r")
    assert (talk.answered_turns, talk.drop_oldest_turn(), talk.answered_turns) == (1, True, 0)
    assert [message["content"] for message in talk.history] == ["r"]

"""Requests as bytes: JSON that no encoder would write, framing that no client would send, and
connections that end when they like."""

import http.client
import socket
import struct
from dataclasses import dataclass, field

from hypothesis import strategies as st

FIELDS = (
    "prompt messages model max_tokens temperature top_k top_p seed stop stop_token_ids stream "
    "stream_options n echo logprobs logit_bias user suffix tools response_format tokens metadata "
    "add_special_tokens role content node timeout"
).split()
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GOOD = {
    "/v1/completions": b'"prompt":[1,2,3],"max_tokens":3',
    "/v1/chat/completions": b'"messages":[{"role":"user","content":"hello"}],"max_tokens":3',
    "/tokenize": b'"prompt":"hello"',
    "/detokenize": b'"tokens":[1,2,3]',
}
_NUMBERS = (
    b"0 -0 1 -1 1.5 1e999 -1e999 1e-999 01 .5 1. 0x10 NaN Infinity 1e5 18446744073709551616"
).split()
_TEXTS = (
    b'""',
    b'"a"',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\x00"',
    b'"\n"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b'"\\x"',
)
_WORDS = (*b"null true false nul [ ] { } , // [] {} 'a'".split(), b"\xef\xbb\xbf")
_SPACES = (b"", b"", b" ", b"\n", b"\t", b" \r\n", b"\x0b")


def _atoms() -> st.SearchStrategy[bytes]:
    nested = st.builds(
        lambda depth, opening, closed: opening[0] * depth + (opening[1] * depth if closed else b""),
        st.sampled_from([3, 100, 500, 900, 980, 990, 995, 1000, 1100, 20_000]),
        st.sampled_from([(b"[", b"]"), (b'{"a":', b"}")]),
        st.booleans(),
    )
    digits = st.integers(1, 5000).map(lambda count: b"9" * count)
    long = st.integers(1, 70_000).map(lambda count: b'"' + b"x" * count + b'"')
    return st.one_of(st.sampled_from([*_NUMBERS, *_TEXTS, *_WORDS]), digits, nested, long)


def _values() -> st.SearchStrategy[bytes]:
    return st.recursive(
        _atoms(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda items: b"[" + b",".join(items) + b"]"),
            st.lists(_pair(inner), max_size=4).map(lambda items: b"{" + b",".join(items) + b"}"),
        ),
        max_leaves=6,
    )


def _pair(value: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The names are few, so that some are given twice."""
    return st.builds(
        lambda name, before, value: b'"%b"%b:%b' % (name.encode(), before, value),
        st.sampled_from(FIELDS),
        st.sampled_from(_SPACES),
        value,
    )


@st.composite
def body_strategy(draw: st.DrawFn, path: str) -> bytes:
    """A good body with more in it, or with something done to it."""
    good = GOOD.get(path, b'"node":"nobody"')
    more = b"".join(b"," + pair for pair in draw(st.lists(_pair(_values()), max_size=3)))
    body = b"{%b%b}" % (good, more)
    match draw(st.sampled_from(["whole", "whole", "whole", "cut", "stuffed", "doubled", "value"])):
        case "cut":
            return body[: draw(st.integers(0, len(body)))]
        case "stuffed":
            at = draw(st.integers(0, len(body)))
            return body[:at] + draw(st.binary(min_size=1, max_size=6)) + body[at:]
        case "doubled":
            return body + body
        case "value":
            return draw(_values())
    return body


_JSON = b"application/json"
_TYPES = (
    _JSON,
    _JSON,
    _JSON,
    _JSON,
    None,
    b"text/plain",
    b"application/x-www-form-urlencoded",
    b"multipart/form-data",
)
_HEADERS = (
    b"x-request-id: mine",
    b"x-request-id: \xff\xfe",
    b"x-request-id:",
    b"x-request-timeout: 20",
    b"x-request-timeout: nan",
    b"x-request-timeout: -1",
    b"x-request-timeout: 1e999",
    b"x-request-timeout: 1_0",
    b"authorization: Bearer \xe9",
    b"authorization: Basic Og==",
    b"content-encoding: gzip",
    b"accept: text/html",
    b"accept-encoding: \x01",
    b"cookie: " + b"c" * 5000,
    b"expect: 100-continue",
    b"upgrade: websocket\r\nconnection: upgrade",
    b"connection: close, keep-alive",
    b"host: other.example\r\nhost: third.example",
    b"x-forwarded-for: 10.0.0.1",
    b"transfer-encoding: gzip",
    b"no colon here",
    b": no name",
    b"folded: a\r\n b",
    b"nul: a\x00b",
    b"\xc3\xa9: name",
    b"range: bytes=0-1",
    b"big: " + b"b" * 70_000,
)
_METHODS = (
    b"POST",
    b"POST",
    b"POST",
    b"POST",
    b"GET",
    b"PUT",
    b"OPTIONS",
    b"HEAD",
    b"DELETE",
    b"post",
    b"P\x00ST",
)
_ODD_PATHS = (
    b"/",
    b"//v1/completions",
    b"/v1/../admin",
    b"/%00",
    b"/\xff",
    b"*",
    b"http://x/v1/models",
    b"/v1/models?" + b"q" * 9000,
)
_FRAMINGS = (
    "length",
    "length",
    "length",
    "chunked",
    "short",
    "long",
    "none",
    "both",
    "twice",
    "negative",
    "bad chunk",
)
WHOLE_FRAMINGS = ("length", "chunked")  # framings of which the answer is known to come
_ENDINGS = ("read", "read", "close", "reset", "half", "cut")


@dataclass(frozen=True)
class RawExchange:
    """What is written on one connection, in pieces, and how it ends then: `read` waits for an
    answer, `half` says that no more comes, `cut` does not even send it all."""

    pieces: tuple[bytes, ...] = field(repr=False)
    ending: str
    expects_answer: bool  # there must be an answer
    request_line: bytes

    def perform(self, port: int, patience: float = 60.0) -> tuple[int, bytes] | None:
        """The status and body of the first answer, if there is one to read."""
        connection = socket.create_connection(
            ("127.0.0.1", port), timeout=patience if self.expects_answer else 0.2
        )
        with connection:
            try:
                for piece in self.pieces:
                    connection.sendall(piece)
                if self.ending == "half":
                    connection.shutdown(socket.SHUT_WR)
                if self.ending == "reset":
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                if self.ending not in ("read", "half"):
                    return None
                return _answer(connection)
            except (http.client.HTTPException, OSError):
                assert not self.expects_answer, f"no answer to {self}"
                return None


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(connection, method="POST")
    response.begin()
    return response.status, response.read()


@st.composite
def exchange_strategy(draw: st.DrawFn, paths: tuple[str, ...] = PATHS) -> RawExchange:
    path = draw(st.sampled_from(paths))
    body = draw(body_strategy(path))
    streamed = path.startswith("/v1") and draw(st.booleans())
    if streamed and body.startswith(b"{") and body.endswith(b"}"):
        body = body[:-1] + b',"stream":true}'
    target = draw(
        st.one_of(st.just(path.encode()), st.just(path.encode()), st.sampled_from(_ODD_PATHS))
    )
    method, framing = draw(st.sampled_from(_METHODS)), draw(st.sampled_from(_FRAMINGS))
    kind = draw(st.sampled_from(_TYPES))
    odd = draw(st.lists(st.sampled_from(_HEADERS), max_size=2))
    lines = [
        b"%b %b HTTP/1.1" % (method, target),
        b"host: x",
        *([b"content-type: " + kind] if kind else []),
        *odd,
    ]
    sent = (
        b"\r\n".join([*lines, *_framing(framing, len(body))]) + b"\r\n\r\n" + _framed(framing, body)
    )
    ending = draw(st.sampled_from(_ENDINGS))
    if ending == "cut":
        sent = sent[: draw(st.integers(0, len(sent)))]
    at = draw(st.integers(0, len(sent)))
    plain = method == b"POST" and target == path.encode() and not odd
    answered = plain and framing in WHOLE_FRAMINGS and ending == "read"
    return RawExchange(
        (sent[:at], sent[at:]), ending, answered, sent[:200] + b" ... " + body[-200:]
    )


def _framing(framing: str, size: int) -> list[bytes]:
    length = b"content-length: %d"
    return {
        "length": [length % size],
        "chunked": [b"transfer-encoding: chunked"],
        "bad chunk": [b"transfer-encoding: chunked"],
        "short": [length % (size + 5)],
        "long": [length % max(size - 5, 0)],
        "none": [],
        "both": [length % size, b"transfer-encoding: chunked"],
        "twice": [length % size, length % (size + 1)],
        "negative": [b"content-length: -1"],
    }[framing]


def _framed(framing: str, body: bytes) -> bytes:
    if framing not in ("chunked", "both", "bad chunk"):
        return body
    half = len(body) // 2
    chunks = [chunk for chunk in (body[:half], body[half:]) if chunk]
    framed = b"".join(b"%x;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return b"zz\r\n" + framed if framing == "bad chunk" else framed

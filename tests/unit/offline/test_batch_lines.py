"""Lines of batch files: what is a request, and how answers are written."""

import json
from typing import Any

import pytest

from baton.errors import DeadlineExceeded
from offline.batch.batch_lines import (
    MAX_CUSTOM_ID_CHARACTERS,
    BadLine,
    count_tokens,
    decode_answer_key,
    encode_answer,
    encode_error,
    find_custom_id,
    parse_request,
)
from offline.endpoint import EndpointAnswer
from tests.unit.offline.batch_files import request_line

GOOD = request_line("a")


def encode(line: object) -> bytes:
    return json.dumps(line).encode()


def test_a_body_is_passed_on_as_it_is_written() -> None:
    body = b'{ "prompt": "\\u00e4 \xc3\xa4", "temperature": 1.50, "unknown": [1, {}]}'
    request = parse_request(
        3,
        b'{"body": %b, "url": "/v1/chat/completions", '
        b'"method": "POST", "custom_id": "x", "more": 1}' % body,
    )
    assert (request.number, request.custom_id, request.path) == (3, "x", "/v1/chat/completions")
    assert request.body == body


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": None}, "custom_id is null: it must be a text of 1 to 512 characters"),
        ({"custom_id": ""}, 'custom_id is "": it must be'),
        ({"custom_id": 7}, "custom_id is 7: it must be"),
        ({"custom_id": "x" * 513}, f'custom_id is "{"x" * 63}...: it must be'),
        ({"method": "GET"}, 'method is "GET": it must be POST'),
        ({"url": "/v1/embeddings"}, 'url is "/v1/embeddings": it must be /v1/chat/completions or'),
        ({"url": ["/v1/completions"]}, 'url is ["/v1/completions"]: it must be'),
        ({"body": [1]}, "body is [1]: it must be an object"),
        ({"body": {"stream": True}}, "body.stream is given: answers of a batch are not streamed"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadLine) as caught:
        parse_request(12, encode(GOOD | change))
    assert str(caught.value).startswith(f"line 12: {message}")
    assert caught.value.custom_id == (None if "custom_id" in change else "a")


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "body"])
def test_missing_fields_are_named(field: str) -> None:
    with pytest.raises(BadLine, match=f"line 1: {field} is missing: it must be"):
        parse_request(1, encode({name: GOOD[name] for name in GOOD if name != field}))


@pytest.mark.parametrize(
    "line",
    [
        *(b"not json", b"[]", b"null", b'"text"', b"{", b"\xff\xfe", b"[" * 9999),
        b'{"custom_id": "a"} 1',
        *(
            b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %b}' % body
            for body in (b"[" * 99999, b'{"prompt": "\xff"}', b"{]")
        ),
    ],
)
def test_other_lines_are_no_requests(line: bytes) -> None:
    with pytest.raises(BadLine, match="line 9: it is not a JSON object"):
        parse_request(9, line)


def test_ids_of_bad_lines_are_found_where_they_are_whole() -> None:
    assert find_custom_id(encode(GOOD | {"method": 3, "body": 1})) == "a"
    assert find_custom_id(encode({"custom_id": "ä" * MAX_CUSTOM_ID_CHARACTERS})) is not None
    for line in (b"{", b"[]", b"", b"\xff", encode({"custom_id": 3}), encode({}), b"[" * 9999):
        assert find_custom_id(line) is None


def test_an_answer_has_the_format_of_openai() -> None:
    body = b'{\n "choices": [],\n "usage": {"completion_tokens": 5}}'
    answer = EndpointAnswer(200, "abc", body)
    line = encode_answer(parse_request(1, encode(GOOD)), answer)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    decoded = json.loads(line)
    assert decoded.pop("id").startswith("batch_req_")
    assert decoded == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "abc", "body": json.loads(body)},
        "error": None,
    }
    assert count_tokens(answer) == 5
    assert not decode_answer_key(line).is_failure


def test_an_answer_that_is_no_json_is_kept_as_a_message() -> None:
    answer = EndpointAnswer(502, "", b"<h1>\xff")
    line = encode_answer(parse_request(1, encode(GOOD)), answer)
    assert json.loads(line)["response"]["body"] == {"error": {"message": "<h1>\ufffd"}}
    assert count_tokens(answer) == 0
    assert decode_answer_key(line).is_failure


def test_an_error_names_its_line() -> None:
    line = encode_error(8, None, DeadlineExceeded("too slow"))
    decoded = json.loads(line)
    assert (decoded["custom_id"], decoded["response"]) == (None, None)
    assert decoded["error"] == {
        "code": "deadline_exceeded",
        "message": "too slow",
        "param": None,
        "line": 8,
    }
    key = decode_answer_key(line)
    assert key.error is not None
    assert (key.custom_id, key.error.line, key.is_failure) == (None, 8, True)

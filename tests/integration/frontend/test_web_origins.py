"""Web pages of other origins may call only with a key, or where they are allowed to."""

import pytest

from tests.integration.frontend.frontend_harness import running_frontend

GOOD = {"prompt": [1, 2], "max_tokens": 2}
FOREIGN_ORIGIN = {"origin": "https://evil.example"}
ORIGINS = {
    "https://evil.example": 403,
    "http://evil.example:{port}": 403,
    "null": 403,
    "http://[": 403,
    "http://10.9.8.7": 403,
    "http://localhost:3000": 200,
    "http://127.0.0.1:{port}": 200,
    "http://[::1]": 200,
    "https://chat.example": 200,
}


@pytest.mark.parametrize("origin", ORIGINS)
async def test_cross_origin_calls_need_an_api_key(origin: str) -> None:
    async with running_frontend(origins=frozenset({"https://chat.example"})) as front:
        headers = {"origin": origin.format(port=front.http_port)}
        answer = await front.http.post("/v1/completions", json=GOOD, headers=headers)
        assert answer.status_code == ORIGINS[origin], answer.text
        if answer.status_code == 403:
            assert answer.json()["error"]["code"] == "foreign_origin"
            assert "--allowed-origins" in answer.json()["error"]["message"]
        else:
            assert answer.headers.get("access-control-allow-origin") == (
                origin if "chat" in origin else None
            )


@pytest.mark.parametrize("origin", ["https://chat.example", "https://other.example"])
async def test_preflight_requests_need_no_key(origin: str) -> None:
    """Browsers send them without one, and pages then read the headers that clients need."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    async with running_frontend(
        origins=frozenset({"https://chat.example"}), api_key="secret"
    ) as front:
        headers = {"origin": origin}
        preflight = await front.http.options("/v1/chat/completions", headers=headers | asked)
        is_allowed = origin == "https://chat.example"
        assert preflight.status_code == (200 if is_allowed else 400)
        key = {"authorization": "Bearer secret"}
        answer = await front.http.post("/v1/completions", json=GOOD, headers=headers | key)
        assert answer.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        assert "x-baton-request-id" in answer.headers["access-control-expose-headers"]


async def test_dns_rebinding_origin_is_refused() -> None:
    async with running_frontend() as front:
        headers = {"origin": "http://evil.example", "host": "evil.example"}
        assert (
            await front.http.post("/v1/completions", json=GOOD, headers=headers)
        ).status_code == 403
        headers = {
            "host": "inside.example"
        }  # no web page: a client that calls this machine by a name
        assert (
            await front.http.post("/v1/completions", json=GOOD, headers=headers)
        ).status_code == 200


async def test_api_key_replaces_the_origin_check() -> None:
    async with running_frontend(api_key="secret") as front:
        assert (
            await front.http.post("/v1/completions", json=GOOD, headers=FOREIGN_ORIGIN)
        ).status_code == 200
        headers = FOREIGN_ORIGIN | {"authorization": "Bearer wrong"}
        assert (
            await front.http.post("/v1/completions", json=GOOD, headers=headers)
        ).status_code == 401

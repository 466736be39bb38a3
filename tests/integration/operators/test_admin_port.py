"""The admin port."""

import pytest

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.operators.admin_app import UNBUILT_ROUTES
from tests.integration.frontend.frontend_harness import running_frontend

TOKEN = "open-sesame"


async def test_state_is_protobuf_json() -> None:
    async with running_frontend() as front:
        status = (await front.admin.get("/admin/status")).json()
        assert (status["ready"], status["queued"], status["running"], status["nodes"]) == (
            True,
            2,
            0,
            [],
        )
        ledger = (await front.admin.get("/admin/ledger")).json()["ledgers"][0]
        assert (ledger["node"], ledger["total"], ledger["in_use"], ledger["owners"]) == (
            "decode-0",
            10,
            0,
            [],
        )
        metrics = await front.admin.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        assert "baton_up 1.0" in metrics.text


async def test_explain_by_http() -> None:
    async with running_frontend() as front:
        assert (await front.admin.get("/admin/explain/known")).json()["prompt_tokens"] == 3
        unknown = await front.admin.get("/admin/explain/nobody")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_drain_by_http() -> None:
    async with running_frontend() as front:
        answer = await front.admin.post("/admin/drain", json={"node": "d0", "timeout": 2.5})
        assert (answer.status_code, answer.json()["service"]) == (200, "draining")
        assert front.backend.drain_calls == [("d0", 2.5)]
        answer = await front.admin.post("/admin/drain", json={"node": "d0", "undrain": True})
        assert (answer.json()["service"], front.backend.drain_calls) == ("in", [])
        for body in (b"{", b"{}", b'{"node": 1}', b'{"node": "d0", "until": 1}'):
            bad = await front.admin.post("/admin/drain", content=body)
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_request")


async def test_cross_origin_drain_is_refused() -> None:
    async with running_frontend() as front:
        page = {"origin": "http://evil.example"}
        answer = await front.admin.post("/admin/drain", json={"node": "d0"}, headers=page)
        assert (answer.status_code, front.backend.drain_calls) == (401, [])


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip", "via"])
async def test_proxied_drain_is_refused(header: str) -> None:
    """Its address is this machine's, whoever the caller was."""
    async with running_frontend() as front:
        answer = await front.admin.post(
            "/admin/drain", json={"node": "d0"}, headers={header: "for=203.0.113.9"}
        )
        assert (answer.status_code, front.backend.drain_calls) == (401, [])
        assert "--admin-token" in answer.json()["error"]["message"]


async def test_ratio_by_http() -> None:
    async with running_frontend() as front:
        shown = (await front.admin.get("/admin/ratio")).json()
        assert (shown["prefill"], shown["decode"], shown["possible"]) == (1, 2, "1:2, 2:1")
        answer = await front.admin.post("/admin/ratio", json={"ratio": "2:1", "flip_timeout": 2.5})
        assert (answer.status_code, answer.json()["target_prefill"]) == (200, 2)
        await front.admin.post("/admin/ratio", json={"ratio": "1:2"})
        assert front.backend.ratio_targets == [(RoleSplit(2, 1), 2.5), (RoleSplit(1, 2), None)]
        for body in (
            b"{",
            b"{}",
            b'{"ratio": "2"}',
            b'{"ratio": 2}',
            b'{"ratio": "2:1", "when": 1}',
        ):
            bad = await front.admin.post("/admin/ratio", content=body)
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_request")


async def test_probes_and_health_follow_readiness() -> None:
    async with running_frontend() as front:
        assert (await front.admin.get("/readyz")).status_code == 200
        assert (await front.http.get("/health")).status_code == 200
        front.readiness.set_reason("no decode node has joined")
        assert (await front.admin.get("/livez")).status_code == 200
        for response in (await front.admin.get("/readyz"), await front.http.get("/health")):
            assert response.status_code == 503
            assert "no decode node has joined" in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "method"), UNBUILT_ROUTES)
async def test_unimplemented_routes_say_so(path: str, method: str) -> None:
    async with running_frontend() as front:
        response = await front.admin.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (501, "not_available")


async def test_admin_token_guards_every_route_even_on_loopback() -> None:
    async with running_frontend(admin_token=TOKEN) as front:
        paths = [route.path for route in front.apps[1].routes]
        assert "/metrics" in paths
        for path in paths:
            assert (await front.admin.get(path)).status_code == 401
            wrong = await front.admin.get(path, headers={"authorization": f"Bearer {TOKEN}!"})
            assert wrong.status_code == 401
        right = await front.admin.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        assert right.status_code == 200


async def test_admin_errors_have_the_common_shape() -> None:
    async with running_frontend() as front:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("GET", "/livez/", 404),
            ("DELETE", "/livez", 405),
            ("GET", "/admin/drain", 405),
        ):
            response = await front.admin.request(method, path)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_ratio_advice_and_auto_ratio_by_http() -> None:
    async with running_frontend() as front:
        told = (await front.admin.get("/admin/ratio/advice", params={"slo": "ttft=1s"})).json()
        assert (told["slo"], told["prefill"]) == ("ttft=1000ms", 2)
        bad = await front.admin.get("/admin/ratio/advice", params={"slo": "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "slo")
        on = await front.admin.post(
            "/admin/ratio", json={"auto": True, "slo": "tpot=30ms", "flip_timeout": 2.5}
        )
        assert on.json()["automatic"] is True
        await front.admin.post("/admin/ratio", json={"auto": True})
        await front.admin.post("/admin/ratio", json={"auto": False})
        assert front.backend.auto_ratio_calls == [(Slo(tpot_seconds=0.03), 2.5), (None, None), None]
        for body in (
            {},
            {"auto": True, "ratio": "1:2"},
            {"ratio": "1:2", "slo": "ttft=1s"},
            {"auto": True, "slo": "x"},
        ):
            assert (await front.admin.post("/admin/ratio", json=body)).status_code == 400

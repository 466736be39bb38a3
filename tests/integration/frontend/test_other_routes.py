"""What the HTTP port answers beside generation: models by name, HEAD, /ping, /metrics where it is
asked for, and /docs, which needs no other host."""

import re

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from coordinator.frontend.http.app import PUBLIC_PATHS
from tests.integration.frontend.frontend_harness import FrontendHarness, running_frontend

NESTED_MODEL_NAME = "org/family/demo"


@pytest.mark.parametrize("name", ["demo", NESTED_MODEL_NAME])
async def test_model_is_found_by_its_name(name: str) -> None:
    async with running_frontend(model=name) as front:
        listed = (await front.http.get("/v1/models")).json()["data"]
        found = await front.http.get(f"/v1/models/{name}")
        assert (found.status_code, found.json()) == (200, listed[0])
        assert (await front.http.get(f"/v1/models/{name.replace('/', '%2F')}")).json() == listed[0]
        for other in ("other", f"{name}/", f"{name}/x"):
            missing = await front.http.get(f"/v1/models/{other}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )


async def test_model_lookup_without_nodes_is_unavailable() -> None:
    async with running_frontend() as front:
        front.backend.has_no_nodes = True
        assert (await front.http.get("/v1/models/demo")).status_code == 503


def list_get_routes(app: Starlette) -> list[str]:
    """Paths that answer GET and have nothing to be filled in."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = [route.path for route in routes if "GET" in (route.methods or ())]
    return [path for path in found if "{" not in path]


async def test_head_is_get_without_its_body() -> None:
    async with running_frontend(metrics_on_http=True) as front:
        for client, app in ((front.http, front.apps[0]), (front.admin, front.apps[1])):
            for path in [*list_get_routes(app), "/v1/models/demo", "/no/such/route"]:
                whole, head = await client.get(path), await client.head(path)
                assert (head.status_code, head.content) == (whole.status_code, b""), path
                for name in ("content-type", "content-length") if whole.is_success else ():
                    assert head.headers[name] == whole.headers[name]
        assert (await front.http.head("/v1/completions")).status_code == 405


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
async def test_ping_is_health(method: str) -> None:
    async with running_frontend(api_key="sesame") as front:
        assert (
            await front.http.request(method, "/ping", headers={"authorization": ""})
        ).status_code == 200
        front.readiness.set_reason("waiting for a decode node")
        assert (await front.http.request(method, "/ping")).status_code == 503


async def test_metrics_are_not_on_the_http_port_unless_asked_for() -> None:
    async with running_frontend() as front:
        assert (await front.http.get("/metrics")).status_code == 404


async def test_metrics_on_the_http_port_equal_the_admin_ports() -> None:
    async with running_frontend(metrics_on_http=True) as front:
        here, there = await front.http.get("/metrics"), await front.admin.get("/metrics")
        assert (here.status_code, here.text) == (200, there.text)
        assert here.headers["content-type"] == there.headers["content-type"]
        page = await front.http.get("/metrics", headers={"origin": "http://elsewhere.example"})
        assert page.status_code == 401


async def test_metrics_need_the_admin_token_not_a_client_key() -> None:
    async with running_frontend(
        metrics_on_http=True, admin_token="open", api_key="sesame"
    ) as front:
        assert "/metrics" not in PUBLIC_PATHS
        told = {
            key: (
                await front.http.get("/metrics", headers={"authorization": f"Bearer {key}"})
            ).status_code
            for key in ("open", "sesame", "wrong")
        }
        assert told == {"open": 200, "sesame": 401, "wrong": 401}
        assert (
            await front.http.get("/v1/models", headers={"authorization": "Bearer open"})
        ).status_code == 401


async def get_text(front: FrontendHarness, path: str) -> str:
    response = await front.http.get(path)
    assert response.status_code == 200
    assert "default-src 'self'" in response.headers["content-security-policy"]
    return response.text


async def test_docs_page_loads_only_local_files() -> None:
    """Every file that the page names is served here, and its policy forbids any other host."""
    async with running_frontend() as front:
        page = await get_text(front, "/docs")
        named = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert len(named) >= 3
        for path in named:
            assert path.startswith("/docs/")
            assert len(await get_text(front, path)) > 100
        assert "://" not in page
        assert (await front.http.get("/docs/../docs_page.py")).status_code == 404
        missing = await front.http.get("/docs/swagger-ui-bundle.js.map")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")

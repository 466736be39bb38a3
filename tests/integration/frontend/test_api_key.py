"""Every route is on the explicit public list or closed without the key."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from baton.pb import generation_pb2 as pb
from coordinator.frontend.http.app import PUBLIC_PATHS
from tests.integration.frontend.frontend_harness import (
    FrontendHarness,
    await_grpc_error,
    running_frontend,
)

KEY = "sesame-öffne-dich"
WRONG_HEADERS = [
    "",
    "Bearer",
    "Bearer wrong",
    f"Basic {KEY}",
    KEY,
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
]


def list_routes(app: Starlette) -> list[tuple[str, str]]:
    return [
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route | Mount)
        for method in getattr(route, "methods", None) or ["GET"]
    ]


async def test_every_route_is_public_or_needs_the_key() -> None:
    async with running_frontend(api_key=KEY) as front:
        found = list_routes(front.apps[0])
        assert {path for _, path in found} >= PUBLIC_PATHS | {"/v1/completions", "/v1/models"}
        for method, path in [
            *found,
            ("GET", "/no/such/route"),
            ("GET", "/v1/completions/"),
            ("GET", "//health"),
        ]:
            for authorization in WRONG_HEADERS:
                headers = {b"authorization": authorization.encode()}
                response = await front.http.request(method, path, headers=headers, content=b"")
                if path in PUBLIC_PATHS:
                    assert response.status_code == 200
                else:
                    assert response.status_code == 401, (method, path, authorization)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        error = response.json()["error"]
                        assert (error["type"], error["code"]) == (
                            "authentication_error",
                            "invalid_api_key",
                        )
                        assert KEY not in response.text
        assert front.backend.requests == []
        assert front.refused_codes.count("invalid_api_key") > 0


async def test_no_header_bypasses_the_key() -> None:
    async with running_frontend(api_key=KEY) as front:
        for name in ("host", "x-forwarded-prefix", "x-original-url", "x-rewrite-url"):
            for value in ("x/health?", "/health", "x/health#"):
                headers = {"authorization": "Bearer wrong", name: value}
                response = await front.http.post(
                    "/v1/completions", json={"prompt": [1]}, headers=headers
                )
                assert response.status_code == 401
        assert front.backend.requests == []


async def test_correct_key_is_accepted() -> None:
    async with running_frontend(api_key=KEY) as front:
        for word in ("Bearer", "bearer", "BEARER"):
            headers = {b"authorization": f"{word} {KEY}".encode()}
            response = await front.http.post(
                "/v1/completions", json={"prompt": [1]}, headers=headers
            )
            assert response.status_code == 200


async def test_every_route_is_open_without_a_configured_key() -> None:
    async with running_frontend() as front:
        assert (await front.http.get("/v1/models")).status_code == 200


async def call_status_code(call: Any) -> grpc.StatusCode:
    return (await await_grpc_error(call)).code()


async def test_grpc_needs_the_key() -> None:
    key = "sesame"
    ask = pb.GenerateRequest(token_ids={"ids": [1]})
    async with running_frontend(api_key=key) as front:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", key),)):
            for method, request in [
                (front.stub.Generate, ask),
                (front.stub.GenerateOnce, ask),
                (front.stub.ListModels, pb.ListModelsRequest()),
            ]:
                assert (
                    await call_status_code(method(request, metadata=metadata))
                    is grpc.StatusCode.UNAUTHENTICATED
                )
        assert front.backend.requests == []
        good = (("authorization", f"Bearer {key}"),)
        assert (await front.stub.GenerateOnce(ask, metadata=good)).usage.prompt_tokens == 1
        assert len((await front.stub.ListModels(pb.ListModelsRequest(), metadata=good)).models) == 1


async def check_health(front: FrontendHarness, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(front.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_grpc_health_follows_readiness() -> None:
    states = health_pb2.HealthCheckResponse
    services = ("", "baton.v1.Generation", "baton.v1.Cluster")
    async with running_frontend(api_key="sesame") as front:
        assert [await check_health(front, service) for service in services] == [states.SERVING] * 3
        watch = health_pb2_grpc.HealthStub(front.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == states.SERVING
        front.readiness.set_reason("waiting for a decode node")
        assert (await watch.read()).status == states.NOT_SERVING
        assert [await check_health(front, service) for service in services] == [
            states.NOT_SERVING
        ] * 3
        front.readiness.set_reason("")
        assert (await watch.read()).status == states.SERVING
        watch.cancel()


async def test_grpc_reflection_names_the_services() -> None:
    async with running_frontend() as front:
        stub = reflection_pb2_grpc.ServerReflectionStub(front.channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        named = {service.name for service in (await call.read()).list_services_response.service}
        call.cancel()
    assert named >= {"baton.v1.Generation", "baton.v1.Cluster", "grpc.health.v1.Health"}

"""Every route is on the explicit public list or closed without the key."""

from typing import Any

import grpc
from fastapi import FastAPI
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.pb import generation_pb2 as pb
from coordinator.http.app import PUBLIC
from tests.integration.front_fixtures import Front, grpc_error, serving

KEY = "sesame-öffne-dich"
WRONG = ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]


def routes(app: FastAPI) -> list[tuple[str, str]]:
    return [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ["GET"]]


async def test_every_route_is_public_or_closed() -> None:
    async with serving(api_key=KEY) as front:
        found = routes(front.apps[0])
        assert {path for _, path in found} >= PUBLIC | {"/v1/completions", "/v1/models"}
        for method, path in [*found, ("GET", "/no/such/route"), ("GET", "/v1/completions/"), ("GET", "//health")]:
            for authorization in WRONG:
                headers = {"authorization": authorization.encode()}
                response = await front.http.request(method, path, headers=headers, content=b"")
                if path in PUBLIC:
                    assert response.status_code == 200
                else:
                    assert response.status_code == 401, (method, path, authorization)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        error = response.json()["error"]
                        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                        assert KEY not in response.text
        assert front.brain.submissions == []
        assert front.refused.count("invalid_api_key") > 0


async def test_no_header_makes_a_closed_route_public() -> None:
    async with serving(api_key=KEY) as front:
        for name in ("host", "x-forwarded-prefix", "x-original-url", "x-rewrite-url"):
            for value in ("x/health?", "/health", "x/health#"):
                headers = {"authorization": "Bearer wrong", name: value}
                response = await front.http.post("/v1/completions", json={"prompt": [1]}, headers=headers)
                assert response.status_code == 401
        assert front.brain.submissions == []


async def test_the_key_opens() -> None:
    async with serving(api_key=KEY) as front:
        for word in ("Bearer", "bearer", "BEARER"):
            headers = {"authorization": f"{word} {KEY}".encode()}
            response = await front.http.post("/v1/completions", json={"prompt": [1]}, headers=headers)
            assert response.status_code == 200


async def test_without_a_key_everything_is_open() -> None:
    async with serving() as front:
        assert (await front.http.get("/v1/models")).status_code == 200


async def refused(call: Any) -> grpc.StatusCode:
    return (await grpc_error(call)).code()


async def test_grpc_wants_the_key_too() -> None:
    key = "sesame"
    ask = pb.GenerateRequest(token_ids={"ids": [1]})
    async with serving(api_key=key) as front:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", key),)):
            for method, request in [
                (front.stub.Generate, ask),
                (front.stub.GenerateOnce, ask),
                (front.stub.ListModels, pb.ListModelsRequest()),
            ]:
                assert await refused(method(request, metadata=metadata)) is grpc.StatusCode.UNAUTHENTICATED
        assert front.brain.submissions == []
        good = (("authorization", f"Bearer {key}"),)
        assert (await front.stub.GenerateOnce(ask, metadata=good)).usage.prompt_tokens == 1
        assert len((await front.stub.ListModels(pb.ListModelsRequest(), metadata=good)).models) == 1


async def health(front: Front, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(front.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_grpc_health_follows_readiness() -> None:
    states = health_pb2.HealthCheckResponse
    services = ("", "baton.v1.Generation", "baton.v1.Cluster")
    async with serving(api_key="sesame") as front:
        assert [await health(front, service) for service in services] == [states.SERVING] * 3
        watch = health_pb2_grpc.HealthStub(front.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == states.SERVING
        front.readiness.become("waiting for a decode node")
        assert (await watch.read()).status == states.NOT_SERVING
        assert [await health(front, service) for service in services] == [states.NOT_SERVING] * 3
        front.readiness.become("")
        assert (await watch.read()).status == states.SERVING
        watch.cancel()


async def test_grpc_reflection_names_the_services() -> None:
    async with serving() as front:
        stub = reflection_pb2_grpc.ServerReflectionStub(front.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        named = {service.name for service in (await call.read()).list_services_response.service}
        call.cancel()
    assert named >= {"baton.v1.Generation", "baton.v1.Cluster", "grpc.health.v1.Health"}

"""docs/api.md is what its tool makes today, and it leaves nothing out."""

from typing import cast

import pytest

from baton.errors import BY_CODE
from coordinator import admin
from coordinator.admin import ClusterView
from coordinator.http.descriptions import ANSWERS, REQUESTS, describe
from coordinator.http.openapi import document
from coordinator.readiness import Readiness
from coordinator.refusals import Refusals
from tools.api_reference import grpc
from tools.api_reference.__main__ import PAGE, render
from tools.api_reference.http import ADMIN

TEXT = PAGE.read_text()


def test_the_page_is_current() -> None:
    assert render() == TEXT, "run `make docs`"


def test_every_field_of_a_body_is_described_and_every_description_is_used() -> None:
    used = set()
    for name, schema in document("")["components"]["schemas"].items():
        for field, shape in schema["properties"].items():
            assert shape["description"]
            used |= {f"{name}.{field}", field}
    assert (REQUESTS.keys() | ANSWERS.keys()) <= used
    with pytest.raises(KeyError):
        describe(REQUESTS, "CompletionRequest", "colour")


def test_every_field_of_a_message_has_its_comment() -> None:
    empty = [line for line in TEXT.splitlines() if line.startswith("|") and line.endswith("|  |") and line.strip("| ")]
    assert empty == []


def test_every_call_of_the_public_services_is_there() -> None:
    words = grpc.Words(grpc.described())
    for name in grpc.SERVICES:
        service, *_ = words.services[name]
        assert [call.name for call in service.method if f"\n| `{call.name}` |" not in TEXT] == []
    assert "NodeLink" not in TEXT


def test_every_error_is_there() -> None:
    assert [name for name in BY_CODE if f"\n| `{name}` |" not in TEXT] == ["config"]


def test_every_route_of_the_admin_port_is_there() -> None:
    app = admin.build(cast(ClusterView, None), cast(Readiness, None), "", cast(Refusals, None))
    routes = {f"{method} {route.path}" for route in app.routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert {path for path, _ in ADMIN} == {route.replace(":path}", "}") for route in routes}

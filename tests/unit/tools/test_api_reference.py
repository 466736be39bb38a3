"""docs/api.md is what its tool makes today, and it leaves nothing out."""

from typing import cast

import pytest
from starlette.routing import Route

from baton.errors import ERRORS_BY_CODE
from coordinator.frontend.http.field_descriptions import (
    REQUEST_FIELDS,
    RESPONSE_FIELDS,
    describe_field,
)
from coordinator.frontend.http.openapi import build_openapi_document
from coordinator.frontend.request import RejectionCounter
from coordinator.operators import admin_app as admin
from coordinator.operators.admin_app import ClusterAdmin
from coordinator.readiness import Readiness
from tools.api_reference import grpc_section as grpc
from tools.api_reference.__main__ import PAGE_PATH, render_page
from tools.api_reference.http_section import ADMIN_ROUTES

TEXT = PAGE_PATH.read_text()


def test_the_page_is_current() -> None:
    assert render_page() == TEXT, "run `make docs`"


def test_body_fields_and_descriptions_match() -> None:
    used = set()
    for name, schema in build_openapi_document("")["components"]["schemas"].items():
        for field, shape in schema["properties"].items():
            assert shape["description"]
            used |= {f"{name}.{field}", field}
    assert (REQUEST_FIELDS.keys() | RESPONSE_FIELDS.keys()) <= used
    with pytest.raises(KeyError):
        describe_field(REQUEST_FIELDS, "CompletionRequest", "colour")


def test_every_field_of_a_message_has_its_comment() -> None:
    empty = [
        line
        for line in TEXT.splitlines()
        if line.startswith("|") and line.endswith("|  |") and line.strip("| ")
    ]
    assert empty == []


def test_every_call_of_the_public_services_is_there() -> None:
    words = grpc.ProtoDefinitions(grpc.load_descriptors())
    for name in grpc.PUBLIC_SERVICES:
        service, *_ = words.services[name]
        assert [call.name for call in service.method if f"\n| `{call.name}` |" not in TEXT] == []
    assert "NodeLink" not in TEXT


def test_every_error_is_there() -> None:
    assert [name for name in ERRORS_BY_CODE if f"\n| `{name}` |" not in TEXT] == ["config"]


def test_every_route_of_the_admin_port_is_there() -> None:
    app = admin.build_admin_app(
        cast(ClusterAdmin, None), cast(Readiness, None), "", cast(RejectionCounter, None)
    )
    routes = {
        f"{method} {route.path}"
        for route in cast(list[Route], app.routes)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {path for path, _ in ADMIN_ROUTES} == {route.replace(":path}", "}") for route in routes}

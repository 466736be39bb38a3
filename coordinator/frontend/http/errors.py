"""HTTP errors in OpenAI's format: {"error": {message, type, param, code}}."""

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError, InvalidRequest, NotFound, RequestRejected
from coordinator.frontend.internal_errors import to_internal_error


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class MethodNotAllowed(InvalidRequest):
    http_status = 405
    code = "method_not_allowed"


class UnsupportedMediaType(InvalidRequest):
    http_status = 415
    code = "unsupported_media_type"


class ForeignOrigin(RequestRejected):
    """A web page of another origin calls a port that needs no key."""

    http_status = 403
    openai_type = "permission_error"
    code = "foreign_origin"


def encode_error_body(error: BatonError) -> bytes:
    return msgspec.json.encode(
        ErrorBody(ErrorDetail(error.message, error.openai_type, error.param, error.code))
    )


def error_response(error: BatonError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        encode_error_body(error), error.http_status, headers, media_type="application/json"
    )


async def on_baton_error(request: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, BatonError) else to_internal_error(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Convert errors of Starlette: an unknown route, or a method that it does not have."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{request.method} is not allowed on {path}"))
        response.headers.update(error.headers or {})
        return response
    return error_response(NotFound(f"there is no {request.method} {path}"))

"""GET /docs: Swagger UI, with its files from an installed package instead of another host."""

import asyncio
import importlib.resources
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response

DOCS_PATH = "/docs"
_FILES = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "favicon.png": "image/png",
}
DOCS_FILE_PATHS = frozenset(f"{DOCS_PATH}/{name}" for name in _FILES)
_INLINE = "'self' 'unsafe-inline'"
_POLICY = f"default-src 'self'; script-src {_INLINE}; style-src {_INLINE}; img-src 'self' data:"
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}


def add_docs_routes(app: FastAPI) -> None:
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Baton",
        swagger_js_url=f"{DOCS_PATH}/swagger-ui-bundle.js",
        swagger_css_url=f"{DOCS_PATH}/swagger-ui.css",
        swagger_favicon_url=f"{DOCS_PATH}/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},  # else Swagger's own site serves a badge
    )

    async def docs() -> Response:
        return Response(page.body, media_type="text/html", headers=_HEADERS)

    app.add_api_route(DOCS_PATH, docs, methods=["GET"])
    for name, media_type in _FILES.items():
        app.add_api_route(f"{DOCS_PATH}/{name}", _file_route(name, media_type), methods=["GET"])


def _file_route(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    file = importlib.resources.files("fastapi_offline") / "static" / name

    async def route() -> Response:
        content = await asyncio.to_thread(file.read_bytes)
        return Response(content, media_type=media_type, headers=_HEADERS)

    return route

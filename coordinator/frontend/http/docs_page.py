"""GET /docs: Swagger UI, with its files from an installed package instead of another host."""

import asyncio
import importlib.metadata
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

DOCS_PATH = "/docs"
OPENAPI_PATH = "/openapi.json"
_FILES = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "favicon-32x32.png": "image/png",
}
DOCS_FILE_PATHS = frozenset(f"{DOCS_PATH}/{name}" for name in _FILES)
_INLINE = "'self' 'unsafe-inline'"
_POLICY = f"default-src 'self'; script-src {_INLINE}; style-src {_INLINE}; img-src 'self' data:"
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
# Without `validatorUrl: null`, Swagger's own site would serve a badge.
_PAGE = f"""\
<!DOCTYPE html>
<html>
<head>
<meta name="viewport" content="width=device-width, initial-scale=1.0">
<link type="text/css" rel="stylesheet" href="{DOCS_PATH}/swagger-ui.css">
<link rel="shortcut icon" href="{DOCS_PATH}/favicon-32x32.png">
<title>Baton</title>
</head>
<body>
<div id="swagger-ui"></div>
<script src="{DOCS_PATH}/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({{
    url: "{OPENAPI_PATH}",
    dom_id: "#swagger-ui",
    deepLinking: true,
    showExtensions: true,
    showCommonExtensions: true,
    validatorUrl: null,
}})
</script>
</body>
</html>
"""


def build_docs_routes() -> list[Route]:
    async def docs(_: Request) -> Response:
        return Response(_PAGE, media_type="text/html", headers=_HEADERS)

    files = [
        Route(f"{DOCS_PATH}/{name}", _file_endpoint(name, media_type))
        for name, media_type in _FILES.items()
    ]
    return [Route(DOCS_PATH, docs), *files]


def _file_endpoint(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        content = await asyncio.to_thread(_find_file(name).read_bytes)
        return Response(content, media_type=media_type, headers=_HEADERS)

    return endpoint


def _find_file(name: str) -> Path:
    """Find a file of Swagger UI without importing its package, which would import Flask."""
    package = importlib.metadata.distribution("flask-swagger-ui")
    return Path(str(package.locate_file(f"flask_swagger_ui/dist/{name}")))

"""`make docs`: write docs/api.md from the OpenAPI document, the .proto files and the errors.

A test compares the checked-in page with the output.
"""

from inspect import cleandoc
from pathlib import Path

from baton.errors import ERRORS_BY_CODE, ConfigError
from tools.api_reference import grpc_section as grpc
from tools.api_reference import http_section as http
from tools.api_reference.markdown import code, heading, table

PAGE_PATH = Path(__file__).resolve().parents[2] / "docs" / "api.md"

INTRODUCTION_TEXT = """\
# API reference

Made by `make docs` from the OpenAPI document, the .proto files and `baton/errors.py`: change \
those, not this page.

What Baton answers on its three ports. Both doors for clients take the same requests, within the \
same bounds. Where a
request says nothing, the model's `generation_config.json` decides \
([models.md](models.md#generation_configjson)), and
then the default given here.

| port | default | speaks | who may call |
|---|---|---|---|
| `--port` | 8000 | [HTTP](#http), as OpenAI has it | who sends `authorization: Bearer KEY`, if \
`--api-key` is set |
| `--grpc-port` | 50051 | [gRPC](#grpc), with reflection and health | the same; for Cluster as \
the next |
| `--admin-port` | 9000 | [HTTP](#the-admin-port) | who sends `--admin-token`, if it is set; else \
this machine only |

- [HTTP](#http): [bodies](#bodies), [the admin port](#the-admin-port)
- [gRPC](#grpc): [messages](#messages)
- [Errors](#errors)
"""
HTTP_TEXT = """\
A field that is not listed is a 400 that names it, and so is a value out of bounds. With \
`--unknown-fields ignore` such
fields are dropped instead, at any depth, and `baton_ignored_fields_total` counts them. Null is \
the same as leaving a
field out. Fields of vLLM's, SGLang's and TensorRT-LLM's servers are taken at the values that ask \
for nothing. The
answer to a request that was admitted has the header `x-baton-request-id`, by which logs and \
`baton explain` know it.

This page as JSON: `/openapi.json`; to try it out: `/docs`, which needs no other host. Every GET \
may be a HEAD.
`--metrics-on-http` adds `GET /metrics`, for whoever may read it on the admin port: who sends \
`--admin-token`, if it is
set; else this machine only. A client's key does not open it.

In a stream each event is `data: ` and an object like the whole answer's, with the new `text` of \
one choice (in a
conversation a `delta` in the place of `message`). `data: [DONE]` is the last one. An error after \
the first byte is an
event with `error`, and no `[DONE]` follows.

Any of them may answer, in the place of 200, with an [ErrorBody](#object-errorbody):
"""
GRPC_TEXT = """\
`proto/generation.proto` is for clients, `proto/cluster.proto` for operators; stubs for Python \
are in `baton/pb/`. A
call's deadline is the request's. The metadata `x-request-id` is the client's own id, given back. \
A message of more
than 4 MiB is refused before it is read, with RESOURCE_EXHAUSTED and without `baton-error-code`.
"""
ERRORS_TEXT = """\
Over HTTP they are an [ErrorBody](#object-errorbody). Over gRPC the status has the message, and \
the trailing metadata
`baton-error-code` and `baton-error-param`. `retry-after` says, over both, after how many seconds \
to come again. An
error of a node or of a hand-off reaches a client only after `--max-attempts` placements. The \
HTTP status can tell of
errors before the first byte; later ones are an event.
"""


def render_page() -> str:
    lines = [
        INTRODUCTION_TEXT,
        *heading(2, "HTTP"),
        HTTP_TEXT,
        *http.error_table(),
        *http.render_http_section(),
        *heading(2, "gRPC"),
        GRPC_TEXT,
        *grpc.render_grpc_section(),
        *heading(2, "Errors"),
        ERRORS_TEXT,
        *_error_lines(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _error_lines() -> list[str]:
    rows = [
        (
            code(name),
            str(kind.http_status),
            kind.grpc_code,
            code(kind.openai_type),
            " ".join(cleandoc(kind.__doc__ or "").partition("\n\n")[0].split()),
        )
        for name, kind in ERRORS_BY_CODE.items()
        if kind is not ConfigError
    ]
    return table(("`code`", "HTTP", "gRPC", "`type`", "what it says"), rows)


if __name__ == "__main__":
    PAGE_PATH.write_text(render_page())

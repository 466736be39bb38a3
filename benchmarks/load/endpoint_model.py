"""What an endpoint serves, as far as it must be equal for figures to compare: model, dtype,
quantisation."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import msgspec

from benchmarks.load import http_stream
from benchmarks.load.http_stream import HttpError, HttpTarget


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """`digest` is of weights and architecture, "" where an endpoint tells none: then names are
    compared."""

    model: str
    dtype: str
    quantization: str
    digest: str = ""


class _ListedModel(msgspec.Struct):
    id: str
    model_digest: str = ""
    dtype: str = ""
    quantization: str = ""


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


async def fetch_endpoint_model(
    target: HttpTarget, api_key: str, model: str, declared: Mapping[str, str]
) -> EndpointModel:
    """By GET /v1/models. `declared` says what the endpoint does not: it never contradicts it.
    Raises ValueError."""
    path = "/models" if target.base_path.endswith("/v1") else "/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    where = f"{target.host}:{target.port}"
    try:
        async with http_stream.open_request(target, "GET", path, headers) as response:
            body = await response.read_body()
            if response.status != 200:
                raise ValueError(
                    f"{where} answers {response.status} to {path}: {body[:200].decode(errors='replace')}"
                )
        models = msgspec.json.decode(body, type=_ModelList).data
    except (OSError, HttpError, msgspec.DecodeError) as error:
        raise ValueError(f"{where} does not say what it serves: {error}") from None
    served = next((one for one in models if model in ("", one.id)), None)
    if served is None:
        raise ValueError(
            f"{where} does not serve {model!r}: it has {', '.join(one.id for one in models) or 'nothing'}"
        )
    told = {"dtype": served.dtype, "quantization": served.quantization}
    for name, value in declared.items():
        if told.get(name) not in ("", value):
            raise ValueError(f"{where} says {name}={told[name]}, and --declare {value}")
    known = {name: value or declared.get(name, "") for name, value in told.items()}
    unknown = [name for name, value in known.items() if not value]
    if unknown:
        raise ValueError(
            f"{where} does not say its {' and '.join(unknown)}: declare it with --declare {unknown[0]}=..., which is"
            " then on your word"
        )
    return EndpointModel(served.id, known["dtype"], known["quantization"], served.model_digest)


def require_same_model(found: Mapping[str, EndpointModel]) -> None:
    """Raises ValueError naming the first that differs, and both values."""
    (first, one), *others = found.items()
    for name, other in others:
        by_digest = bool(one.digest and other.digest)
        for field in fields(EndpointModel):
            if field.name == ("model" if by_digest else "digest"):
                continue
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            if mine != theirs:
                raise ValueError(
                    f"{first} and {name} do not compare: {field.name} is {mine!r} and {theirs!r}"
                )

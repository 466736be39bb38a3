"""What an endpoint serves: the model, dtype and quantisation must be equal to compare figures."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import msgspec

from benchmarks.load import http_stream
from benchmarks.load.http_stream import HttpError, HttpTarget


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """The model of an endpoint, as far as the endpoint or the user states it."""

    model: str
    dtype: str
    quantization: str
    digest: str = ""  # of weights and architecture; where empty, names are compared


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
    """Fetch the served model by GET /v1/models.

    `declared` fills in what the endpoint does not state. Raises ValueError for a contradiction, for
    missing facts and for an unusable endpoint.
    """
    models = await _fetch_models(target, api_key)
    address = f"{target.host}:{target.port}"
    served = next((listed for listed in models if model in ("", listed.id)), None)
    if served is None:
        raise ValueError(
            f"{address} does not serve {model!r}: "
            f"it has {', '.join(listed.id for listed in models) or 'nothing'}"
        )
    stated = {"dtype": served.dtype, "quantization": served.quantization}
    for name, value in declared.items():
        if stated.get(name) not in ("", value):
            raise ValueError(f"{address} says {name}={stated[name]}, and --declare {value}")
    known = {name: value or declared.get(name, "") for name, value in stated.items()}
    unknown = [name for name, value in known.items() if not value]
    if unknown:
        raise ValueError(
            f"{address} does not say its {' and '.join(unknown)}: "
            f"declare it with --declare {unknown[0]}=..., which is not verified"
        )
    return EndpointModel(served.id, known["dtype"], known["quantization"], served.model_digest)


async def fetch_model_name(target: HttpTarget, api_key: str) -> str:
    """Fetch the name of the first served model. Raises ValueError for an unusable endpoint."""
    models = await _fetch_models(target, api_key)
    if not models:
        raise ValueError(f"{target.host}:{target.port} serves no model")
    return models[0].id


async def _fetch_models(target: HttpTarget, api_key: str) -> list[_ListedModel]:
    path = "/models" if target.base_path.endswith("/v1") else "/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = f"{target.host}:{target.port}"
    try:
        async with http_stream.open_request(target, "GET", path, headers) as response:
            body = await response.read_body()
            if response.status != 200:
                raise ValueError(
                    f"{address} answers {response.status} to {path}: "
                    f"{body[:200].decode(errors='replace')}"
                )
        return msgspec.json.decode(body, type=_ModelList).data
    except (OSError, HttpError, msgspec.DecodeError) as error:
        raise ValueError(f"{address} does not state what it serves: {error}") from None


def require_same_model(models: Mapping[str, EndpointModel]) -> None:
    """Raise ValueError that names the first difference, with both values."""
    (first, reference), *others = models.items()
    for name, other in others:
        by_digest = bool(reference.digest and other.digest)
        for field in fields(EndpointModel):
            if field.name == ("model" if by_digest else "digest"):
                continue
            expected, actual = getattr(reference, field.name), getattr(other, field.name)
            if expected != actual:
                raise ValueError(
                    f"{first} and {name} do not compare: "
                    f"{field.name} is {expected!r} and {actual!r}"
                )

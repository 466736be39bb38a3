"""Asks an endpoint how many tokens the context has room for after a prompt.

/v1/completions takes a missing `max_tokens` for 16, as OpenAI does, and has no value for the rest
of the context.
"""

import json
from dataclasses import replace

from baton.errors import BatonError
from offline.endpoint import Endpoint
from offline.request_bodies import COMPLETIONS, PromptRequest


async def fill_max_tokens(endpoint: Endpoint, request: PromptRequest) -> PromptRequest:
    """Return the request with `max_tokens`, if its parameters ask for the rest of the context.

    Raises BatonError.
    """
    params, prompt = request.params, request.body.get("prompt")
    if params is None or params.max_tokens is not None:
        return request
    if request.path != COMPLETIONS or "max_tokens" in request.body:
        return request
    if isinstance(prompt, str):
        room = await _measure_room_after_text(endpoint, prompt)
    else:
        room = await endpoint.fetch_max_model_len() - len(prompt or ())
    # Without room, the error of the request says so.
    return replace(request, body=request.body | {"max_tokens": max(room, 1)})


async def _measure_room_after_text(endpoint: Endpoint, text: str) -> int:
    body = json.dumps({"prompt": text}).encode()
    answer = await endpoint.post("/tokenize", body)
    if answer.error is not None:
        raise answer.error
    try:
        found = answer.decode_body()
        return int(found["max_model_len"]) - int(found["count"])
    except (LookupError, TypeError, ValueError):
        raise BatonError("the endpoint does not count tokens: give max_tokens") from None

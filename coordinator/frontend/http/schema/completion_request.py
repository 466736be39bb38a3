"""The wire format of POST /v1/completions."""

from typing import Any, ClassVar

from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.common_fields import CommonRequestBody
from coordinator.frontend.http.schema.unsupported_fields import COMPLETION_NO_OPS, NoOpValues
from coordinator.frontend.request import GenerationRequest, Prompt


class CompletionRequest(CommonRequestBody, frozen=True, kw_only=True):
    """The body. A field that is not served is accepted with the values that ask for nothing."""

    no_ops: ClassVar[NoOpValues] = COMPLETION_NO_OPS

    prompt: str | list[int | str | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def to_generation_request(
        self, timeout: float | None, client_id: str | None
    ) -> GenerationRequest:
        """Raises InvalidRequest."""
        return GenerationRequest(
            prompts=_parse_prompts(self.prompt),
            echo=bool(self.echo),
            logprobs=self.logprobs,
            timeout_seconds=timeout,
            client_request_id=self.get_client_request_id(client_id),
            **self.common_request_fields(),
        )


def _parse_prompts(worded: str | list[int | str | list[int]] | None) -> list[Prompt] | None:
    """A text, token ids, or a list of either."""
    if worded is None:
        return None
    if isinstance(worded, str):
        return [worded]
    if not worded or isinstance(worded[0], int):
        return [_require_same_type(worded, int)]
    return list(_require_same_type(worded, type(worded[0])))


def _require_same_type(worded: list[Any], kind: type) -> list[Any]:
    for place, item in enumerate(worded):
        if type(item) is not kind:
            raise InvalidRequest(
                f"prompt[{place}] and prompt[0] differ in type: a list has token ids, texts, or "
                "lists of token ids",
                param="prompt",
            )
    return worded

"""The wire format of POST /v1/completions."""

from typing import Any, ClassVar

from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.common_fields import CommonRequestBody
from coordinator.frontend.http.schema.unsupported_fields import COMPLETION_NO_OPS, NoOpValues
from coordinator.frontend.request import GenerationRequest, Prompt


class CompletionRequest(CommonRequestBody, frozen=True, kw_only=True):
    """The body. Unsupported fields are accepted with their no-op values."""

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


def _parse_prompts(prompt: str | list[int | str | list[int]] | None) -> list[Prompt] | None:
    """Parse a text, token ids, or a list of either. Raises InvalidRequest."""
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):
        return [_require_same_type(prompt, int)]
    return list(_require_same_type(prompt, type(prompt[0])))


def _require_same_type(prompt: list[Any], item_type: type) -> list[Any]:
    for place, item in enumerate(prompt):
        if type(item) is not item_type:
            raise InvalidRequest(
                f"prompt[{place}] and prompt[0] differ in type: a list has token ids, texts, or "
                "lists of token ids",
                param="prompt",
            )
    return prompt

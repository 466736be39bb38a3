"""The wire format of POST /v1/completions."""

from typing import Any, ClassVar

from baton.errors import InvalidRequest
from coordinator.ask import Ask, Prompt
from coordinator.http.fields import Shared
from coordinator.http.unserved_fields import COMPLETION, NoOps


class CompletionRequest(Shared, frozen=True, kw_only=True):
    """The body. A field that is not served is accepted with the values that ask for nothing."""

    no_ops: ClassVar[NoOps] = COMPLETION

    prompt: str | list[int | str | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def to_ask(self, timeout: float | None, client_id: str | None) -> Ask:
        """Raises InvalidRequest."""
        return Ask(
            prompts=_prompts(self.prompt),
            echo=bool(self.echo),
            logprobs=self.logprobs,
            timeout=timeout,
            client_id=self.client_id(client_id),
            **self.common(),
        )


def _prompts(worded: str | list[int | str | list[int]] | None) -> list[Prompt] | None:
    """A text, token ids, or a list of either."""
    if worded is None:
        return None
    if isinstance(worded, str):
        return [worded]
    if not worded or isinstance(worded[0], int):
        return [_same(worded, int)]
    return list(_same(worded, type(worded[0])))


def _same(worded: list[Any], kind: type) -> list[Any]:
    for place, item in enumerate(worded):
        if type(item) is not kind:
            raise InvalidRequest(
                f"prompt[{place}] and prompt[0] differ in type: a list has token ids, texts, or lists of token ids",
                param="prompt",
            )
    return worded

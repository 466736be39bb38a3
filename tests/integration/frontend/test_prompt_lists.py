"""What a list of prompts in one request costs."""

from typing import Any

import pytest

from coordinator.text.tokenizer import BoundedEncoder
from tests.integration.frontend.frontend_harness import MODEL_BOUNDS, running_frontend
from tests.small_tokenizers import hello_tokenizer


async def test_nothing_is_encoded_after_a_prompt_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[str] = []
    encode = BoundedEncoder.encode_text

    def noted(self: Any, text: str, *more: Any, **others: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, *more, **others)

    monkeypatch.setattr(BoundedEncoder, "encode_text", noted)
    long = "zq" * (MODEL_BOUNDS.max_context // 2)  # a token for each character
    async with running_frontend(text=hello_tokenizer()) as front:
        answer = await front.http.post("/v1/completions", json={"prompt": [long, "a", "b"]})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert encoded == [long]

"""The official client, where it is installed, understands what we say."""

import pytest

from baton.errors import NodeGone
from coordinator.generation import Delta
from tests.integration.front_fixtures import Front, done, overloaded, serving
from tests.integration.front_text import byte_level, hello_tokenizer

openai = pytest.importorskip("openai")
KEY = "sesame"
HELLO = byte_level().encode("hello world").ids


def client(front: Front, key: str = KEY) -> "openai.AsyncOpenAI":
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{front.http_port}/v1", api_key=key, max_retries=0)


async def test_completions() -> None:
    async with serving(text=hello_tokenizer(), api_key=KEY) as front, client(front) as user:
        front.brain.script = lambda generation: generation.give(Delta(tuple(HELLO)), done())
        whole = await user.completions.create(model="demo", prompt="hello", max_tokens=8, temperature=0, user="me")
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("hello world", "length")
        assert whole.usage.completion_tokens == len(HELLO)
        stream = await user.completions.create(
            model="demo", prompt="hello", stream=True, stream_options={"include_usage": True}, seed=1
        )
        parts = [part async for part in stream]
        assert "".join(choice.text for part in parts for choice in part.choices) == "hello world"
        assert parts[-1].usage.total_tokens == parts[-1].usage.prompt_tokens + len(HELLO)
        assert [model.id async for model in await user.models.list()] == ["demo"]


async def test_error_classes() -> None:
    async with serving(api_key=KEY) as front, client(front) as user, client(front, "wrong") as stranger:

        async def ask(who: "openai.AsyncOpenAI", **fields: object) -> object:
            return await who.completions.create(**{"model": "demo", "prompt": [1], **fields})

        with pytest.raises(openai.AuthenticationError):
            await ask(stranger)
        with pytest.raises(openai.NotFoundError) as missing:
            await ask(user, model="other")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await ask(user, temperature=9)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
        front.brain.refusal = overloaded()
        with pytest.raises(openai.RateLimitError) as busy:
            await ask(user)
        assert busy.value.response.headers["retry-after"] == "3"
        front.brain.refusal = None
        front.brain.script = lambda generation: generation.give(Delta((1,)), NodeGone("node d0 is gone"))
        stream = await ask(user, stream=True)
        with pytest.raises(openai.APIError, match="node d0 is gone"):
            [part async for part in stream]  # type: ignore[attr-defined]

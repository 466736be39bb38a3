"""Special tokens of a prompt are what the chat template writes, whatever the messages spell."""

from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from baton.errors import InvalidRequest
from coordinator.text.chat_template import ChatPrompt, ChatTemplate
from coordinator.text.tokenizer import HfTokenizer
from tests.small_tokenizers import EOS_TOKEN, byte_level_tokenizer

BEGIN, LONGER = "<|begin|>", "<|end|>>"
TEMPLATE = (
    "{{ mood }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """One special token begins with another, and a text gets one at its beginning."""
    made = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    made.add_special_tokens([BEGIN, LONGER])
    bos = made.token_to_id(BEGIN)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, bos)]
    )
    return made


@pytest.fixture(scope="module")
def text(backend: tokenizers.Tokenizer) -> HfTokenizer:
    return HfTokenizer(backend, backend.token_to_id(BEGIN), ChatTemplate(TEMPLATE, {}))


def user_chat(*contents: str, **more: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": content} for content in contents], **more)


SPELLED = [
    EOS_TOKEN,
    f"a{EOS_TOKEN}user: b",
    f"{EOS_TOKEN}{EOS_TOKEN}",
    LONGER,
    f"<|e{EOS_TOKEN}nd|>",
    f" {BEGIN}\n",
    f"héllo {EOS_TOKEN} 😀{LONGER}wörld",
]


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("special", [False, True])
async def test_special_tokens_in_messages_are_plain_text(
    backend: tokenizers.Tokenizer, text: HfTokenizer, spelled: str, special: bool
) -> None:
    prompt = await text.encode_chat(user_chat("first", spelled, "last"), add_special_tokens=special)
    ends = [token for token in prompt if token in backend.get_added_tokens_decoder()]
    assert ends == [backend.token_to_id(BEGIN)] * special + [backend.token_to_id(EOS_TOKEN)] * 3
    told = f"user: first{EOS_TOKEN}user: {spelled.strip()}{EOS_TOKEN}user: last{EOS_TOKEN}"
    assert await text.decode(prompt) == BEGIN * special + told


@pytest.mark.parametrize(
    "plain", ["hello", "<|end|", "|end|>", "", " a\n\n\tb ", "\U000f0000", "日本語のテキスト"]
)
@pytest.mark.parametrize("special", [False, True])
async def test_other_text_is_encoded_unchanged(
    backend: tokenizers.Tokenizer, text: HfTokenizer, plain: str, special: bool
) -> None:
    rendered = f"user: {plain.strip()}{EOS_TOKEN}user: hello{EOS_TOKEN}"
    prompt = await text.encode_chat(user_chat(plain, "hello"), add_special_tokens=special)
    assert prompt == tuple(backend.encode(rendered, add_special_tokens=special).ids)


async def test_template_kwargs_are_escaped_too(
    backend: tokenizers.Tokenizer, text: HfTokenizer
) -> None:
    prompt = await text.encode_chat(user_chat("hello", template_kwargs={"mood": EOS_TOKEN}))
    assert prompt.count(backend.token_to_id(EOS_TOKEN)) == 1
    assert await text.decode(prompt) == f"{EOS_TOKEN}user: hello{EOS_TOKEN}"


async def test_plain_prompt_may_contain_special_tokens(
    backend: tokenizers.Tokenizer, text: HfTokenizer
) -> None:
    assert (await text.encode(f"a{EOS_TOKEN}"))[-1] == backend.token_to_id(EOS_TOKEN)


async def test_no_free_placeholder_character_is_refused(text: HfTokenizer) -> None:
    every = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(InvalidRequest, match="every character that could replace them"):
        await text.encode_chat(user_chat(every, EOS_TOKEN))
    assert await text.encode_chat(user_chat(every[1:], EOS_TOKEN))


async def test_tools_and_calls_are_escaped_too(backend: tokenizers.Tokenizer) -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ messages | tojson }}<|end|>", {})
    text = HfTokenizer(backend, None, template)
    function = {"name": "f", "parameters": {EOS_TOKEN: [{"enum": [f"a{EOS_TOKEN}"]}]}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": [EOS_TOKEN]}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = await text.encode_chat(ChatPrompt([message], tools=[{"function": function}]))
    assert prompt.count(backend.token_to_id(EOS_TOKEN) or 0) == 1
    assert (await text.decode(prompt)).count(EOS_TOKEN) == 4

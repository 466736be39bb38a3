"""Rendering is what transformers makes of the same template, and a template can do no harm."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from baton.errors import ConfigError, InvalidRequest
from coordinator.text import chat_template
from coordinator.text.chat_template import ChatPrompt, ChatTemplate
from tests.small_tokenizers import EOS_TOKEN, byte_level_tokenizer

CHATML = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}
{% endif %}
{% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]{% else %}\
{{ message.content }}</s>{% endif %}
{% endfor %}"""
EVERYTHING = """{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}
{% if ns.n > 3 %}{% break %}{% endif %}{{ m | tojson }}{{ m.get('name', 'nobody') | upper }}\
{% if 'x' in m.content %}
{% continue %}{% endif %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endfor %}
{% if tools %}tools{% endif %}{{ strftime_now('%d') }}{{ messages | tojson(indent=2) }}"""
TALK = [
    {"role": "user", "content": "  Grüße <&> 'x' "},
    {"role": "assistant", "content": "a</think>\n\nb", "name": "Bo"},
    {"role": "user", "content": "日本\n"},
]


@pytest.mark.parametrize(
    "source", [CHATML, ALTERNATING, EVERYTHING], ids=["chatml", "alternating", "everything"]
)
@pytest.mark.parametrize("answer", [True, False])
def test_rendering_equals_transformers(source: str, answer: bool) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), bos_token=EOS_TOKEN, chat_template=source
    )
    ours = ChatTemplate(source, {"bos_token": EOS_TOKEN}).render(ChatPrompt(TALK, answer))
    assert ours == theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=answer)


def test_template_refusal_is_quoted() -> None:
    with pytest.raises(
        InvalidRequest, match="refuses these messages: roles must alternate"
    ) as told:
        ChatTemplate(ALTERNATING, {}).render(ChatPrompt([{"role": "system", "content": "secret"}]))
    assert told.value.param == "messages"


HARM = [
    "{{ messages.append(1) }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{% for i in range(100000000) %}x{% endfor %}",
    "{{ messages[0].content.nothing.at.all }}",
    "{{ messages[7].content + 1 }}",
    "{{ 1 / 0 }}",
    "{% include 'other' %}",
]


@pytest.mark.parametrize("source", HARM)
def test_unsafe_templates_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render") as told:
        ChatTemplate(source, {}).render(ChatPrompt([{"role": "user", "content": "secret"}]))
    assert "secret" not in told.value.message


def test_output_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ChatTemplate(
        "{% for i in range(9000) %}{% for j in range(9000) %}x{% endfor %}{% endfor %}", {}
    )
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100_000)
    with pytest.raises(InvalidRequest, match="exceed the limits of the chat template"):
        endless.render(ChatPrompt(TALK))
    now = iter(range(100))
    slow = ChatTemplate("{% for i in range(90) %}x{% endfor %}", {}, clock=lambda: float(next(now)))
    with pytest.raises(InvalidRequest, match="10 s"):
        slow.render(ChatPrompt(TALK))


@pytest.mark.parametrize("count", [0, 2049])
def test_the_number_of_messages_is_bounded(count: int) -> None:
    with pytest.raises(
        InvalidRequest, match=f"messages has {count} messages: it must have 1 to 2048"
    ):
        ChatTemplate("", {}).render(ChatPrompt(TALK[:1] * count))


def test_a_broken_template_is_a_start_up_error() -> None:
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        ChatTemplate("{% if %}", {})


def test_messages_come_to_the_template_as_they_were_sent() -> None:
    message: dict[str, Any] = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    assert (
        json.loads(ChatTemplate("{{ messages[0] | tojson }}", {}).render(ChatPrompt([message])))
        == message
    )


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"a": ["é"]}}}
WITH_TOOLS = (
    CHATML + "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
)


def test_tools_are_rendered_as_transformers_does() -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), bos_token=EOS_TOKEN, chat_template=WITH_TOOLS
    )
    ours = ChatTemplate(WITH_TOOLS, {"bos_token": EOS_TOKEN}).render(ChatPrompt(TALK, tools=[TOOL]))
    assert ours == theirs.apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=True, tools=[TOOL]
    )


@pytest.mark.parametrize("source", [CHATML, ALTERNATING], ids=["chatml", "trimming"])
@pytest.mark.parametrize("last", ["The answer is", "The answer is ", "a"])
def test_final_message_is_continued_as_transformers_does(source: str, last: str) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": last}]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), bos_token=EOS_TOKEN, chat_template=source
    )
    ours = ChatTemplate(source, {"bos_token": EOS_TOKEN}).render(
        ChatPrompt(talk, add_generation_prompt=False, continue_final_message=True)
    )
    assert ours == theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    assert ours.endswith(last)


def test_final_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(
            ChatPrompt(TALK, add_generation_prompt=False, continue_final_message=True)
        )

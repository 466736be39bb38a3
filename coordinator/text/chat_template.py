"""Renders the model's own chat template: messages to the text that the model was trained on.

Templates are Jinja programs that come with the model. They run in Jinja's sandbox with the
settings, variables and functions that Hugging Face documents for them ("Chat templates" in the
manual of transformers).
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError, InvalidRequest
from baton.limits import (
    MAX_BODY_BYTES,
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TEMPLATE_KEY_CHARACTERS,
    MAX_TEMPLATE_NUMBER,
    MAX_TEMPLATE_STRING_CHARACTERS,
    check_message_count,
)
from baton.process.clock import Clock, monotonic_clock

# A template may refuse some of these.
MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_RENDERED_CHARS = 2 * MAX_BODY_BYTES
MAX_RENDER_SECONDS = 10.0
# A private-use character that no special token is replaced by: see special_token_escaper.py.
_FINAL_MESSAGE_MARK = "\U0010fffd"
_MAX_REASON_CHARS = 200
_RESERVED_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "self",
        "raise_exception",
        "strftime_now",
    }
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, for a chat template to render."""

    messages: Sequence[Mapping[str, object]]  # each with at least `role` and `content`, texts
    add_generation_prompt: bool = True  # open the assistant's turn at the end
    # Further variables of the template, such as `enable_thinking`; see the model's card.
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[Mapping[str, object]] = ()  # that the model may call, as JSON describes them
    # End the prompt inside the last message, so that the output goes on with it.
    continue_final_message: bool = False

    @property
    def render_bytes(self) -> int:
        """Estimate of the work to render it: its text in bytes, and a constant for each value."""
        return sum(
            map(_estimate_bytes, (*self.messages, *self.tools, *self.template_kwargs.items()))
        )


def _estimate_bytes(value: object) -> int:
    if isinstance(value, str):
        return len(value) * (1 if value.isascii() else 4)
    if isinstance(value, Mapping):
        return 64 + sum(map(_estimate_bytes, chain(value.keys(), value.values())))
    if isinstance(value, Sequence):
        return 64 + sum(map(_estimate_bytes, value))
    return 64


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], clock: Clock = monotonic_clock
    ) -> None:
        """`special_tokens` are variables of the template, such as bos_token. Raises ConfigError."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template cannot be read ({error}): correct it"
            ) from None

    def render(self, conversation: ChatPrompt) -> str:
        """Return the prompt. Raises InvalidRequest, with the reason that the template gives."""
        check_messages(conversation)
        self._check_arguments(conversation.template_kwargs)
        try:
            if conversation.continue_final_message:
                return self._render_to_final_message(conversation)
            return self._render_within_limits(conversation)
        except _RenderLimitExceeded:
            bound = f"{MAX_RENDERED_CHARS} characters, {MAX_RENDER_SECONDS:g} s"
            raise InvalidRequest(
                f"messages exceed the limits of the chat template ({bound})", param="messages"
            ) from None
        except _TemplateRefusal as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from None
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = f"it fails with {type(error).__name__}"  # whose text may quote a message
            raise InvalidRequest(
                f"the chat template cannot render these messages: {reason}", param="messages"
            ) from None

    def _render_to_final_message(self, conversation: ChatPrompt) -> str:
        """Render up to the end of the last message, and no turn marker after it.

        A mark shows where it ends. A template that has removed the space after the mark would have
        removed what space ends the message itself.
        """
        *before, last = conversation.messages
        marked = {**last, "content": f"{last['content']}{_FINAL_MESSAGE_MARK} "}
        rendered = self._render_within_limits(replace(conversation, messages=[*before, marked]))
        prompt, mark, rest = rendered.rpartition(_FINAL_MESSAGE_MARK)
        if not mark:
            raise InvalidRequest(
                "continue_final_message is true, but the chat template does not show the last "
                "message",
                param="continue_final_message",
            )
        return prompt if rest.startswith(" ") else prompt.rstrip()

    def _render_within_limits(self, conversation: ChatPrompt) -> str:
        """Raises _RenderLimitExceeded, and the template's errors."""
        deadline = self._clock() + MAX_RENDER_SECONDS
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(
            **conversation.template_kwargs,
            messages=[dict(message) for message in conversation.messages],
            tools=[dict(tool) for tool in conversation.tools] or None,
            documents=None,
            add_generation_prompt=conversation.add_generation_prompt,
            **self._special_tokens,
        ):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS or self._clock() > deadline:
                raise _RenderLimitExceeded
        return "".join(pieces)

    def _check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Raises InvalidRequest, also for names that the template has already."""
        if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
            _raise_bad_kwargs(f"has {len(arguments)} entries: at most {MAX_TEMPLATE_ARGUMENTS}")
        for name, value in arguments.items():
            if not (
                name.isidentifier() and name.isascii() and len(name) <= MAX_TEMPLATE_KEY_CHARACTERS
            ):
                _raise_bad_kwargs(
                    f"has the name {name[:64]!r}: names are identifiers of 1 to "
                    f"{MAX_TEMPLATE_KEY_CHARACTERS} characters"
                )
            if name in _RESERVED_NAMES or name in self._special_tokens:
                _raise_bad_kwargs(f"has the name {name!r}, which is not free")
            if isinstance(value, str) and len(value) > MAX_TEMPLATE_STRING_CHARACTERS:
                _raise_bad_kwargs(
                    f"has a text of {len(value)} characters for {name!r}: at most "
                    f"{MAX_TEMPLATE_STRING_CHARACTERS}"
                )
            if isinstance(value, int | float) and not abs(value) <= MAX_TEMPLATE_NUMBER:
                _raise_bad_kwargs(f"has a number beyond {MAX_TEMPLATE_NUMBER} for {name!r}")


def _raise_bad_kwargs(reason: str) -> NoReturn:
    raise InvalidRequest(f"chat_template_kwargs {reason}", param="chat_template_kwargs")


def check_messages(conversation: ChatPrompt) -> None:
    """Raises InvalidRequest."""
    check_message_count(len(conversation.messages))
    for place, message in enumerate(conversation.messages):
        role = str(message["role"])
        if role not in MESSAGE_ROLES:
            given = repr(role if len(role) <= 64 else role[:61] + "...")
            allowed = ", ".join(MESSAGE_ROLES)
            raise InvalidRequest(
                f"messages[{place}].role is {given}: it must be one of {allowed}", param="messages"
            )


class _RenderLimitExceeded(Exception):
    pass


class _TemplateRefusal(Exception):
    """A template has called `raise_exception`; the message is its author's."""


class _GenerationBlocks(Extension):
    """Supports `{% generation %}`, which marks the assistant's turns for training: no effect."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self.tags = {"generation"}
        super().__init__(environment)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    functions: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise _TemplateRefusal(str(message)[:_MAX_REASON_CHARS])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

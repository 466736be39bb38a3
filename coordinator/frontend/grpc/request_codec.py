"""Converts requests of baton.v1.Generation to `GenerationRequest` and prompts."""

from collections.abc import Iterator, Sequence

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.errors import DeadlineExceeded, InvalidRequest
from baton.limits import check_entry_count, check_message_count, check_prompt_count
from baton.pb import generation_pb2 as pb
from baton.types import StructuredOutput
from coordinator.frontend.request import GenerationRequest, Prompt
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.structured_output import request_forms
from coordinator.text.chat_template import ChatPrompt

_MAX_NAMED_BYTES = 4096  # unknown fields of more bytes are not searched for a field to name
_OPTIONAL_FIELDS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
    "n",
)


def to_generation_request(
    request: pb.GenerateRequest,
    timeout: float | None,
    client_id: str | None,
    policy: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS,
) -> GenerationRequest:
    """`timeout` is in seconds, until the deadline. Raises InvalidRequest, DeadlineExceeded."""
    _check_counts(request)
    check_unknown_fields(request, policy)
    if timeout is not None and timeout <= 0:
        raise DeadlineExceeded("the deadline passed before the request was read")
    given = {
        field: getattr(request, field) for field in _OPTIONAL_FIELDS if request.HasField(field)
    }
    return GenerationRequest(
        prompts=_read_prompts(request),
        model=request.model or None,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        logit_bias=list(request.logit_bias.items()),
        echo=request.echo,
        first_choice=request.first_choice,
        timeout_seconds=timeout,
        client_request_id=client_id,
        priority=request.priority,
        structured_output=_read_structured_output(request),
        param_names={"prompt": "messages"} if request.HasField("chat") else {},
        **given,
    )


def _read_structured_output(request: pb.GenerateRequest) -> StructuredOutput | None:
    if not request.HasField("structured_output"):
        return None
    wanted = request.structured_output
    match wanted.WhichOneof("grammar"):
        case "regex":
            return request_forms.regex_output(wanted.regex)
        case "choice":
            return request_forms.choice_output(wanted.choice.texts)
        case "lark":
            return request_forms.grammar_output(wanted.lark)
        case "structural_tag":
            return request_forms.structural_tag_output(wanted.structural_tag)
        case "json":
            schema: object = wanted.json
        case "json_object" if wanted.json_object:
            schema = {"type": "object"}
        case _:
            raise InvalidRequest(
                "structured_output is empty: it must have one grammar", param="structured_output"
            )
    return request_forms.json_schema_output(
        schema,
        compact=wanted.disable_any_whitespace,
        closed=wanted.disable_additional_properties,
        whitespace_pattern=wanted.whitespace_pattern,
    )


def _check_counts(request: pb.GenerateRequest) -> None:
    """Bound the lists and maps that later code iterates over. Raises InvalidRequest."""
    for field in ("stop", "stop_token_ids", "logit_bias"):
        check_entry_count(field, len(getattr(request, field)))
    match request.WhichOneof("prompt"):
        case "prompts":
            check_prompt_count(len(request.prompts.prompts))
        case "chat":
            _check_chat(request.chat)


def _check_chat(chat: pb.Conversation) -> None:
    check_message_count(len(chat.messages))
    check_entry_count("chat_template_kwargs", len(chat.chat_template_kwargs))


def _read_prompts(request: pb.GenerateRequest) -> Sequence[Prompt] | ChatPrompt | None:
    match request.WhichOneof("prompt"):
        case "text":
            return [request.text]
        case "token_ids":
            return [request.token_ids.ids]
        case "chat":
            return to_chat_prompt(request.chat)
        case "prompts":
            return [
                _read_prompt(number, prompt)
                for number, prompt in enumerate(request.prompts.prompts)
            ]
        case _:
            return None


def _read_prompt(number: int, prompt: pb.Prompt) -> Prompt:
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text
        case "token_ids":
            return prompt.token_ids.ids
        case _:
            raise InvalidRequest(
                f"prompt[{number}] is missing: it must be text or token ids", param="prompt"
            )


def to_chat_prompt(chat: pb.Conversation) -> ChatPrompt:
    messages = [_read_chat_message(message) for message in chat.messages]
    return ChatPrompt(
        messages,
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        {name: _read_template_value(value) for name, value in chat.chat_template_kwargs.items()},
    )


def _read_template_value(value: pb.TemplateValue) -> object:
    set_field = value.WhichOneof("value")
    return None if set_field is None else getattr(value, set_field)


def _read_chat_message(message: pb.Message) -> dict[str, object]:
    shown: dict[str, object] = {"role": message.role, "content": message.content}
    shown.update(
        (field, getattr(message, field))
        for field in ("name", "tool_call_id")
        if message.HasField(field)
    )
    return shown


def to_tokenizer_input(
    request: pb.TokenizeRequest, policy: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS
) -> Prompt | ChatPrompt:
    """Raises InvalidRequest."""
    if request.HasField("chat"):
        _check_chat(request.chat)
    check_unknown_fields(request, policy)
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "chat":
            return to_chat_prompt(request.chat)
        case _:
            raise InvalidRequest("give prompt or messages, one of them", param="prompt")


def check_unknown_fields(message: Message, policy: UnknownFieldPolicy) -> None:
    """Raise InvalidRequest for unknown fields at any depth, or count those that are ignored.

    Unknown fields of more than `_MAX_NAMED_BYTES` in all count as one.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    surplus = message.ByteSize() - known.ByteSize()
    if not surplus:
        return
    found = list(_find_unknown_fields(message)) if surplus <= _MAX_NAMED_BYTES else []
    if policy.is_ignoring:
        policy.count_dropped(max(1, len(found)))
        return
    if not found:
        raise InvalidRequest(
            f"{surplus} bytes are of fields that {message.DESCRIPTOR.name} does not have"
        )
    number, message_name = found[0]
    raise InvalidRequest(
        f"field number {number} is not a field of {message_name}", param=str(number)
    )


def _find_unknown_fields(message: Message) -> Iterator[tuple[int, str]]:
    """Yield the number of each unknown field and the name of the message that has it."""
    unknown_set = UnknownFieldSet(message)
    for index in range(len(unknown_set)):
        yield unknown_set[index].field_number, message.DESCRIPTOR.name
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            parts = (
                value.values() if field.message_type.fields_by_name["value"].message_type else ()
            )
        else:
            parts = value if field.is_repeated else (value,)
        for part in parts:
            yield from _find_unknown_fields(part)

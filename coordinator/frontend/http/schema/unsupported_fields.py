"""Fields of OpenAI's, vLLM's, SGLang's and TensorRT-LLM's requests that Baton does not serve.

Many clients send such a field with a no-op value, which asks for nothing. The tables give, for each
route and field, the no-op values other than null; any other value is an error that names the field.
A whole number also stands for the equal floating-point number. Fields that no table and no schema
has can be removed from a body, at any depth.
"""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

NoOpValues = Mapping[str, tuple[object, ...]]
Kind = TypeVar("Kind", bound=msgspec.Struct)

_NULL: tuple[object, ...] = ()
_FALSE, _TRUE, _EITHER = (False,), (True,), (True, False)
_ZERO, _ONE = (0,), (1,)
_EMPTY_LIST: tuple[object, ...] = ([],)
_EMPTY_OBJECT: tuple[object, ...] = ({},)

_SAMPLING: NoOpValues = {
    "use_beam_search": _FALSE,
    "length_penalty": _ONE,
    "early_stopping": _FALSE,
    "top_p_min": _ZERO,
    "prompt_ignore_length": _ZERO,
    "include_stop_str_in_output": _FALSE,
    "no_stop_trim": _FALSE,
    "stop_regex": _EMPTY_LIST,
    "bad_words": _EMPTY_LIST,
    "allowed_token_ids": _NULL,
    "repetition_detection": _NULL,
    "thinking_token_budget": (-1,),
    "watermark": _NULL,
    "watermarking": _FALSE,
    "logits_processors": _EMPTY_LIST,
    "custom_logit_processor": _NULL,
    "custom_params": _EMPTY_OBJECT,
    "vllm_xargs": _EMPTY_OBJECT,
}
_TOKENIZING: NoOpValues = {
    "detokenize": _TRUE,
    "skip_special_tokens": _TRUE,
    "spaces_between_special_tokens": _EITHER,  # special tokens are not shown
}
_STRUCTURE: NoOpValues = {
    "structural_tag": _NULL,
    "guided_json": _NULL,
    "guided_regex": _NULL,
    "guided_choice": _NULL,
    "guided_grammar": _NULL,
    "guided_decoding_backend": _NULL,
    "guided_whitespace_pattern": _NULL,
    "json_schema": _NULL,
    "regex": _NULL,
    "ebnf": _NULL,
}
_ANSWER: NoOpValues = {
    "logprob_token_ids": _NULL,
    "return_tokens_as_token_ids": _FALSE,
    "return_token_offsets": _FALSE,
    "return_prompt_token_ids": _FALSE,
    "return_hidden_states": _FALSE,
    "return_context_logits": _FALSE,
    "return_generation_logits": _FALSE,
    "return_routed_experts": _FALSE,
    "routed_experts_start_len": _ZERO,
    "routed_experts_prompt_start": _ZERO,
    "return_cached_tokens_details": _FALSE,
    "return_spec_tokens_details": _FALSE,
    "return_weight_versions": _FALSE,
    "return_mm_kwargs": _EITHER,  # of vLLM's render routes only
    "mm_payload": ("tensors", "none"),  # likewise
    "stream_interval": _ONE,
}
_CLUSTER: NoOpValues = {
    "bootstrap_host": _NULL,
    "bootstrap_port": _NULL,
    "bootstrap_room": _NULL,
    "routed_dp_rank": _NULL,
    "data_parallel_rank": _NULL,
    "disagg_prefill_dp_rank": _NULL,
    "disaggregated_params": _NULL,
    "conversation_params": _NULL,
    "kv_transfer_params": _NULL,
    "ec_transfer_params": _NULL,
    "session_params": _NULL,
    "cache_salt": _NULL,
    "extra_key": _NULL,
    "custom_labels": _EMPTY_OBJECT,
    "lora_path": _NULL,
    "lora_request": _NULL,
}
_MEDIA: NoOpValues = {
    "mm_processor_kwargs": _EMPTY_OBJECT,
    "images_config": _EMPTY_OBJECT,
}
_GENERATION: NoOpValues = {
    **_SAMPLING,
    **_TOKENIZING,
    **_STRUCTURE,
    **_ANSWER,
    **_CLUSTER,
    **_MEDIA,
}

_TEMPLATE: NoOpValues = {
    "chat_template": _NULL,
    "media_io_kwargs": _EMPTY_OBJECT,
    "mm_processor_kwargs": _EMPTY_OBJECT,
}
_OPENAI_CHAT: NoOpValues = {
    "audio": _NULL,
    "function_call": ("none", "auto"),
    "functions": _EMPTY_LIST,
    "modalities": (["text"],),
    "moderation": _NULL,
    "prediction": _NULL,
    "prompt_cache_options": _EMPTY_OBJECT,
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": _FALSE,
    "verbosity": ("medium",),
    "web_search_options": _NULL,
}
_ENGINES_CHAT: NoOpValues = {
    "add_special_tokens": _FALSE,
    "echo": _FALSE,
    "documents": _EMPTY_LIST,
    "stream_reasoning": _EITHER,  # reasoning is streamed as it arrives
    "reasoning": _NULL,
    "thinking": _NULL,
    "task": _NULL,
    "input_ids": _NULL,
    "prompt_token_ids": _NULL,
    "prompt_token_ids_b64": _NULL,
    "injected_chat_template_kwargs": _EMPTY_LIST,
    "agent_hierarchy": _NULL,
    "return_prompt_text": _FALSE,
    "return_meta_info": _FALSE,
    "return_input_ids_in_sglext": _FALSE,
    "return_output_ids_in_sglext": _FALSE,
    "return_sampling_mask": _FALSE,
    "sampling_logprobs_mode": _NULL,
    "return_flat_raw_output_top_logprobs": _FALSE,
    "return_flat_raw_top_logprobs_b64": _EITHER,  # of those
    "max_dynamic_patch": _NULL,
    "min_dynamic_patch": _NULL,
    "use_audio_in_video": _FALSE,
    "video_config": _EMPTY_OBJECT,
}

COMPLETION_NO_OPS: NoOpValues = {
    **_GENERATION,
    "suffix": _NULL,
    "prompt_embeds": _NULL,
    "add_special_tokens": _TRUE,
}
CHAT_NO_OPS: NoOpValues = {**_GENERATION, **_TEMPLATE, **_OPENAI_CHAT, **_ENGINES_CHAT}
RESPONSES_NO_OPS: NoOpValues = {
    "background": _FALSE,
    "context_management": _NULL,
    "conversation": _NULL,
    "include": _EMPTY_LIST,
    "max_tool_calls": _NULL,
    "moderation": _NULL,
    "prompt": _NULL,
    "prompt_cache_options": _EMPTY_OBJECT,
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}, {"effort": "none"}),
    "service_tier": ("auto", "default"),
    "top_logprobs": _ZERO,
    "truncation": ("disabled",),
}
TOKENIZE_NO_OPS: NoOpValues = {
    **_TEMPLATE,
    "reasoning_effort": ("none",),
}
DETOKENIZE_NO_OPS: NoOpValues = {"skip_special_tokens": _FALSE}
MESSAGE_NO_OPS: NoOpValues = {
    "refusal": _NULL,
    "audio": _NULL,
    "function_call": _NULL,
    "annotations": _EMPTY_LIST,
    "tools": _EMPTY_LIST,
    "phase": _NULL,
    "prefix": _FALSE,
}


@functools.cache
def with_unsupported_fields(body_type: type[Kind]) -> type[Kind]:
    """Return the type that bodies are decoded to: `body_type` with the fields of its `no_ops`."""
    no_ops: NoOpValues = body_type.no_ops  # type: ignore[attr-defined]
    fields = [(name, Any, None) for name in no_ops if name not in body_type.__struct_fields__]
    if not fields:
        return body_type
    namespace = {"__doc__": body_type.__doc__}
    wire_type = msgspec.defstruct(
        body_type.__name__,
        fields,
        bases=(body_type,),
        namespace=namespace,
        frozen=True,
        kw_only=True,
    )
    return wire_type  # type: ignore[return-value]


# The fields of an object, each with the tree of the objects in it.
FieldTree = dict[str, "FieldTree | None"]


def build_field_tree(body_type: type[msgspec.Struct]) -> FieldTree:
    """Return the fields of a struct type, and of the structs in its fields."""
    return _field_tree_of(inspect.type_info(body_type)) or {}


def remove_unknown_fields(body: bytes, shape: FieldTree) -> tuple[bytes, int]:
    """Return the body without unknown fields, and their number. Raises msgspec.DecodeError."""
    value = msgspec.json.decode(body)
    removed = _remove_from_value(value, shape)
    return msgspec.json.encode(value), removed


def _field_tree_of(info: inspect.Type) -> FieldTree | None:
    match info:
        case inspect.StructType(fields=fields):
            return {field.encode_name: _field_tree_of(field.type) for field in fields}
        case inspect.ListType(item_type=item):
            return _field_tree_of(item)
        case inspect.UnionType(types=types):
            return next(
                (shape for each in types if (shape := _field_tree_of(each)) is not None), None
            )
        case inspect.Metadata(type=inner):
            return _field_tree_of(inner)
        case _:
            return None


def _remove_from_value(value: object, shape: FieldTree | None) -> int:
    if shape is None:
        return 0
    if isinstance(value, list):
        return sum(_remove_from_value(item, shape) for item in value)
    if not isinstance(value, dict):
        return 0
    unknown = value.keys() - shape.keys()
    for name in unknown:
        del value[name]
    return len(unknown) + sum(
        _remove_from_value(inner, shape[name]) for name, inner in value.items()
    )

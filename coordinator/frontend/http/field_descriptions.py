"""Descriptions of the fields of requests and responses, for the OpenAPI document.

Keys are field names, or schema and field where a name has two meanings. The defaults given here
apply where neither the request nor the model's generation_config.json sets the field.
"""

from baton import limits

NO_OP_DESCRIPTION = "Not available: these values only, which mean nothing"

REQUEST_FIELDS = {
    "model": "Name of the served model; may be left out",
    "CompletionRequest.prompt": (
        f"A text, token ids, or a list of up to {limits.MAX_PROMPTS} of either"
    ),
    "messages": "The conversation, which the model's own chat template makes a prompt of",
    "max_tokens": (
        f"Most tokens of an answer; 0 with echo only. Default: {limits.DEFAULT_MAX_TOKENS}"
    ),
    "ChatRequest.max_tokens": "The same as max_completion_tokens",
    "max_completion_tokens": "Most tokens of an answer. Default: the rest of the context",
    "temperature": "0 is greedy. Default: 1",
    "top_k": "Draw among so many of the likeliest tokens; 0 or -1 is off, the default",
    "top_p": "Draw among the likeliest tokens that together have this probability. Default: 1",
    "min_p": "Draw no token less likely than this share of the likeliest. Default: 0",
    "priority": (
        "Place in the order of classes, 0 first, capped by the key's own class; smaller goes "
        "earlier."
    ),
    "seed": "Same seed, same request: same noise. Default: a fresh one",
    "min_tokens": "No end token and no stop token before so many. Default: 0",
    "ignore_eos": "The model's end tokens do not end an answer. Default: false",
    "stop": (
        "An answer ends before any of these texts, wherever tokens begin and end. Default: none"
    ),
    "stop_token_ids": "An answer ends at any of these tokens. Default: none",
    "presence_penalty": "Off the logit of each token that the answer has already. Default: 0",
    "frequency_penalty": "Off it for each time that the answer has it. Default: 0",
    "repetition_penalty": (
        "Divides logits above 0 of tokens of prompt and answer, multiplies others. Default: 1"
    ),
    "logit_bias": "Added to the logits of these token ids. Default: none",
    "n": (
        "Choices for each prompt, from one prefill; of all prompts at most "
        f"{limits.MAX_TOTAL_CHOICES}. Default: 1"
    ),
    "best_of": "As many as n: nothing is chosen among more",
    "first_choice": "Number of the first choice, which its noise depends on. Default: 0",
    "stream": "Server-sent events, one for each piece, and `data: [DONE]` last. Default: false",
    "stream_options": "Of a stream only",
    "return_token_ids": "Adds token_ids to each choice or chunk. Default: false",
    "user": "The client's own, without effect",
    "session_id": "The client's own, without effect",
    "request_id": (
        "The client's own id of the request, where header `x-request-id` is not sent; it is not "
        "given back"
    ),
    "rid": "The same, where neither is sent",
    "echo": "Give the prompt back before the answer; with logprobs, scored. Default: false",
    "CompletionRequest.logprobs": (
        "Score each token, beside so many of the likeliest. Default: no scores"
    ),
    "ChatRequest.logprobs": "Score each token. Default: false",
    "top_logprobs": "So many of the likeliest tokens beside each, with logprobs. Default: 0",
    "add_generation_prompt": "End the prompt with what opens an answer. Default: true",
    "chat_template_kwargs": "Further variables of the model's chat template",
    "metadata": "The client's own, without effect",
    "parallel_tool_calls": "Without effect: there are no tools",
    "tools": "Without effect, and with `tool_choice` `none` only: no answer calls a tool",
    "prompt_cache_key": "Without effect: what is cached is found by its tokens",
    "safety_identifier": "The client's own, without effect",
    "include_usage": "One more event at the end, with usage and no choices. Default: false",
    "continuous_usage_stats": "Every event has the usage so far. Default: false",
    "include_obfuscation": "Without effect: nothing is padded",
    "role": "Who speaks",
    "content": "A text, or parts of the type text; null from the assistant alone, as an empty text",
    "name": "For the chat template, which may ignore it",
    "tool_call_id": "For the chat template, which may ignore it",
    "ContentPart.type": "`text` is the one type that is served",
    "ContentPart.text": "The text",
    "TokenizeRequest.prompt": "A text; or give messages",
    "TokenizeRequest.messages": "A conversation; or give prompt",
    "add_special_tokens": (
        "Such as the one that begins a text. Default: true for a text, false for a conversation"
    ),
    "return_token_strs": "Give each token's spelling too. Default: false",
    "DetokenizeRequest.tokens": "Token ids",
    **dict.fromkeys(("image_url", "input_audio", "file", "ContentPart.refusal"), "Not available"),
}
RESPONSE_FIELDS = {
    "id": "`baton explain` takes it",
    "object": "What this is",
    "created": "Unix time, seconds",
    "model": "Name of the served model",
    "choices": "Prompt by prompt",
    "usage": "Of all prompts and choices",
    "index": "Its number",
    "text": "The answer, after the prompt if echo is asked for",
    "message": "The answer",
    "CompletionChoice.logprobs": "Null unless asked for",
    "ChatChoice.logprobs": "Null unless asked for",
    "finish_reason": "`stop`: an end token, a stop token or a stop text. `length`: max_tokens",
    "token_ids": "If return_token_ids asks for them",
    "tokens": "The text of each token",
    "token_logprobs": (
        "Natural logarithms; null for the first token of a prompt. -9999 for a probability of 0"
    ),
    "CompletionLogprobs.top_logprobs": "For each token, the likeliest ones in its place and itself",
    "text_offset": "Where each token begins, in characters",
    "content": "The answer",
    "ChatLogprobs.content": "One entry for each token",
    "role": "`assistant`",
    "refusal": "Null",
    "token": "Its text",
    "logprob": "Natural logarithm; -9999 for a probability of 0",
    "bytes": "Of the token's text; null if it has none",
    "top_logprobs": "The likeliest tokens in its place",
    "prompt_tokens": "Of each prompt once, whatever n is",
    "completion_tokens": "Of all choices",
    "total_tokens": "Both",
    "prompt_tokens_details": "Of the prompts; null in the middle of a stream",
    "cached_tokens": "Prompt tokens that a node's cache held",
    "count": "How many tokens",
    "max_model_len": "Longest prompt plus output, in tokens",
    "TokenizeResponse.tokens": "Token ids",
    "token_strs": "As the vocabulary spells them; null unless asked for",
    "DetokenizeResponse.prompt": "The text of all tokens, special ones too",
    "model_digest": "Of its weights and architecture, in hex",
    "dtype": "Of its arithmetic",
    "quantization": "Of the products of its layers: `none`, `int8` or `fp8`",
    "data": "One model",
    "ModelCard.id": "Its name",
    "ModelCard.created": "0",
    "owned_by": "`baton`",
    "status": "`ok`",
    "version": "Of the coordinator",
    "error": "What went wrong",
    "ErrorDetail.message": "Names the value, the bound and the setting",
    "type": "OpenAI's kind of error",
    "param": "The field that it is about, if any",
    "code": "Baton's name for it",
}


def describe_field(table: dict[str, str], schema: str, field: str) -> str:
    """Raises KeyError for a field without a description."""
    return table.get(f"{schema}.{field}") or table[field]

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
    "return_token_ids": (
        "Adds the token ids of the prompt (in a stream to its first chunk), of each choice or "
        "chunk, and of logprobs. Default: false"
    ),
    "prompt_logprobs": (
        "Score each token of the prompt, beside so many of the likeliest; not with stream. "
        "Default: no scores"
    ),
    "truncate_prompt_tokens": (
        "Keep so many tokens of a prompt; -1 for as many as leave room for `max_tokens`, or for "
        f"{limits.DEFAULT_MAX_TOKENS} if it is not given. Default: a prompt that is too long is an "
        "error"
    ),
    "truncation_side": "Where tokens are left out: `left`, the default, or `right`",
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
    "tools": (
        f"Functions that the model may call, at most {limits.MAX_TOOLS}, shown to it by the "
        "model's own chat template"
    ),
    "tool_choice": (
        "`none`: no call. `auto`: the model chooses. `required`: at least one call. Or the one "
        "function to call. Default: auto"
    ),
    "parallel_tool_calls": "Whether an answer may have several calls. Default: true",
    "include_reasoning": "Return what the model wrote before its answer. Default: true",
    "separate_reasoning": "Tell reasoning from content. Default: true",
    "continue_final_message": (
        "End the prompt inside the last message, which the answer goes on with. Default: false"
    ),
    "tool_calls": "Calls that an answer of the model made",
    "reasoning": "The same as reasoning_content",
    "reasoning_content": "What the model wrote before its answer, for the chat template",
    "ToolParam.type": "`function` is the one type that is served",
    "ToolParam.function": "The function",
    "NamedToolChoiceParam.function": "The function to call",
    "NamedToolChoiceParam.type": "`function`",
    "FunctionNameParam.name": "Its name",
    "FunctionParam.name": "Its name",
    "FunctionParam.description": "What it does, for the model",
    "FunctionParam.parameters": "JSON schema of its arguments",
    "FunctionParam.strict": "Without effect: calls that are asked for follow the schema anyway",
    "ToolCallParam.function": "The function and its arguments",
    "ToolCallParam.id": "As the answer gave it",
    "ToolCallParam.type": "`function`",
    "ToolCallParam.index": "Without effect",
    "FunctionCallParam.name": "Its name",
    "FunctionCallParam.arguments": "A JSON object, or a text that has one",
    "response_format": "What the answer is: a text, or JSON of a schema. Default: a text",
    "structured_outputs": "What the answer obeys, as in vLLM. Default: anything",
    "ResponseFormat.type": "`json_object` and `json_schema`: the answer is JSON",
    "json_schema": "With the type `json_schema`",
    "JsonSchemaFormat.name": "The client's own, without effect",
    "JsonSchemaFormat.description": "The client's own, without effect",
    "schema": "The JSON schema that the answer satisfies",
    "strict": "Without effect: a schema is always enforced",
    "structures": "With the type `structural_tag`: `begin`, `schema` and `end` of each tag",
    "triggers": "With the type `structural_tag`: texts after which one of the tags follows",
    "json": "A JSON schema that the answer satisfies, or the text of one",
    "regex": "A regular expression that matches the whole answer",
    "choice": "The answer is one of these texts",
    "grammar": "A context-free grammar, in Lark or GBNF",
    "json_object": "True: the answer is any JSON object",
    "structural_tag": "Tags whose contents satisfy schemas, in free text",
    "disable_any_whitespace": "With json: nothing between values. Default: false",
    "disable_additional_properties": (
        "With json: objects have the properties that the schema names and no others. Default: false"
    ),
    "whitespace_pattern": (
        "With json: a regular expression of what may be between values. Default: one space, or a "
        "line break and up to 40 spaces or tabs"
    ),
    "disable_fallback": "Without effect: there is one compiler of grammars",
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
# Of /v1/responses: bodies, and what their parts mean.
_RESPONSES_REQUEST_FIELDS = {
    "ResponsesRequest.stream": (
        "Server-sent events of several types, `response.completed` or `response.incomplete` last. "
        "Default: false"
    ),
    "ResponsesRequest.input": "A text, or the items of a conversation, its answers among them",
    "instructions": "The first message, of the role system",
    "max_output_tokens": "Most tokens of an answer. Default: the rest of the context",
    "ResponsesRequest.text": "What the answer's text is. Default: any text",
    "store": "No response is kept",
    "previous_response_id": "Not available, because no response is kept: send the conversation",
    "InputItem.type": "`message`, `function_call`, `function_call_output` or `reasoning`",
    "InputItem.id": "As the answer gave it, without effect",
    "InputItem.call_id": "Of a call and of its result",
    "InputItem.name": "Of the function that is called",
    "InputItem.arguments": "A text that has a JSON object",
    "InputItem.output": "The result of a call",
    "InputItem.summary": "Of reasoning, where it has no content",
    "InputItem.content": "A text, or parts with texts",
    **dict.fromkeys(("InputItem.status", "InputItem.phase"), "Without effect"),
    "encrypted_content": "Without effect",
    "InputPart.type": "`input_text`, `output_text`, or another of text",
    "InputPart.text": "The text",
    **dict.fromkeys(("InputPart.annotations", "InputPart.logprobs"), "Without effect"),
    **dict.fromkeys(("file_id", "InputPart.refusal"), "Not available"),
    "InputPart.detail": "Without effect",
    "ResponsesToolParam.type": "`function` is the one type that is served",
    "ResponsesToolParam.name": "Its name",
    "ResponsesToolParam.description": "What it does, for the model",
    "ResponsesToolParam.parameters": "JSON schema of its arguments",
    "ResponsesToolParam.strict": "Without effect",
    "ResponsesToolChoiceParam.name": "The function to call",
    "ResponsesToolChoiceParam.type": "`function`",
    "TextConfig.format": "The format",
    "TextConfig.verbosity": "Without effect",
    "TextFormat.type": "`text`, `json_object`, or `json_schema` with a schema",
    "TextFormat.name": "Of the schema, without effect",
    "TextFormat.description": "Of the schema, without effect",
    "TextFormat.schema": "JSON schema of the answer",
    "TextFormat.strict": "Without effect: the answer follows the schema anyway",
}
REQUEST_FIELDS |= _RESPONSES_REQUEST_FIELDS
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
    "finish_reason": (
        "`stop`: an end token, a stop token or a stop text. `length`: max_tokens. `tool_calls`: "
        "the model calls functions"
    ),
    "tool_calls": "If the model calls functions",
    "reasoning_content": "What the model wrote before its answer, if it did",
    "reasoning": "The same as reasoning_content",
    "ChatToolCall.id": "The id that the function's result names",
    "ChatToolCall.type": "`function`",
    "function": "The function and its arguments",
    "name": "Its name",
    "arguments": "JSON, as the model wrote it",
    "token_ids": "If return_token_ids asks for them",
    "prompt_token_ids": "Likewise; in a stream, in the first event",
    "prompt_logprobs": (
        "If asked for: one entry for each token of the prompt, null for the first. It has the "
        "token itself, then the likeliest in its place, by token id"
    ),
    "rank": "1 for the likeliest; null for a token that is not among those asked for",
    "decoded_token": "Its text",
    "stop_reason": "The text or the one of stop_token_ids that ended the answer; else absent",
    "token_id": "If return_token_ids asks for it",
    "top_tokens": (
        "If return_token_ids asks for them: the likeliest in each place, best first, also those of "
        "the same text, of which top_logprobs has one"
    ),
    "TopToken.token_id": "Its id",
    "tokens": "The text of each token",
    "token_logprobs": (
        "Natural logarithms; null for the first token of a prompt. -9999 for a probability of 0"
    ),
    "CompletionLogprobs.top_logprobs": "For each token, the likeliest ones in its place and itself",
    "text_offset": "Where each token begins, in characters",
    "content": "The answer; null beside calls or reasoning without one",
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
    "ResponsesResponse.id": "Begins with `resp_`",
    "created_at": "Unix time, seconds",
    "ResponsesResponse.status": "`completed`, `incomplete`, or `in_progress` in a stream",
    "output": "Messages, calls of functions, and reasoning",
    **dict.fromkeys(
        ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature"),
        "As the request has it",
    ),
    **dict.fromkeys(
        ("ResponsesResponse.text", "tool_choice", "tools", "top_p"), "As the request has it"
    ),
    "incomplete_details": "Why the answer was cut",
    "ResponsesResponse.error": "Null",
    **dict.fromkeys(("background", "store"), "False"),
    "previous_response_id": "Null",
    "truncation": "`disabled`",
    "input_tokens": "Of the prompt",
    "input_tokens_details": "Of them",
    "cache_write_tokens": "0",
    "output_tokens": "Of the answer",
    "output_tokens_details": "Of them",
    "reasoning_tokens": "Of reasoning",
    "reason": "`max_output_tokens`",
    "OutputText.text": "The text",
    "ReasoningText.text": "The text",
    "annotations": "Empty",
    "OutputText.logprobs": "Empty",
    **dict.fromkeys(
        ("OutputMessage.status", "ReasoningItem.status", "FunctionCallItem.status"),
        "`completed`, or `incomplete` if max_output_tokens cut it",
    ),
    **dict.fromkeys(("OutputMessage.id", "ReasoningItem.id", "FunctionCallItem.id"), "Its id"),
    "summary": "Empty",
    "call_id": "The id that the function's result names",
    "error": "What went wrong",
    "ErrorDetail.message": "Names the value, the bound and the setting",
    "type": "OpenAI's kind of error",
    "param": "The field that it is about, if any",
    "code": "Baton's name for it",
}


def describe_field(table: dict[str, str], schema: str, field: str) -> str:
    """Raises KeyError for a field without a description."""
    return table.get(f"{schema}.{field}") or table[field]

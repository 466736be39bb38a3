"""The chat format: special tokens, the chat template, and the same layout for training."""

from collections.abc import Sequence

BOS = "<|bos|>"
EOS = "<|eos|>"  # ends a document, and an answer
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (BOS, EOS, *ROLE_TOKENS.values())  # ids 0, 1, ...

# A role's token opens a turn; the next role's token, or EOS after an answer, ends it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

ChatTurn = tuple[str, str]  # role, text


def render_chat(turns: Sequence[ChatTurn]) -> str:
    """Return what TEMPLATE makes of the turns."""
    parts = [
        ROLE_TOKENS[role] + text.strip() + (EOS if role == "assistant" else "")
        for role, text in turns
    ]
    return BOS + "".join(parts)

"""The chat format, in one place: special tokens, the template, and the same layout for training."""

from collections.abc import Sequence

BOS = "<|bos|>"
EOS = "<|eos|>"  # ends a document, and an answer
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL = (BOS, EOS, *ROLES.values())  # ids 0, 1, ...

# A role's token opens a turn; the next role's token, or EOS after an answer, ends it.
TEMPLATE = (
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

Turn = tuple[str, str]  # role, text


def render(turns: Sequence[Turn]) -> str:
    """What TEMPLATE makes of the turns."""
    parts = [ROLES[role] + text.strip() + (EOS if role == "assistant" else "") for role, text in turns]
    return BOS + "".join(parts)

"""Conversations made of docstrings: questions about the library's names, and small talk."""

import random
from collections.abc import Iterator, Sequence

from tools.demo_model.common.chat_format import ChatTurn, render_chat
from tools.demo_model.corpus.definitions import DocumentedName
from tools.demo_model.corpus.small_talk import SMALL_TALK, SYSTEM_PROMPTS

ROUNDS_PER_NAME = 4  # times that every name is asked about
SMALL_TALK_SHARE = 0.12  # of the exchanges
SYSTEM_SHARE = 0.3  # of the conversations
EXCHANGE_COUNTS = (1, 1, 1, 2, 3)  # exchanges in a conversation

_ABOUT_ANY = (
    "What does {name} do?",
    "what does {name} do",
    "What is {name}?",
    "what is {name}",
    "Explain {name}.",
    "Tell me about {name}.",
    "What is {name} for?",
)
_ABOUT_MODULE = (
    "What is the {name} module?",
    "What does the {name} module do?",
    "What is in the module {name}?",
)
_ABOUT_FUNCTION = ("How do I call {name}?", "Which arguments does {name} take?")
_ABOUT_PLACE = ("Which module has {last}?", "How do I import {last}?")


def generate_conversations(names: Sequence[DocumentedName], seed: int) -> Iterator[str]:
    """Yield conversations that ask about every name ROUNDS times, in random order."""
    chance = random.Random(seed)
    subjects = [name for name in names for _ in range(ROUNDS_PER_NAME)]
    chance.shuffle(subjects)
    while subjects:
        turns: list[ChatTurn] = []
        if chance.random() < SYSTEM_SHARE:
            turns.append(("system", chance.choice(SYSTEM_PROMPTS)))
        for _ in range(chance.choice(EXCHANGE_COUNTS)):
            is_small_talk = not subjects or chance.random() < SMALL_TALK_SHARE
            question, answer = (
                _small_talk_exchange(chance)
                if is_small_talk
                else _exchange_about(subjects.pop(), chance)
            )
            turns += [("user", question), ("assistant", answer)]
        yield render_chat(turns)


def _small_talk_exchange(chance: random.Random) -> tuple[str, str]:
    questions, answer = chance.choice(SMALL_TALK)
    return chance.choice(questions), answer


def _exchange_about(name: DocumentedName, chance: random.Random) -> tuple[str, str]:
    last = name.name.rpartition(".")[2]
    is_top_level = name.kind != "module" and name.name == f"{name.module}.{last}"
    kind = chance.random()
    if name.arguments and kind < 0.2:
        return chance.choice(_ABOUT_FUNCTION).format(name=name.name), f"{name.name}{name.arguments}"
    if is_top_level and kind < 0.3:
        return chance.choice(_ABOUT_PLACE).format(last=last), f"from {name.module} import {last}"
    questions = _ABOUT_ANY + _ABOUT_MODULE if name.kind == "module" else _ABOUT_ANY
    return chance.choice(questions).format(name=name.name), name.summary

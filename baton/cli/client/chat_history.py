"""The history of one conversation, as messages of a chat request. Pure."""

from dataclasses import dataclass, field

ChatMessage = dict[str, str]


@dataclass(slots=True)
class ChatHistory:
    """Alternating questions and answers, after an optional system prompt that is never dropped."""

    system_prompt: str = ""  # empty: none
    history: list[ChatMessage] = field(default_factory=list)

    @property
    def messages(self) -> list[ChatMessage]:
        return [
            *([{"role": "system", "content": self.system_prompt}] if self.system_prompt else []),
            *self.history,
        ]

    @property
    def answered_turns(self) -> int:
        """The number of questions that have an answer."""
        return len(self.history) // 2

    def add_question(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def add_answer(self, text: str) -> None:
        """Add the answer to the last question, which may be incomplete.

        An empty text is no answer: it removes the question.
        """
        if text:
            self.history.append({"role": "assistant", "content": text})
        else:
            self.history.pop()

    def drop_oldest_turn(self) -> bool:
        """Drop the oldest question and its answer. Return False if none has an answer."""
        if not self.answered_turns:
            return False
        del self.history[:2]
        return True

    def reset(self) -> None:
        self.history.clear()

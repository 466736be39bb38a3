"""What has been said in one conversation, as the messages of a chat request. Pure."""

from dataclasses import dataclass, field

ChatMessage = dict[str, str]


@dataclass(slots=True)
class ChatHistory:
    """`system_prompt` stays at the head, whatever is forgotten; "" is none. Questions and answers
    alternate."""

    system_prompt: str = ""
    history: list[ChatMessage] = field(default_factory=list)

    @property
    def messages(self) -> list[ChatMessage]:
        return [
            *([{"role": "system", "content": self.system_prompt}] if self.system_prompt else []),
            *self.history,
        ]

    @property
    def answered_turns(self) -> int:
        """Questions that have an answer."""
        return len(self.history) // 2

    def add_question(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def add_answer(self, text: str) -> None:
        """Of the last question, perhaps only as far as it came. Nothing at all is no answer: the
        question goes too."""
        if text:
            self.history.append({"role": "assistant", "content": text})
        else:
            self.history.pop()

    def drop_oldest_turn(self) -> bool:
        """Drop the oldest question and its answer. False when only the last question is left."""
        if not self.answered_turns:
            return False
        del self.history[:2]
        return True

    def reset(self) -> None:
        self.history.clear()

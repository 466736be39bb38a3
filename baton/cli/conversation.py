"""What has been said in one conversation, as the messages of a chat request. Pure."""

from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """`system` stays at the head, whatever is forgotten; "" is none. Questions and answers alternate."""

    system: str = ""
    said: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.said]

    @property
    def turns(self) -> int:
        """Questions that have an answer."""
        return len(self.said) // 2

    def ask(self, text: str) -> None:
        self.said.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Of the last question, perhaps only as far as it came. Nothing at all is no answer: the question goes too."""
        if text:
            self.said.append({"role": "assistant", "content": text})
        else:
            self.said.pop()

    def forget_oldest(self) -> bool:
        """Drop the oldest question and its answer. False when only the last question is left."""
        if not self.turns:
            return False
        del self.said[:2]
        return True

    def reset(self) -> None:
        self.said.clear()

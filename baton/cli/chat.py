"""`baton chat`: hold a conversation with a model on the terminal."""

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from baton.cli.client.chat_history import ChatHistory
from baton.cli.common.errors import EXIT_FAILURE, CommandFailed, EndpointUnreachable
from baton.cli.common.options import ApiKeyOption

DEFAULT_URL = "http://127.0.0.1:8000"
CONTEXT_FULL = "context_length_exceeded"
CHAT_HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"
_CONTROL_CHARACTERS = {
    code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}

AnswerStream = Callable[[Mapping[str, Any]], Any]  # request body -> AnswerChunks


def register(app: typer.Typer) -> None:
    app.command("chat")(chat)


def chat(
    system: Annotated[str, typer.Option(help="What the model is told before anything else")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer", min=1)] = None,
    model: Annotated[str, typer.Option(help="May be left out when one model is served")] = "",
    url: Annotated[
        str,
        typer.Option(
            "--url", envvar="BATON_URL", help="Base URL of any OpenAI-compatible endpoint"
        ),
    ] = DEFAULT_URL,
    api_key: ApiKeyOption = "",
) -> None:
    """Talk with the model.

    /reset forgets the conversation, /quit leaves, Ctrl-C stops an answer. When the context is full,
    the oldest turns are forgotten. If questions come from a pipe and one got an error, the exit
    code is 1.
    """
    from baton.cli.client.chat_completions import ChatClient
    from baton.config.resolve import read_secret

    client = ChatClient(url, read_secret(api_key, "api_key"))
    options: dict[str, Any] = {"model": model or client.get_first_model()}
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    options |= {name: value for name, value in sampling.items() if value is not None}
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        print(f"{options['model']} at {url}. {CHAT_HELP}.")
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    session = ChatSession(
        client.stream_answer, ChatHistory(system), options, "> " if on_terminal else ""
    )
    session.run()
    if session.has_failed and not on_terminal:
        raise typer.Exit(EXIT_FAILURE)


class ChatSession:
    """Reads questions from standard input and streams the answers to standard output."""

    def __init__(
        self, ask: AnswerStream, conversation: ChatHistory, options: Mapping[str, Any], prompt: str
    ) -> None:
        self._stream_answer = ask
        self._conversation = conversation
        self._options = options
        self._prompt = prompt
        self.has_failed = False  # whether a question got an error

    def run(self) -> None:
        """Answer questions until the input ends or the user enters /quit."""
        # Shells start background processes with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        while True:
            try:
                line = input(self._prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                _print_notice(CHAT_HELP)
                continue
            if line in ("/quit", "/exit"):
                return
            self._handle_line(line)

    def _handle_line(self, line: str) -> None:
        if line == "/reset":
            self._conversation.reset()
            _print_notice("forgotten")
        elif line.startswith("/"):
            _print_notice(CHAT_HELP)
        elif line:
            self._conversation.add_question(line)
            self._conversation.add_answer(self._get_answer())

    def _get_answer(self) -> str:
        """Stream one answer to the terminal and return its text, also when it was cut off.

        While the context is full, the oldest turns are dropped and the question is sent again.
        """
        from baton.cli.client.chat_completions import ChatRefused

        while True:
            received: list[str] = []
            try:
                self._print_answer(received)
            except KeyboardInterrupt:
                _print_notice("stopped", after=received)
            except (CommandFailed, EndpointUnreachable) as error:
                if (
                    isinstance(error, ChatRefused)
                    and error.error_code == CONTEXT_FULL
                    and not received
                    and self._conversation.drop_oldest_turn()
                ):
                    _print_notice("the context is full: the oldest turn is forgotten")
                    continue
                _print_notice(f"error: {error.message}", after=received)
                self.has_failed = True
                return ""
            return "".join(received)

    def _print_answer(self, received: list[str]) -> None:
        """Print the chunks of an answer. Each is appended to `received` before it is shown."""
        finish_reason = ""
        with contextlib.closing(
            self._stream_answer({**self._options, "messages": self._conversation.messages})
        ) as chunks:
            for chunk in chunks:
                if chunk.text:
                    received.append(chunk.text)
                    sys.stdout.write(chunk.text.translate(_CONTROL_CHARACTERS))
                    sys.stdout.flush()
                finish_reason = chunk.finish_reason or finish_reason
        sys.stdout.write("\n")
        sys.stdout.flush()
        if finish_reason == "length":
            _print_notice(
                "cut: the answer has reached its most tokens (--max-tokens, or the context)"
            )


def _print_notice(notice: str, *, after: list[str] | None = None) -> None:
    """Print a line about the conversation to standard error.

    `after` is the part of an answer that has been shown and has not ended its line.
    """
    sys.stdout.flush()
    if after:
        sys.stdout.write("\n")
        sys.stdout.flush()
    sys.stderr.write(f"({notice})\n")
    sys.stderr.flush()

"""Calls a server with the clients that applications use, and checks what they return.

Run by `make clients` in the clients' own environment: `client_calls.py URL [RECORD]`. The server
has the model of `scripted_model.py`. RECORD is a folder for the bodies that the clients sent.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import instructor
import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ANN = Person(name="Ann", age=31)
PERSON_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "Person",
        "description": "A person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
    },
}
RESPONSES_TOOL: Any = {"type": "function", "strict": True, **PERSON_TOOL["function"]}
# Modes of instructor whose requests any server of chat completions can answer.
INSTRUCTOR_MODES = {
    "TOOLS": "json",
    "TOOLS_STRICT": "json",
    "JSON": "json",
    "JSON_SCHEMA": "json",
    "MD_JSON": "markdown",
    "RESPONSES_TOOLS": "json",
}


def ask(script: str) -> list[Any]:
    return [{"role": "user", "content": f"Who is it? SCRIPT-{script}"}]


class ClientCalls:
    """The calls of all clients; the name of a method says which client makes it."""

    def __init__(self, url: str) -> None:
        self.bodies: list[tuple[str, str, Any]] = []  # call, path, body
        self._call = ""
        self._http = openai.DefaultHttpxClient(event_hooks={"request": [self._record]})
        self._base_url = f"{url}/v1"
        # Typed by another version of the package than the one that runs.
        self._client: Any = openai.OpenAI(
            base_url=self._base_url, api_key="none", http_client=self._http, max_retries=0
        )

    def run_all(self) -> list[str]:
        """Run each call; return the names of those that failed."""
        failed = []
        calls: dict[str, Callable[[], None]] = {
            name: getattr(self, name)
            for name in dir(self)
            if name.startswith(("openai_", "instructor_", "langchain_", "lm_eval_"))
        }
        for name, call in calls.items():
            self._call = name
            try:
                call()
                sys.stdout.write(f"ok      {name}\n")
            except Exception as error:
                failed.append(name)
                sys.stdout.write(f"FAILED  {name}: {type(error).__name__}: {error}\n")
        return failed

    def _record(self, request: Any) -> None:
        body = json.loads(request.content)
        self.bodies.append((self._call, request.url.path, body))

    def openai_tools(self) -> None:
        (choice,) = self._client.chat.completions.create(
            model="scripted", messages=ask("call"), tools=[PERSON_TOOL], max_tokens=60
        ).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert Person.model_validate_json(call.function.arguments) == ANN
        history = [
            *ask("text"),
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        (last,) = self._client.chat.completions.create(
            model="scripted", messages=history, tools=[PERSON_TOOL], max_tokens=60
        ).choices
        assert last.message.content == "Hello, I am Ann."

    def openai_forced_tools(self) -> None:
        named: Any = {"type": "function", "function": {"name": "Person"}}
        for script, choice, reason in (
            ("required", "required", "tool_calls"),
            ("json", named, "stop"),
        ):
            (told,) = self._client.chat.completions.create(
                model="scripted",
                messages=ask(script),
                tools=[PERSON_TOOL],
                tool_choice=choice,
                max_tokens=60,
            ).choices
            (call,) = told.message.tool_calls
            assert told.finish_reason == reason
            assert Person.model_validate_json(call.function.arguments) == ANN

    def openai_parse(self) -> None:
        (choice,) = self._client.chat.completions.parse(
            model="scripted", messages=ask("json"), response_format=Person, max_tokens=60
        ).choices
        assert choice.message.parsed == ANN

    def openai_stream(self) -> None:
        with self._client.chat.completions.stream(
            model="scripted",
            messages=ask("calls"),
            tools=[openai.pydantic_function_tool(Person)],
            max_tokens=90,
        ) as stream:
            kinds = [event.type for event in stream]
            (choice,) = stream.get_final_completion().choices
        assert kinds.count("tool_calls.function.arguments.done") == 2
        names = [call.function.parsed_arguments.name for call in choice.message.tool_calls or ()]
        assert names == ["Ann", "Bob"]

    def openai_responses(self) -> None:
        told = self._client.responses.create(
            model="scripted", input="Who? SCRIPT-text", max_output_tokens=60, store=False
        )
        assert told.output_text == "Hello, I am Ann."
        parsed = self._client.responses.parse(
            model="scripted", input="Who? SCRIPT-json", text_format=Person, max_output_tokens=60
        )
        assert parsed.output_parsed == ANN

    def openai_responses_stream(self) -> None:
        with self._client.responses.stream(
            model="scripted",
            input="Who? SCRIPT-call",
            tools=[RESPONSES_TOOL],
            max_output_tokens=60,
        ) as stream:
            kinds = [event.type for event in stream]
            (call,) = stream.get_final_response().output
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert Person.model_validate_json(call.arguments) == ANN

    def instructor_modes(self) -> None:
        for mode, script in INSTRUCTOR_MODES.items():
            client = instructor.from_openai(self._client, mode=instructor.Mode[mode])
            told = client.chat.completions.create(
                model="scripted",
                messages=ask(script),
                response_model=Person,
                max_tokens=60,
                max_retries=0,
            )
            assert told.model_dump() == ANN.model_dump(), mode

    def instructor_parallel_tools(self) -> None:
        client = instructor.from_openai(self._client, mode=instructor.Mode.PARALLEL_TOOLS)
        told = client.chat.completions.create(
            model="scripted",
            messages=ask("calls"),
            response_model=Iterable[Person],
            max_tokens=90,
            max_retries=0,
        )
        assert [person.name for person in told] == ["Ann", "Bob"]

    def langchain_structured_output(self) -> None:
        for method in ("function_calling", "json_schema", "json_mode"):
            model: Any = self._chat_model().with_structured_output(Person, method=method)
            assert model.invoke("Who? in json SCRIPT-json") == ANN, method

    def langchain_bind_tools(self) -> None:
        @tool("Person")  # type: ignore[untyped-decorator,unused-ignore]
        def make_person(name: str, age: int) -> str:
            """Make a person."""
            return f"{name} {age}"

        model = self._chat_model().bind_tools([make_person])
        (call,) = model.invoke("Who? SCRIPT-call").tool_calls
        assert (call["name"], call["args"]) == ("Person", ANN.model_dump())
        chunks: Any = None
        for chunk in model.stream("Who? SCRIPT-call"):
            chunks = chunk if chunks is None else chunks + chunk
        assert chunks.tool_calls[0]["args"] == ANN.model_dump()

    def lm_eval_remote_tokenizer(self) -> None:
        """Its token ids are the server's, so that it knows where a continuation begins."""
        model = LocalCompletionsAPI(
            model="scripted",
            base_url=f"{self._base_url}/completions",
            tokenizer_backend="remote",
            max_length=2048,
        )
        assert model.eos_string == "<|end|>"
        text = "Hello, I am Ann."
        begin = "<|text|>"  # of the script
        tasks = [(begin, text), (begin, text[::-1]), (f"{begin}Hell", text[4:])]
        scores = model.loglikelihood(make_instances("loglikelihood", tasks))
        assert [is_greedy for _, is_greedy in scores] == [True, False, True]
        assert all(abs(scores[place][0]) < 0.01 for place in (0, 2))
        assert scores[1][0] < -100
        (total,) = model.loglikelihood_rolling(
            make_instances("loglikelihood_rolling", [(f"{begin}{text}",)])
        )
        assert -100 < total < -1  # only the first token is unlikely
        (answer,) = model.generate_until(
            make_instances("generate_until", [(begin, {"until": ["Ann"], "max_gen_toks": 20})])
        )
        assert answer == "Hello, I am "

    def _chat_model(self) -> ChatOpenAI:
        fields: dict[str, Any] = {"model": "scripted", "api_key": "none", "max_tokens": 60}
        return ChatOpenAI(base_url=self._base_url, http_client=self._http, max_retries=0, **fields)


def make_instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Return requests of lm_eval."""
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=index)
        for index, each in enumerate(arguments)
    ]


def write_bodies(folder: Path, bodies: list[tuple[str, str, Any]]) -> None:
    """Write a file for each client and route, as those of tests/data/client_bodies are."""
    grouped: dict[tuple[str, str], list[Any]] = {}
    for call, path, body in bodies:
        grouped.setdefault((call.partition("_")[0], path), []).append(body)
    for (client, path), sent in grouped.items():
        package = {"langchain": "langchain-openai"}.get(client, client)
        record = {
            "client": f"{package} {importlib.metadata.version(package)}",
            "how": "recorded",
            "path": path,
            "bodies": sent,
        }
        kind = "responses" if path.endswith("responses") else "chat"
        text = json.dumps(record, indent=1, ensure_ascii=False)
        (folder / f"{client}_{kind}.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("record", nargs="?", type=Path)
    arguments = parser.parse_args()
    calls = ClientCalls(arguments.url)
    failed = calls.run_all()
    if arguments.record is not None:
        write_bodies(arguments.record, calls.bodies)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

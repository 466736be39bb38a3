"""`baton generate`: submit a prompt by gRPC and stream the answer to the terminal."""

import json
import sys
from typing import Annotated, Any

import typer

from baton.cli.common.errors import EXIT_INTERRUPTED
from baton.cli.common.options import DEFAULT_ENDPOINT, ApiKeyOption, EndpointOption, JsonOption

_MAX_TOKENS = 2**31 - 1  # what the request's fields can hold
_MAX_SEED = 2**63 - 1
_MAX_TIMEOUT_SECONDS = 1e6
MaxTokensOption = Annotated[
    int | None, typer.Option(help="Most tokens to write", min=1, max=_MAX_TOKENS)
]
TopKOption = Annotated[
    int | None, typer.Option(help="Draw among so many tokens; 0 is off", min=0, max=_MAX_TOKENS)
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="Same seed, same noise: in float32 the same answer", min=-_MAX_SEED, max=_MAX_SEED
    ),
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Do not stop at the model's end token")
]
TimeoutOption = Annotated[
    float,
    typer.Option(help="Seconds that the request may take", min=0.001, max=_MAX_TIMEOUT_SECONDS),
]
TimelineOption = Annotated[
    bool, typer.Option("--timeline", help="Then show where the time went, on stderr")
]


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue")],
    max_tokens: MaxTokensOption = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1 is off")] = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    ignore_eos: IgnoreEosOption = False,
    model: Annotated[str, typer.Option(help="May be left out when one model is served")] = "",
    timeout: TimeoutOption = 600.0,
    timeline: TimelineOption = False,
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    api_key: ApiKeyOption = "",
) -> None:
    """Continue PROMPT.

    Standard output gets the answer and nothing else.
    """
    from baton.cli.client.grpc_channel import api_key_metadata, coordinator_channel
    from baton.pb import generation_pb2, generation_pb2_grpc

    request = generation_pb2.GenerateRequest(
        model=model,
        text=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    with coordinator_channel(endpoint) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(request, timeout=timeout, metadata=api_key_metadata(api_key))
        try:
            answer = _collect_answer(call) if as_json else _print_stream(call)
        except KeyboardInterrupt:
            call.cancel()
            raise SystemExit(EXIT_INTERRUPTED) from None
    if as_json:
        print(json.dumps(_answer_to_dict(answer), ensure_ascii=False))
    if timeline:
        _print_timeline(answer)


def _print_stream(call: Any) -> Any:
    """Print the text as it arrives. Returns the last message, with usage and timeline."""
    last = None
    for last in call:
        sys.stdout.write(last.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return last


def _collect_answer(call: Any) -> Any:
    """Return one message that has the text and the token ids of all messages."""
    text, ids, last = "", [], None
    for last in call:
        text += last.text
        ids.extend(last.token_ids)
    if last is not None:
        last.text = text
        last.token_ids[:] = ids
    return last


def _answer_to_dict(message: Any) -> dict[str, Any]:
    from baton.cli.views.message_dict import message_to_dict

    fields = message_to_dict(message)
    fields["finish_reason"] = fields["finish_reason"].removeprefix("FINISH_REASON_").lower()
    return fields


def _print_timeline(message: Any) -> None:
    from baton.cli.views.console import make_console
    from baton.cli.views.timeline import render_timeline

    make_console(stderr=True).print(render_timeline(message.timeline))

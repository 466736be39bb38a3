"""`baton generate`: submit by gRPC, stream the answer to the terminal."""

import json
import signal
import sys
from typing import Annotated, Any

import typer

from baton.cli.options import DEFAULT_ENDPOINT, ApiKey, Endpoint, Json

EXIT_INTERRUPTED = 128 + signal.SIGINT


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue")],
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to write", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1 is off")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many tokens; 0 is off", min=0)] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same noise: in float32 the same answer")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end token")] = False,
    model: Annotated[str, typer.Option(help="May be left out when one model is served")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds that the request may take", min=0.001)] = 600.0,
    timeline: Annotated[bool, typer.Option("--timeline", help="Then show where the time went, on stderr")] = False,
    as_json: Json = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    api_key: ApiKey = "",
) -> None:
    """Continue PROMPT.

    Standard output gets the answer and nothing else.
    """
    from baton.cli.client import bearer, connected
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
    with connected(endpoint) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(request, timeout=timeout, metadata=bearer(api_key))
        try:
            whole = _collect(call) if as_json else _stream(call)
        except KeyboardInterrupt:
            call.cancel()
            raise SystemExit(EXIT_INTERRUPTED) from None
    if as_json:
        print(json.dumps(_plain(whole), ensure_ascii=False))
    if timeline:
        _show_timeline(whole)


def _stream(call: Any) -> Any:
    """Write the text as it comes. Returns the last message, which carries usage and timeline."""
    last = None
    for last in call:
        sys.stdout.write(last.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return last


def _collect(call: Any) -> Any:
    """One message with the text and the token ids of them all."""
    text, ids, last = "", [], None
    for last in call:
        text += last.text
        ids.extend(last.token_ids)
    if last is not None:
        last.text = text
        last.token_ids[:] = ids
    return last


def _plain(message: Any) -> dict[str, Any]:
    from baton.cli.plain import to_plain

    shown = to_plain(message)
    shown["finish_reason"] = shown["finish_reason"].removeprefix("FINISH_REASON_").lower()
    return shown


def _show_timeline(message: Any) -> None:
    from baton.cli.screen import screen
    from baton.cli.timeline import render

    screen(stderr=True).print(render(message.timeline))

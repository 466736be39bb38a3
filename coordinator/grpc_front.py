"""The gRPC front door: baton.v1.Generation, with the bounds, errors and cancellation of the HTTP one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.unknown_fields import UnknownFieldSet

from baton import wire
from baton.errors import DeadlineExceeded, InvalidRequest, SlowReader
from baton.pb import generation_pb2 as pb
from baton.pb import generation_pb2_grpc
from coordinator.ask import Ask, check_client_id
from coordinator.auth import BearerKey
from coordinator.generation import Delta, Done, Event, PromptScores
from coordinator.grpc_terms import Context, authorization, metadata, told
from coordinator.intake import Intake, Running

WRITE_STALL = 30.0  # seconds that a client with a full flow-control window may leave a message untaken


class GenerationService(generation_pb2_grpc.GenerationServicer):
    def __init__(self, intake: Intake, api_key: str) -> None:
        self._intake = intake
        self._key = BearerKey(api_key, "--api-key")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with told(context), self._started(request, context) as running:
            async for event in running.generation:
                await _write(context, _response(running, event))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with told(context), self._started(request, context) as running:
            whole = pb.GenerateResponse()
            async for event in running.generation:
                part = _response(running, event)
                text = whole.text + part.text
                whole.MergeFrom(part)
                whole.text = text
        return whole

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async with told(context):
            self._key.check(authorization(context))
            name, max_model_len = self._intake.served()
            return pb.ListModelsResponse(models=[pb.Model(id=name, max_model_len=max_model_len)])

    @asynccontextmanager
    async def _started(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[Running]:
        """A submitted request that is cancelled when the call ends early, however it ends."""
        with self._intake.refusals.counted():
            self._key.check(authorization(context))
            client_id = check_client_id(metadata(context, "x-request-id"))
            ask = to_ask(request, context.time_remaining(), client_id)
        running = await self._intake.start(ask)
        try:
            echoed = (("x-request-id", client_id),) if client_id else ()
            await context.send_initial_metadata((("x-baton-request-id", running.id), *echoed))
            yield running
        finally:
            running.generation.cancel()


def to_ask(request: pb.GenerateRequest, timeout: float | None, client_id: str | None) -> Ask:
    """`timeout` is what the call's deadline leaves. Raises InvalidRequest, DeadlineExceeded."""
    unknown = UnknownFieldSet(request)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(f"field number {number} is not a field of GenerateRequest", param=str(number))
    if timeout is not None and timeout <= 0:
        raise DeadlineExceeded("the deadline passed before the request was read")
    kind = request.WhichOneof("prompt")
    return Ask(
        prompt={"text": request.text, "token_ids": request.token_ids.ids, None: None}[kind],
        model=request.model or None,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        temperature=request.temperature if request.HasField("temperature") else None,
        top_k=request.top_k if request.HasField("top_k") else None,
        top_p=request.top_p if request.HasField("top_p") else None,
        seed=request.seed if request.HasField("seed") else None,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        timeout=timeout,
        client_id=client_id,
    )


def _response(running: Running, event: Event) -> pb.GenerateResponse:
    if isinstance(event, Delta):
        return pb.GenerateResponse(request_id=running.id, text=running.text_of(event.tokens), token_ids=event.tokens)
    if isinstance(event, PromptScores):
        return pb.GenerateResponse(request_id=running.id)
    return _last(running, event)


def _last(running: Running, end: Done) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=running.id,
        text=running.detokenizer.flush(),
        finish_reason=wire.FINISH_TO_PB[end.reason],
        usage=pb.Usage(
            prompt_tokens=running.prompt_tokens,
            completion_tokens=running.completion_tokens,
            cached_tokens=end.cached_tokens,
        ),
        timeline=end.timeline,
    )


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    try:
        async with asyncio.timeout(WRITE_STALL):
            await context.write(response)
    except TimeoutError:
        raise SlowReader(f"no message was read for {WRITE_STALL:g} s") from None

"""The gRPC front door: baton.v1.Generation, with the bounds, errors and cancellation of the HTTP one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.unknown_fields import UnknownFieldSet

from baton import wire
from baton.errors import DeadlineExceeded, InvalidRequest, SlowReader
from baton.pb import generation_pb2 as pb
from baton.pb import generation_pb2_grpc
from coordinator.answer import Answer
from coordinator.ask import Ask, check_client_id
from coordinator.auth import BearerKey
from coordinator.grpc_terms import Context, authorization, metadata, told
from coordinator.intake import Intake
from coordinator.telling import Piece

WRITE_STALL = 30.0  # seconds that a client with a full flow-control window may leave a message untaken


class GenerationService(generation_pb2_grpc.GenerationServicer):
    def __init__(self, intake: Intake, api_key: str) -> None:
        self._intake = intake
        self._key = BearerKey(api_key, "--api-key")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with told(context), self._started(request, context) as running:
            async for piece in running.pieces():
                await _write(context, _response(running, piece))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with told(context), self._started(request, context) as running:
            whole = pb.GenerateResponse()
            async for piece in running.pieces():
                part = _response(running, piece)
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
    async def _started(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[Answer]:
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
            running.cancel()


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
        prompts={"text": [request.text], "token_ids": [request.token_ids.ids], None: None}[kind],
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


def _response(answer: Answer, piece: Piece) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id=answer.id, text=piece.text, token_ids=piece.tokens)
    if piece.finish is not None:
        response.finish_reason = wire.FINISH_TO_PB[piece.finish]
        response.usage.prompt_tokens = answer.prompt_tokens
        response.usage.completion_tokens = answer.completion_tokens
        response.usage.cached_tokens = answer.cached_tokens
        response.timeline.CopyFrom(answer.timeline)
    return response


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    try:
        async with asyncio.timeout(WRITE_STALL):
            await context.write(response)
    except TimeoutError:
        raise SlowReader(f"no message was read for {WRITE_STALL:g} s") from None

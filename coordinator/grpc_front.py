"""The gRPC front door: baton.v1.Generation, with the bounds, errors and cancellation of the HTTP one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.errors import SlowReader
from baton.pb import generation_pb2 as pb
from baton.pb import generation_pb2_grpc
from coordinator.answer import Answer
from coordinator.ask import check_client_id
from coordinator.auth import Clients
from coordinator.grpc_requests import check_known, to_ask, to_wording
from coordinator.grpc_responses import Responses
from coordinator.grpc_terms import Context, authorization, metadata, told
from coordinator.intake import Intake

WRITE_STALL = 30.0  # seconds that a client with a full flow-control window may leave a message untaken


class GenerationService(generation_pb2_grpc.GenerationServicer):
    def __init__(self, intake: Intake, who: Clients) -> None:
        self._intake = intake
        self._who = who

    def authenticate(self, context: Context) -> None:
        """Raises Unauthenticated."""
        with self._intake.refusals.counted():
            self._who.identify(authorization(context))

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with told(context), self._started(request, context) as answer:
            responses = Responses(answer)
            async for piece in answer.pieces():
                await _write(context, responses.one(piece))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with told(context), self._started(request, context) as answer:
            responses = Responses(answer)
            async for piece in answer.pieces():
                responses.add(piece)
        return responses.whole()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with told(context):
            with self._intake.refusals.counted():
                self._intake.check_model(request.model or None)
                wording = to_wording(request, self._intake.unknown_fields)
                limit = self._intake.time_limit(context.time_remaining())
                special = request.add_special_tokens if request.HasField("add_special_tokens") else None
                text, tokens = await self._intake.tokenize(wording, special, limit)
            pieces = await text.pieces(tokens) if request.return_token_strings else []
            return pb.TokenizeResponse(token_ids=tokens, token_strings=pieces, max_model_len=self._intake.served()[1])

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with told(context):
            with self._intake.refusals.counted():
                check_known(request, self._intake.unknown_fields)
                self._intake.check_model(request.model or None)
                limit = self._intake.time_limit(context.time_remaining())
                return pb.DetokenizeResponse(text=await self._intake.detokenize(request.token_ids, limit))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async with told(context):
            name, max_model_len = self._intake.served()
            digest, dtype, quantization = self._intake.identity()
            model = pb.Model(
                id=name, max_model_len=max_model_len, model_digest=digest, dtype=dtype, quantization=quantization
            )
            return pb.ListModelsResponse(models=[model])

    @asynccontextmanager
    async def _started(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[Answer]:
        """A submitted request that is cancelled when the call ends early, however it ends."""
        with self._intake.refusals.counted():
            tenant = self._who.identify(authorization(context))
        with self._intake.refusals.counted(tenant.tenant_class):
            client_id = check_client_id(metadata(context, "x-request-id"))
            ask = to_ask(request, context.time_remaining(), client_id, self._intake.unknown_fields)
            ask = replace(ask, standing=self._who.standing(tenant, ask.priority), cache_salt=tenant.salt)
        answer = await self._intake.start(ask)
        try:
            echoed = (("x-request-id", client_id),) if client_id else ()
            await context.send_initial_metadata((("x-baton-request-id", answer.id), *echoed))
            yield answer
        finally:
            answer.cancel()


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    try:
        async with asyncio.timeout(WRITE_STALL):
            await context.write(response)
    except TimeoutError:
        raise SlowReader(f"no message was read for {WRITE_STALL:g} s") from None

"""The gRPC front end: baton.v1.Generation, with the same bounds and errors as HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.errors import SlowReader
from baton.pb import generation_pb2 as pb
from baton.pb import generation_pb2_grpc
from coordinator.frontend.auth import ClientAuthenticator
from coordinator.frontend.grpc.errors import (
    ServicerContext,
    get_authorization,
    get_metadata,
    grpc_errors,
)
from coordinator.frontend.grpc.request_codec import (
    check_unknown_fields,
    to_generation_request,
    to_tokenizer_input,
)
from coordinator.frontend.grpc.response_codec import GrpcResponseFormatter
from coordinator.frontend.output import ResponseStream
from coordinator.frontend.request import check_client_request_id
from coordinator.frontend.request_intake import RequestIntake

# How long a client with a full flow-control window may leave a message unread.
WRITE_TIMEOUT_SECONDS = 30.0


class GenerationService(generation_pb2_grpc.GenerationServicer):
    def __init__(self, intake: RequestIntake, client_auth: ClientAuthenticator) -> None:
        self._intake = intake
        self._client_auth = client_auth

    def authenticate(self, context: ServicerContext) -> None:
        """Raises Unauthenticated."""
        with self._intake.rejections.count_rejections():
            self._client_auth.identify_tenant(get_authorization(context))

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        async with grpc_errors(context), self._started_request(request, context) as stream:
            formatter = GrpcResponseFormatter(stream)
            async for chunk in stream.output_chunks():
                await _write_response(context, formatter.format_chunk(chunk))

    async def GenerateOnce(
        self, request: pb.GenerateRequest, context: ServicerContext
    ) -> pb.GenerateResponse:
        async with grpc_errors(context), self._started_request(request, context) as stream:
            formatter = GrpcResponseFormatter(stream)
            async for chunk in stream.output_chunks():
                formatter.add_chunk(chunk)
        return formatter.format_response()

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: ServicerContext
    ) -> pb.TokenizeResponse:
        async with grpc_errors(context):
            with self._intake.rejections.count_rejections():
                self._intake.check_model(request.model or None)
                prompt = to_tokenizer_input(request, self._intake.unknown_field_policy)
                timeout = self._intake.effective_timeout(context.time_remaining())
                add_special_tokens = (
                    request.add_special_tokens if request.HasField("add_special_tokens") else None
                )
                tokenizer, tokens = await self._intake.tokenize(prompt, add_special_tokens, timeout)
            strings = (
                await tokenizer.get_token_strings(tokens) if request.return_token_strings else []
            )
            return pb.TokenizeResponse(
                token_ids=tokens,
                token_strings=strings,
                max_model_len=self._intake.get_served_model()[1],
            )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: ServicerContext
    ) -> pb.DetokenizeResponse:
        async with grpc_errors(context):
            with self._intake.rejections.count_rejections():
                check_unknown_fields(request, self._intake.unknown_field_policy)
                self._intake.check_model(request.model or None)
                timeout = self._intake.effective_timeout(context.time_remaining())
                return pb.DetokenizeResponse(
                    text=await self._intake.detokenize(request.token_ids, timeout)
                )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: ServicerContext
    ) -> pb.ListModelsResponse:
        async with grpc_errors(context):
            name, max_model_len = self._intake.get_served_model()
            digest, dtype, quantization = self._intake.get_model_identity()
            model = pb.Model(
                id=name,
                max_model_len=max_model_len,
                model_digest=digest,
                dtype=dtype,
                quantization=quantization,
            )
            return pb.ListModelsResponse(models=[model])

    @asynccontextmanager
    async def _started_request(
        self, request: pb.GenerateRequest, context: ServicerContext
    ) -> AsyncIterator[ResponseStream]:
        """Submit the request, and cancel it when the call ends."""
        with self._intake.rejections.count_rejections():
            tenant = self._client_auth.identify_tenant(get_authorization(context))
        with self._intake.rejections.count_rejections(tenant.tenant_class):
            client_id = check_client_request_id(get_metadata(context, "x-request-id"))
            generation_request = to_generation_request(
                request, context.time_remaining(), client_id, self._intake.unknown_field_policy
            )
            generation_request = replace(
                generation_request,
                principal=self._client_auth.make_principal(tenant, generation_request.priority),
                cache_salt=tenant.cache_salt,
            )
        stream = await self._intake.start_request(generation_request)
        try:
            echoed = (("x-request-id", client_id),) if client_id else ()
            await context.send_initial_metadata((("x-baton-request-id", stream.id), *echoed))
            yield stream
        finally:
            stream.cancel()


async def _write_response(context: ServicerContext, response: pb.GenerateResponse) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
            await context.write(response)
    except TimeoutError:
        raise SlowReader(f"no message was read for {WRITE_TIMEOUT_SECONDS:g} s") from None

"""baton.v1.Cluster over gRPC: converts its calls to `ClusterOperations` and back."""

from contextlib import aclosing

from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from baton.role_split import RoleSplit
from baton.slo import Slo, parse_slo
from coordinator.frontend.auth import AdminAuthenticator
from coordinator.frontend.grpc.errors import ServicerContext, check_admin_call, grpc_errors
from coordinator.operators.cluster_operations import ClusterOperations


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """The gRPC service for operators: converts calls to `ClusterOperations`."""

    def __init__(self, operations: ClusterOperations, admin_token: str) -> None:
        self._operations = operations
        self._admin_auth = AdminAuthenticator(admin_token)

    def authenticate(self, context: ServicerContext) -> None:
        """Raises Unauthenticated."""
        check_admin_call(context, self._admin_auth)

    async def Status(self, _: pb.StatusRequest, context: ServicerContext) -> pb.StatusResponse:
        async with grpc_errors(context):
            return self._operations.get_status()

    async def Watch(self, request: pb.WatchRequest, context: ServicerContext) -> None:
        async with grpc_errors(context):
            async with aclosing(self._operations.watch_status(request.interval_seconds)) as answers:
                async for answer in answers:
                    await context.write(answer)

    async def Explain(
        self, request: pb.ExplainRequest, context: ServicerContext
    ) -> pb.ExplainResponse:
        async with grpc_errors(context):
            return self._operations.explain_request(request.request_id)

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        async with grpc_errors(context):
            timeout = request.timeout_seconds if request.HasField("timeout_seconds") else None
            return self._operations.drain_node(request.node, timeout)

    async def Undrain(
        self, request: pb.UndrainRequest, context: ServicerContext
    ) -> pb.DrainResponse:
        async with grpc_errors(context):
            return self._operations.undrain_node(request.node)

    async def GetRatio(self, _: pb.GetRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            return self._operations.ratio.get_ratio()

    async def SetRatio(self, request: pb.SetRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            flip_timeout = (
                request.flip_timeout_seconds if request.HasField("flip_timeout_seconds") else None
            )
            return self._operations.ratio.set_ratio(
                RoleSplit(request.prefill, request.decode), flip_timeout
            )

    async def AdviseRatio(
        self, request: pb.AdviseRatioRequest, context: ServicerContext
    ) -> pb.RatioAdvice:
        async with grpc_errors(context):
            return self._operations.ratio.advise_ratio(_parse_slo_or_none(request.slo))

    async def AutoRatio(self, request: pb.AutoRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            flip_timeout = (
                request.flip_timeout_seconds if request.HasField("flip_timeout_seconds") else None
            )
            return self._operations.ratio.set_auto_ratio(
                _parse_slo_or_none(request.slo), flip_timeout
            )

    async def ManualRatio(self, _: pb.ManualRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            return self._operations.ratio.set_manual_ratio()

    async def Ledger(self, _: pb.LedgerRequest, context: ServicerContext) -> pb.LedgerResponse:
        async with grpc_errors(context):
            return await self._operations.collect_ledgers()

    async def ArmFailpoints(
        self, request: pb.ArmFailpointsRequest, context: ServicerContext
    ) -> pb.ArmFailpointsResponse:
        async with grpc_errors(context):
            return pb.ArmFailpointsResponse(
                nodes=self._operations.arm_failpoints(request.node, request.spec)
            )


def _parse_slo_or_none(text: str) -> Slo | None:
    """Raises InvalidRequest."""
    return parse_slo(text) if text else None

"""The gRPC service PoolPeers, with which other hosts' pools request blocks of this one."""

from baton.cluster_link import pb_conversion as wire
from baton.errors import BatonError, StaleMessage
from baton.pb import pool_pb2 as pb
from baton.pb import pool_pb2_grpc
from baton.process import log
from kv_pool.peers.promotion_sender import PromotionSender


class PoolPeerService(pool_pb2_grpc.PoolPeersServicer):
    """Sends blocks to pools that ask for them; refuses until the pool is open and `sender` set."""

    def __init__(self) -> None:
        self.sender: PromotionSender | None = None

    async def Send(self, request: pb.SendBlocks, _: object) -> pb.BlocksSent:
        """Send blocks; returns when the other pool has committed them, or the send has failed."""
        try:
            if self.sender is None:
                raise StaleMessage("this pool has no segment yet")
            await self.sender.send_blocks(request)
        except BatonError as error:
            log.get_logger("pool").info(
                "blocks not sent to another pool", code=error.code, reason=error.message
            )
            return pb.BlocksSent(error=wire.error_to_pb(error))
        return pb.BlocksSent()

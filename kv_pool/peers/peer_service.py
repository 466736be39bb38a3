"""PoolPeers: what other hosts' pools may ask of this one."""

from baton.cluster_link import pb_conversion as wire
from baton.errors import BatonError, StaleMessage
from baton.pb import pool_pb2 as pb
from baton.pb import pool_pb2_grpc
from baton.process import log
from kv_pool.peers.promotion_sender import PromotionSender


class PoolPeerService(pool_pb2_grpc.PoolPeersServicer):
    """`sender` is there once the pool is open."""

    def __init__(self) -> None:
        self.sender: PromotionSender | None = None

    async def Send(self, asked: pb.SendBlocks, _: object) -> pb.BlocksSent:
        """Returns when the blocks are the other pool's, or will not be."""
        try:
            if self.sender is None:
                raise StaleMessage("this pool has no segment yet")
            await self.sender.send_blocks(asked)
        except BatonError as error:
            log.get_logger("pool").info("blocks not sent", code=error.code, reason=error.message)
            return pb.BlocksSent(error=wire.error_to_pb(error))
        return pb.BlocksSent()

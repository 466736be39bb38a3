"""Converts the brain's messages from and to protobuf."""

from baton.cluster_link import pb_conversion
from baton.errors import ConfigError
from baton.models.file_digests import ModelFileDigests
from baton.pb import cluster_pb2 as pb
from baton.types import Incarnation, NodeName, Role
from coordinator.core.membership.join_checks import JoinInfo
from coordinator.core.membership.prefix_directory import POOL_ROLE, PoolJoinInfo


def join_from_pb(join: pb.Join) -> JoinInfo:
    """Raises ConfigError for an unknown role."""
    try:
        role = Role(join.role)
    except ValueError:
        known = ", ".join((*(role.value for role in Role), POOL_ROLE))
        raise ConfigError(
            f"node {join.name!r} has role {join.role!r}: roles are {known}", param="role"
        ) from None
    return JoinInfo(
        protocol_version=join.protocol_version,
        name=NodeName(join.name),
        role=role,
        host_id=join.host_id,
        transfer_endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=pb_conversion.layout_from_pb(join.layout),
        num_blocks=join.num_blocks,
        max_num_seqs=join.max_num_seqs,
        max_batched_tokens=join.max_batched_tokens,
        max_model_len=join.max_model_len,
        vocab_size=join.vocab_size,
        eos_token_ids=tuple(join.eos_token_ids),
        engine=join.engine,
        rejoining=join.rejoining,
        process=join.process,
        implementation=join.implementation,
        dtype=join.dtype,
        quantization=join.quantization,
        files=ModelFileDigests(join.config_digest, join.tokenizer_digest, join.weights_digest),
    )


def pool_from_pb(join: pb.Join) -> PoolJoinInfo:
    return PoolJoinInfo(
        protocol_version=join.protocol_version,
        name=NodeName(join.name),
        host_id=join.host_id,
        endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=pb_conversion.layout_from_pb(join.layout),
        num_blocks=join.num_blocks,
        process=join.process,
    )


def build_welcome(
    incarnation: Incarnation, heartbeat: float, silence: float
) -> pb.CoordinatorMessage:
    fields = pb.Welcome(
        incarnation=incarnation, heartbeat_seconds=heartbeat, silence_seconds=silence
    )
    return pb.CoordinatorMessage(welcome=fields)

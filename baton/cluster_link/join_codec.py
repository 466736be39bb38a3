"""What joins, to protobuf and back."""

from typing import assert_never

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.messages import POOL_ROLE, JoinInfo, PoolJoinInfo
from baton.errors import ConfigError
from baton.models.file_digests import ModelFileDigests
from baton.pb import cluster_pb2 as pb
from baton.types import NodeName, Role


def encode_join(join: JoinInfo | PoolJoinInfo) -> pb.NodeMessage:
    match join:
        case JoinInfo():
            return pb.NodeMessage(join=_encode_node_join(join))
        case PoolJoinInfo():
            return pb.NodeMessage(join=_encode_pool_join(join))
        case _:
            assert_never(join)


def _encode_node_join(join: JoinInfo) -> pb.Join:
    return pb.Join(
        protocol_version=join.protocol_version,
        name=join.name,
        role=join.role.value,
        host_id=join.host_id,
        transfer_endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=wire.layout_to_pb(join.layout),
        num_blocks=join.num_blocks,
        max_num_seqs=join.max_num_seqs,
        max_batched_tokens=join.max_batched_tokens,
        max_model_len=join.max_model_len,
        vocab_size=join.vocab_size,
        eos_token_ids=join.eos_token_ids,
        engine=join.engine,
        rejoining=join.rejoining,
        process=join.process,
        implementation=join.implementation,
        dtype=join.dtype,
        quantization=join.quantization,
        config_digest=join.files.config_digest,
        tokenizer_digest=join.files.tokenizer_digest,
        weights_digest=join.files.weights_digest,
    )


def _encode_pool_join(join: PoolJoinInfo) -> pb.Join:
    return pb.Join(
        protocol_version=join.protocol_version,
        name=join.name,
        role=POOL_ROLE,
        host_id=join.host_id,
        transfer_endpoint=join.endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=wire.layout_to_pb(join.layout),
        num_blocks=join.num_blocks,
        rejoining=join.rejoining,
        process=join.process,
    )


def decode_join(join: pb.Join) -> JoinInfo | PoolJoinInfo:
    """Raises ConfigError for an unknown role."""
    if join.role == POOL_ROLE:
        return _decode_pool_join(join)
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
        layout=wire.layout_from_pb(join.layout),
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


def _decode_pool_join(join: pb.Join) -> PoolJoinInfo:
    return PoolJoinInfo(
        protocol_version=join.protocol_version,
        name=NodeName(join.name),
        host_id=join.host_id,
        endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=wire.layout_from_pb(join.layout),
        num_blocks=join.num_blocks,
        process=join.process,
        rejoining=join.rejoining,
    )

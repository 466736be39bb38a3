from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "param")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("queue", "reserve", "prefill", "transfer", "first_token", "ttft", "total", "attempts", "prefill_node", "decode_node", "handoff", "models", "grammar")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    queue: float
    reserve: float
    prefill: float
    transfer: float
    first_token: float
    ttft: float
    total: float
    attempts: int
    prefill_node: str
    decode_node: str
    handoff: HandoffReport
    models: _containers.RepeatedScalarFieldContainer[str]
    grammar: float
    def __init__(self, queue: _Optional[float] = ..., reserve: _Optional[float] = ..., prefill: _Optional[float] = ..., transfer: _Optional[float] = ..., first_token: _Optional[float] = ..., ttft: _Optional[float] = ..., total: _Optional[float] = ..., attempts: _Optional[int] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., handoff: _Optional[_Union[HandoffReport, _Mapping]] = ..., models: _Optional[_Iterable[str]] = ..., grammar: _Optional[float] = ...) -> None: ...

class HandoffReport(_message.Message):
    __slots__ = ("transport", "bytes", "slabs", "slabs_landed_before_last_layer", "compute_seconds", "exposed_seconds", "commit_seconds", "computed_tokens", "cached_tokens", "slowed_seconds", "group_layers")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    SLABS_LANDED_BEFORE_LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOWED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_LAYERS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    bytes: int
    slabs: int
    slabs_landed_before_last_layer: int
    compute_seconds: float
    exposed_seconds: float
    commit_seconds: float
    computed_tokens: int
    cached_tokens: int
    slowed_seconds: float
    group_layers: int
    def __init__(self, transport: _Optional[str] = ..., bytes: _Optional[int] = ..., slabs: _Optional[int] = ..., slabs_landed_before_last_layer: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., exposed_seconds: _Optional[float] = ..., commit_seconds: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., slowed_seconds: _Optional[float] = ..., group_layers: _Optional[int] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("node", "incarnation", "total", "free", "cached", "reserved", "writing", "in_use", "quarantined", "owners")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    WRITING_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    total: int
    free: int
    cached: int
    reserved: int
    writing: int
    in_use: int
    quarantined: int
    owners: _containers.RepeatedCompositeFieldContainer[LedgerOwner]
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., reserved: _Optional[int] = ..., writing: _Optional[int] = ..., in_use: _Optional[int] = ..., quarantined: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[LedgerOwner, _Mapping]]] = ...) -> None: ...

class LedgerOwner(_message.Message):
    __slots__ = ("owner", "state", "blocks", "age_seconds")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    state: str
    blocks: int
    age_seconds: float
    def __init__(self, owner: _Optional[str] = ..., state: _Optional[str] = ..., blocks: _Optional[int] = ..., age_seconds: _Optional[float] = ...) -> None: ...

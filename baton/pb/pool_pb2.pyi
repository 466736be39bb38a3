from baton.pb import cluster_pb2 as _cluster_pb2
from baton.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SendBlocks(_message.Message):
    __slots__ = ("protocol_version", "model_digest", "layout", "chain", "ticket")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_digest: str
    layout: _cluster_pb2.Layout
    chain: Chain
    ticket: _cluster_pb2.Ticket
    def __init__(self, protocol_version: _Optional[int] = ..., model_digest: _Optional[str] = ..., layout: _Optional[_Union[_cluster_pb2.Layout, _Mapping]] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., ticket: _Optional[_Union[_cluster_pb2.Ticket, _Mapping]] = ...) -> None: ...

class BlocksSent(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("root", "names", "tokens")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    names: bytes
    tokens: bytes
    def __init__(self, root: _Optional[bytes] = ..., names: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class AttachPool(_message.Message):
    __slots__ = ("protocol_version", "node", "incarnation", "host_id", "model_digest", "layout")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    incarnation: str
    host_id: str
    model_digest: str
    layout: _cluster_pb2.Layout
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., host_id: _Optional[str] = ..., model_digest: _Optional[str] = ..., layout: _Optional[_Union[_cluster_pb2.Layout, _Mapping]] = ...) -> None: ...

class FindPrefix(_message.Message):
    __slots__ = ("chain", "max_tokens", "partial", "token_seconds", "elsewhere")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    max_tokens: int
    partial: bool
    token_seconds: float
    elsewhere: _cluster_pb2.Elsewhere
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., max_tokens: _Optional[int] = ..., partial: _Optional[bool] = ..., token_seconds: _Optional[float] = ..., elsewhere: _Optional[_Union[_cluster_pb2.Elsewhere, _Mapping]] = ...) -> None: ...

class ReleasePins(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pins: _Optional[_Iterable[int]] = ...) -> None: ...

class ReservePlaces(_message.Message):
    __slots__ = ("chain", "first")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    first: int
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., first: _Optional[int] = ...) -> None: ...

class SealPlaces(_message.Message):
    __slots__ = ("publication", "checksums")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    publication: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, publication: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("publication",)
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    publication: int
    def __init__(self, publication: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolQuestion(_message.Message):
    __slots__ = ("id", "attach", "find", "release", "reserve", "seal", "withdraw", "goodbye")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    id: int
    attach: AttachPool
    find: FindPrefix
    release: ReleasePins
    reserve: ReservePlaces
    seal: SealPlaces
    withdraw: Withdraw
    goodbye: Goodbye
    def __init__(self, id: _Optional[int] = ..., attach: _Optional[_Union[AttachPool, _Mapping]] = ..., find: _Optional[_Union[FindPrefix, _Mapping]] = ..., release: _Optional[_Union[ReleasePins, _Mapping]] = ..., reserve: _Optional[_Union[ReservePlaces, _Mapping]] = ..., seal: _Optional[_Union[SealPlaces, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("segment", "blocks", "fence", "incarnation")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    segment: str
    blocks: int
    fence: int
    incarnation: str
    def __init__(self, segment: _Optional[str] = ..., blocks: _Optional[int] = ..., fence: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("pin", "blocks", "partial_block", "partial_tokens", "loading", "remote", "patience")
    PIN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    pin: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    partial_block: int
    partial_tokens: int
    loading: int
    remote: int
    patience: float
    def __init__(self, pin: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., partial_block: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., loading: _Optional[int] = ..., remote: _Optional[int] = ..., patience: _Optional[float] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("publication", "first", "blocks")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    publication: int
    first: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, publication: _Optional[int] = ..., first: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PoolAnswer(_message.Message):
    __slots__ = ("id", "attached", "found", "granted", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    attached: Attached
    found: Found
    granted: Granted
    error: _common_pb2.Error
    def __init__(self, id: _Optional[int] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., found: _Optional[_Union[Found, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

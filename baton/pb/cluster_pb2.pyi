from baton.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("ready", "reason", "mode", "model", "queued", "running", "nodes", "counters", "clock_seconds", "latency", "version", "ratio", "notices", "degradation", "pressure")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    DEGRADATION_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    reason: str
    mode: str
    model: str
    queued: int
    running: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    counters: _containers.ScalarMap[str, float]
    clock_seconds: float
    latency: Latency
    version: str
    ratio: Ratio
    notices: _containers.RepeatedScalarFieldContainer[str]
    degradation: _containers.RepeatedCompositeFieldContainer[DegradationStep]
    pressure: float
    def __init__(self, ready: _Optional[bool] = ..., reason: _Optional[str] = ..., mode: _Optional[str] = ..., model: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, float]] = ..., clock_seconds: _Optional[float] = ..., latency: _Optional[_Union[Latency, _Mapping]] = ..., version: _Optional[str] = ..., ratio: _Optional[_Union[Ratio, _Mapping]] = ..., notices: _Optional[_Iterable[str]] = ..., degradation: _Optional[_Iterable[_Union[DegradationStep, _Mapping]]] = ..., pressure: _Optional[float] = ...) -> None: ...

class DegradationStep(_message.Message):
    __slots__ = ("step", "active", "seconds", "cannot_help")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANNOT_HELP_FIELD_NUMBER: _ClassVar[int]
    step: str
    active: bool
    seconds: float
    cannot_help: str
    def __init__(self, step: _Optional[str] = ..., active: _Optional[bool] = ..., seconds: _Optional[float] = ..., cannot_help: _Optional[str] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("window_seconds", "requests", "ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")
    WINDOW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_FIELD_NUMBER: _ClassVar[int]
    TTFT_P90_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_FIELD_NUMBER: _ClassVar[int]
    TPOT_P90_FIELD_NUMBER: _ClassVar[int]
    window_seconds: float
    requests: int
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    def __init__(self, window_seconds: _Optional[float] = ..., requests: _Optional[int] = ..., ttft_p50: _Optional[float] = ..., ttft_p90: _Optional[float] = ..., tpot_p50: _Optional[float] = ..., tpot_p90: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("name", "incarnation", "role", "host_id", "address", "pid", "joined_seconds_ago", "heard_seconds_ago", "placed", "stats", "service", "drain_seconds_left")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    JOINED_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    HEARD_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    role: str
    host_id: str
    address: str
    pid: int
    joined_seconds_ago: float
    heard_seconds_ago: float
    placed: int
    stats: NodeStats
    service: str
    drain_seconds_left: float
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., host_id: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., joined_seconds_ago: _Optional[float] = ..., heard_seconds_ago: _Optional[float] = ..., placed: _Optional[int] = ..., stats: _Optional[_Union[NodeStats, _Mapping]] = ..., service: _Optional[str] = ..., drain_seconds_left: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "timeout_seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    timeout_seconds: float
    def __init__(self, node: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("node", "service", "placed", "warning")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    node: str
    service: str
    placed: int
    warning: str
    def __init__(self, node: _Optional[str] = ..., service: _Optional[str] = ..., placed: _Optional[int] = ..., warning: _Optional[str] = ...) -> None: ...

class GetRatioRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRatioRequest(_message.Message):
    __slots__ = ("prefill", "decode", "flip_timeout_seconds")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FLIP_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    flip_timeout_seconds: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., flip_timeout_seconds: _Optional[float] = ...) -> None: ...

class AdviseRatioRequest(_message.Message):
    __slots__ = ("slo",)
    SLO_FIELD_NUMBER: _ClassVar[int]
    slo: str
    def __init__(self, slo: _Optional[str] = ...) -> None: ...

class AutoRatioRequest(_message.Message):
    __slots__ = ("slo", "flip_timeout_seconds")
    SLO_FIELD_NUMBER: _ClassVar[int]
    FLIP_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    slo: str
    flip_timeout_seconds: float
    def __init__(self, slo: _Optional[str] = ..., flip_timeout_seconds: _Optional[float] = ...) -> None: ...

class ManualRatioRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RatioAdvice(_message.Message):
    __slots__ = ("slo", "prefill", "decode", "present_prefill", "present_decode", "reason", "forecasts", "seconds", "requests_per_second", "burstiness", "prompt_tokens_mean", "prompt_tokens_deviation", "output_tokens_mean", "output_tokens_deviation", "computed_share", "prefill_tokens_per_second", "decode_tokens_per_second", "queue_seconds", "prefill_seconds", "transfer_seconds", "queued", "waiting_prefill", "waiting_decode", "ended", "good")
    SLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PRESENT_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PRESENT_DECODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORECASTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BURSTINESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_DEVIATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_DEVIATION_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_SHARE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WAITING_DECODE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    slo: str
    prefill: int
    decode: int
    present_prefill: int
    present_decode: int
    reason: str
    forecasts: _containers.RepeatedCompositeFieldContainer[SplitForecast]
    seconds: float
    requests_per_second: float
    burstiness: float
    prompt_tokens_mean: float
    prompt_tokens_deviation: float
    output_tokens_mean: float
    output_tokens_deviation: float
    computed_share: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    queued: int
    waiting_prefill: int
    waiting_decode: int
    ended: int
    good: int
    def __init__(self, slo: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., present_prefill: _Optional[int] = ..., present_decode: _Optional[int] = ..., reason: _Optional[str] = ..., forecasts: _Optional[_Iterable[_Union[SplitForecast, _Mapping]]] = ..., seconds: _Optional[float] = ..., requests_per_second: _Optional[float] = ..., burstiness: _Optional[float] = ..., prompt_tokens_mean: _Optional[float] = ..., prompt_tokens_deviation: _Optional[float] = ..., output_tokens_mean: _Optional[float] = ..., output_tokens_deviation: _Optional[float] = ..., computed_share: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_tokens_per_second: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ..., queued: _Optional[int] = ..., waiting_prefill: _Optional[int] = ..., waiting_decode: _Optional[int] = ..., ended: _Optional[int] = ..., good: _Optional[int] = ...) -> None: ...

class SplitForecast(_message.Message):
    __slots__ = ("prefill", "decode", "ttft_p50", "ttft_p90", "ttft_p99", "tpot", "share", "goodput", "prefill_load", "decode_load")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_FIELD_NUMBER: _ClassVar[int]
    TTFT_P90_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot: float
    share: float
    goodput: float
    prefill_load: float
    decode_load: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., ttft_p50: _Optional[float] = ..., ttft_p90: _Optional[float] = ..., ttft_p99: _Optional[float] = ..., tpot: _Optional[float] = ..., share: _Optional[float] = ..., goodput: _Optional[float] = ..., prefill_load: _Optional[float] = ..., decode_load: _Optional[float] = ...) -> None: ...

class Ratio(_message.Message):
    __slots__ = ("prefill", "decode", "has_target", "target_prefill", "target_decode", "generation", "settled", "possible", "switches", "over", "automatic", "slo", "reason", "ended", "good")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    HAS_TARGET_FIELD_NUMBER: _ClassVar[int]
    TARGET_PREFILL_FIELD_NUMBER: _ClassVar[int]
    TARGET_DECODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    POSSIBLE_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    has_target: bool
    target_prefill: int
    target_decode: int
    generation: int
    settled: bool
    possible: str
    switches: _containers.RepeatedCompositeFieldContainer[RoleSwitch]
    over: _containers.RepeatedCompositeFieldContainer[RoleSwitch]
    automatic: bool
    slo: str
    reason: str
    ended: int
    good: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., has_target: _Optional[bool] = ..., target_prefill: _Optional[int] = ..., target_decode: _Optional[int] = ..., generation: _Optional[int] = ..., settled: _Optional[bool] = ..., possible: _Optional[str] = ..., switches: _Optional[_Iterable[_Union[RoleSwitch, _Mapping]]] = ..., over: _Optional[_Iterable[_Union[RoleSwitch, _Mapping]]] = ..., automatic: _Optional[bool] = ..., slo: _Optional[str] = ..., reason: _Optional[str] = ..., ended: _Optional[int] = ..., good: _Optional[int] = ...) -> None: ...

class RoleSwitch(_message.Message):
    __slots__ = ("node", "from_role", "to_role", "phase", "drain_seconds", "switch_seconds", "probe_seconds", "detail", "generation", "placed")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FROM_ROLE_FIELD_NUMBER: _ClassVar[int]
    TO_ROLE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    node: str
    from_role: str
    to_role: str
    phase: str
    drain_seconds: float
    switch_seconds: float
    probe_seconds: float
    detail: str
    generation: int
    placed: int
    def __init__(self, node: _Optional[str] = ..., from_role: _Optional[str] = ..., to_role: _Optional[str] = ..., phase: _Optional[str] = ..., drain_seconds: _Optional[float] = ..., switch_seconds: _Optional[float] = ..., probe_seconds: _Optional[float] = ..., detail: _Optional[str] = ..., generation: _Optional[int] = ..., placed: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "state", "finish_reason", "error", "prompt_tokens", "output_tokens", "max_tokens", "timeline", "decode", "sources", "attempts", "attempts_left_out", "warm_up", "others")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    finish_reason: _common_pb2.FinishReason
    error: _common_pb2.Error
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    timeline: _common_pb2.Timeline
    decode: float
    sources: PromptSources
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptReport]
    attempts_left_out: int
    warm_up: bool
    others: _containers.RepeatedCompositeFieldContainer[ExplainResponse]
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ..., decode: _Optional[float] = ..., sources: _Optional[_Union[PromptSources, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[AttemptReport, _Mapping]]] = ..., attempts_left_out: _Optional[int] = ..., warm_up: _Optional[bool] = ..., others: _Optional[_Iterable[_Union[ExplainResponse, _Mapping]]] = ...) -> None: ...

class PromptSources(_message.Message):
    __slots__ = ("computed_prefill", "computed_decode", "local_cache", "pool", "received", "remote_pool")
    COMPUTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_DECODE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CACHE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    REMOTE_POOL_FIELD_NUMBER: _ClassVar[int]
    computed_prefill: int
    computed_decode: int
    local_cache: int
    pool: int
    received: int
    remote_pool: int
    def __init__(self, computed_prefill: _Optional[int] = ..., computed_decode: _Optional[int] = ..., local_cache: _Optional[int] = ..., pool: _Optional[int] = ..., received: _Optional[int] = ..., remote_pool: _Optional[int] = ...) -> None: ...

class AttemptReport(_message.Message):
    __slots__ = ("number", "prefill_node", "decode_node", "placed", "reserved", "prefill_ended", "committed", "over", "context_tokens", "ended", "reason", "needed", "free", "computed_prefill", "computed_decode", "local_cache", "received", "handoff", "considered", "predicted", "held_back", "probe", "way", "why", "other_way", "pool", "remote_pool", "draft_tokens", "accepted_draft_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENDED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_DECODE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CACHE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    OTHER_WAY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REMOTE_POOL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    prefill_node: str
    decode_node: str
    placed: float
    reserved: float
    prefill_ended: float
    committed: float
    over: float
    context_tokens: int
    ended: str
    reason: str
    needed: int
    free: int
    computed_prefill: int
    computed_decode: int
    local_cache: int
    received: int
    handoff: _common_pb2.HandoffReport
    considered: _containers.RepeatedCompositeFieldContainer[Candidate]
    predicted: Prediction
    held_back: float
    probe: bool
    way: str
    why: str
    other_way: Prediction
    pool: int
    remote_pool: int
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, number: _Optional[int] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., placed: _Optional[float] = ..., reserved: _Optional[float] = ..., prefill_ended: _Optional[float] = ..., committed: _Optional[float] = ..., over: _Optional[float] = ..., context_tokens: _Optional[int] = ..., ended: _Optional[str] = ..., reason: _Optional[str] = ..., needed: _Optional[int] = ..., free: _Optional[int] = ..., computed_prefill: _Optional[int] = ..., computed_decode: _Optional[int] = ..., local_cache: _Optional[int] = ..., received: _Optional[int] = ..., handoff: _Optional[_Union[_common_pb2.HandoffReport, _Mapping]] = ..., considered: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., predicted: _Optional[_Union[Prediction, _Mapping]] = ..., held_back: _Optional[float] = ..., probe: _Optional[bool] = ..., way: _Optional[str] = ..., why: _Optional[str] = ..., other_way: _Optional[_Union[Prediction, _Mapping]] = ..., pool: _Optional[int] = ..., remote_pool: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("node", "role", "attempts", "uncomputed_tokens", "room", "able", "chosen", "held_tokens", "predicted_seconds", "because")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    UNCOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ABLE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    attempts: int
    uncomputed_tokens: int
    room: int
    able: bool
    chosen: bool
    held_tokens: int
    predicted_seconds: float
    because: str
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ..., attempts: _Optional[int] = ..., uncomputed_tokens: _Optional[int] = ..., room: _Optional[int] = ..., able: _Optional[bool] = ..., chosen: _Optional[bool] = ..., held_tokens: _Optional[int] = ..., predicted_seconds: _Optional[float] = ..., because: _Optional[str] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("queue", "prefill", "transfer", "step", "output_tokens")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue: float
    prefill: float
    transfer: float
    step: float
    output_tokens: float
    def __init__(self, queue: _Optional[float] = ..., prefill: _Optional[float] = ..., transfer: _Optional[float] = ..., step: _Optional[float] = ..., output_tokens: _Optional[float] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("ledgers", "silent")
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    ledgers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Ledger]
    silent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ledgers: _Optional[_Iterable[_Union[_common_pb2.Ledger, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ...) -> None: ...

class ArmFailpointsRequest(_message.Message):
    __slots__ = ("node", "spec")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    node: str
    spec: str
    def __init__(self, node: _Optional[str] = ..., spec: _Optional[str] = ...) -> None: ...

class ArmFailpointsResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: int
    def __init__(self, nodes: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol_version", "name", "role", "host_id", "transfer_endpoint", "pid", "model_digest", "layout", "num_blocks", "max_num_seqs", "max_batched_tokens", "max_model_len", "vocab_size", "eos_token_ids", "engine", "rejoining", "process", "implementation", "dtype", "quantization", "config_digest", "tokenizer_digest", "weights_digest")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REJOINING_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    role: str
    host_id: str
    transfer_endpoint: str
    pid: int
    model_digest: str
    layout: Layout
    num_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    engine: str
    rejoining: str
    process: str
    implementation: str
    dtype: str
    quantization: str
    config_digest: str
    tokenizer_digest: str
    weights_digest: str
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., host_id: _Optional[str] = ..., transfer_endpoint: _Optional[str] = ..., pid: _Optional[int] = ..., model_digest: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., engine: _Optional[str] = ..., rejoining: _Optional[str] = ..., process: _Optional[str] = ..., implementation: _Optional[str] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., config_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., weights_digest: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation", "heartbeat_seconds", "silence_seconds")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    heartbeat_seconds: float
    silence_seconds: float
    def __init__(self, incarnation: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., silence_seconds: _Optional[float] = ...) -> None: ...

class AttemptKey(_message.Message):
    __slots__ = ("request_id", "attempt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "prompt_logprobs", "structured_output")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: int
    prompt_logprobs: int
    structured_output: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., structured_output: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token", "bias")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token: int
    bias: float
    def __init__(self, token: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("key", "prompt", "emitted", "sampling", "timeout_seconds", "cache_salt", "tenant_class", "level", "prefill_payer", "model")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_CLASS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAYER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    prompt: _common_pb2.TokenIds
    emitted: _common_pb2.TokenIds
    sampling: Sampling
    timeout_seconds: float
    cache_salt: bytes
    tenant_class: str
    level: int
    prefill_payer: str
    model: bytes
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., prompt: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., emitted: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., cache_salt: _Optional[bytes] = ..., tenant_class: _Optional[str] = ..., level: _Optional[int] = ..., prefill_payer: _Optional[str] = ..., model: _Optional[bytes] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("name", "incarnation", "host_id", "transfer_endpoint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    host_id: str
    transfer_endpoint: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., host_id: _Optional[str] = ..., transfer_endpoint: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "key", "decode", "writer", "first_block", "offsets", "num_tokens", "ttl_seconds", "transport", "segment", "fence")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    key: AttemptKey
    decode: Peer
    writer: str
    first_block: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    ttl_seconds: float
    transport: str
    segment: str
    fence: int
    def __init__(self, id: _Optional[str] = ..., key: _Optional[_Union[AttemptKey, _Mapping]] = ..., decode: _Optional[_Union[Peer, _Mapping]] = ..., writer: _Optional[str] = ..., first_block: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., ttl_seconds: _Optional[float] = ..., transport: _Optional[str] = ..., segment: _Optional[str] = ..., fence: _Optional[int] = ...) -> None: ...

class Elsewhere(_message.Message):
    __slots__ = ("pool", "tokens", "token_seconds")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    pool: Peer
    tokens: int
    token_seconds: float
    def __init__(self, pool: _Optional[_Union[Peer, _Mapping]] = ..., tokens: _Optional[int] = ..., token_seconds: _Optional[float] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("work", "writer", "prefill_share", "elsewhere")
    WORK_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SHARE_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    work: Work
    writer: Peer
    prefill_share: float
    elsewhere: Elsewhere
    def __init__(self, work: _Optional[_Union[Work, _Mapping]] = ..., writer: _Optional[_Union[Peer, _Mapping]] = ..., prefill_share: _Optional[float] = ..., elsewhere: _Optional[_Union[Elsewhere, _Mapping]] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("work", "alone", "elsewhere")
    WORK_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    work: Work
    alone: bool
    elsewhere: Elsewhere
    def __init__(self, work: _Optional[_Union[Work, _Mapping]] = ..., alone: _Optional[bool] = ..., elsewhere: _Optional[_Union[Elsewhere, _Mapping]] = ...) -> None: ...

class GiveTicket(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    reason: _common_pb2.Error
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., reason: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class PeerGone(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class LedgerQuery(_message.Message):
    __slots__ = ("query",)
    QUERY_FIELD_NUMBER: _ClassVar[int]
    query: int
    def __init__(self, query: _Optional[int] = ...) -> None: ...

class CacheQuery(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Arm(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: str
    def __init__(self, spec: _Optional[str] = ...) -> None: ...

class SetRole(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("error", "retry_seconds")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RETRY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    retry_seconds: float
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., retry_seconds: _Optional[float] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "refusal", "submit", "prefill", "ticket", "cancel", "peer_gone", "ledger_query", "arm", "ping", "cache_query", "set_role", "number", "checksum")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PEER_GONE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_QUERY_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    CACHE_QUERY_FIELD_NUMBER: _ClassVar[int]
    SET_ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    submit: Submit
    prefill: Prefill
    ticket: GiveTicket
    cancel: Cancel
    peer_gone: PeerGone
    ledger_query: LedgerQuery
    arm: Arm
    ping: Ping
    cache_query: CacheQuery
    set_role: SetRole
    number: int
    checksum: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., ticket: _Optional[_Union[GiveTicket, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., peer_gone: _Optional[_Union[PeerGone, _Mapping]] = ..., ledger_query: _Optional[_Union[LedgerQuery, _Mapping]] = ..., arm: _Optional[_Union[Arm, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., cache_query: _Optional[_Union[CacheQuery, _Mapping]] = ..., set_role: _Optional[_Union[SetRole, _Mapping]] = ..., number: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("key", "ticket", "held_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    ticket: Ticket
    held_tokens: int
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("key", "needed", "free")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    needed: int
    free: int
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., needed: _Optional[int] = ..., free: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("key", "index", "token", "finish", "score")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    index: int
    token: int
    finish: _common_pb2.FinishReason
    score: _common_pb2.Score
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., index: _Optional[int] = ..., token: _Optional[int] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., score: _Optional[_Union[_common_pb2.Score, _Mapping]] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("key", "first", "scores")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    first: int
    scores: _containers.RepeatedCompositeFieldContainer[_common_pb2.Score]
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., first: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[_common_pb2.Score, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens", "drafts")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    drafts: _containers.RepeatedCompositeFieldContainer[VerifiedDraft]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[VerifiedDraft, _Mapping]]] = ...) -> None: ...

class VerifiedDraft(_message.Message):
    __slots__ = ("key", "tokens", "accepted")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    tokens: int
    accepted: int
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., tokens: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class AttemptFailed(_message.Message):
    __slots__ = ("key", "error", "caused_by")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    error: _common_pb2.Error
    caused_by: str
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., caused_by: _Optional[str] = ...) -> None: ...

class PrefillEnded(_message.Message):
    __slots__ = ("key", "computed_tokens", "cached_tokens", "compute_seconds", "share_seconds", "pooled_tokens", "remote_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHARE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    computed_tokens: int
    cached_tokens: int
    compute_seconds: float
    share_seconds: float
    pooled_tokens: int
    remote_tokens: int
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., share_seconds: _Optional[float] = ..., pooled_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("key", "report")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    report: _common_pb2.HandoffReport
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., report: _Optional[_Union[_common_pb2.HandoffReport, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("key", "computed_tokens", "cached_tokens", "received_tokens", "share_seconds", "pooled_tokens", "remote_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    computed_tokens: int
    cached_tokens: int
    received_tokens: int
    share_seconds: float
    pooled_tokens: int
    remote_tokens: int
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., received_tokens: _Optional[int] = ..., share_seconds: _Optional[float] = ..., pooled_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ...) -> None: ...

class NodeStats(_message.Message):
    __slots__ = ("blocks_total", "blocks_free", "blocks_cached", "blocks_reserved", "blocks_writing", "blocks_in_use", "blocks_quarantined", "waiting", "running", "queued_tokens", "progress_age_seconds", "counters", "decode_steps", "decode_step_seconds", "decode_step_sequences", "decode_step_tokens", "device")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_reserved: int
    blocks_writing: int
    blocks_in_use: int
    blocks_quarantined: int
    waiting: int
    running: int
    queued_tokens: int
    progress_age_seconds: float
    counters: _containers.ScalarMap[str, float]
    decode_steps: int
    decode_step_seconds: float
    decode_step_sequences: int
    decode_step_tokens: int
    device: DeviceReport
    def __init__(self, blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_reserved: _Optional[int] = ..., blocks_writing: _Optional[int] = ..., blocks_in_use: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., progress_age_seconds: _Optional[float] = ..., counters: _Optional[_Mapping[str, float]] = ..., decode_steps: _Optional[int] = ..., decode_step_seconds: _Optional[float] = ..., decode_step_sequences: _Optional[int] = ..., decode_step_tokens: _Optional[int] = ..., device: _Optional[_Union[DeviceReport, _Mapping]] = ...) -> None: ...

class DeviceReport(_message.Message):
    __slots__ = ("device", "name", "threads", "memory_total_bytes", "memory_used_bytes", "mfu", "mbu", "packed_weight_bytes", "packed_weight_source")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MFU_FIELD_NUMBER: _ClassVar[int]
    MBU_FIELD_NUMBER: _ClassVar[int]
    PACKED_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PACKED_WEIGHT_SOURCE_FIELD_NUMBER: _ClassVar[int]
    device: str
    name: str
    threads: int
    memory_total_bytes: int
    memory_used_bytes: int
    mfu: float
    mbu: float
    packed_weight_bytes: int
    packed_weight_source: str
    def __init__(self, device: _Optional[str] = ..., name: _Optional[str] = ..., threads: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., mfu: _Optional[float] = ..., mbu: _Optional[float] = ..., packed_weight_bytes: _Optional[int] = ..., packed_weight_source: _Optional[str] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("sequence", "inserted", "evicted")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    inserted: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., inserted: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("sequence", "names")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    names: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., names: _Optional[_Iterable[int]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: NodeStats
    def __init__(self, stats: _Optional[_Union[NodeStats, _Mapping]] = ...) -> None: ...

class LedgerReply(_message.Message):
    __slots__ = ("query", "ledger", "disk")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    query: int
    ledger: _common_pb2.Ledger
    disk: _common_pb2.Ledger
    def __init__(self, query: _Optional[int] = ..., ledger: _Optional[_Union[_common_pb2.Ledger, _Mapping]] = ..., disk: _Optional[_Union[_common_pb2.Ledger, _Mapping]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("incarnation", "join", "heartbeat", "reserved", "refused", "tokens", "failed", "prefill_ended", "handed_off", "admitted", "ledger", "leaving", "prompt_scores", "cache_events", "cache_snapshot", "number", "checksum")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENDED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    join: Join
    heartbeat: Heartbeat
    reserved: Reserved
    refused: Refused
    tokens: Tokens
    failed: AttemptFailed
    prefill_ended: PrefillEnded
    handed_off: HandedOff
    admitted: Admitted
    ledger: LedgerReply
    leaving: Leaving
    prompt_scores: PromptScores
    cache_events: CacheEvents
    cache_snapshot: CacheSnapshot
    number: int
    checksum: int
    def __init__(self, incarnation: _Optional[str] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[AttemptFailed, _Mapping]] = ..., prefill_ended: _Optional[_Union[PrefillEnded, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., ledger: _Optional[_Union[LedgerReply, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., prompt_scores: _Optional[_Union[PromptScores, _Mapping]] = ..., cache_events: _Optional[_Union[CacheEvents, _Mapping]] = ..., cache_snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., number: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

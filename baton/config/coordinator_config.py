"""The settings of a coordinator process."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from baton.config.common import (
    MAX_SECONDS,
    ModelSourceConfig,
    NonNegativeInt,
    Port,
    PositiveInt,
    Seconds,
    StateFolderConfig,
    help_text,
)

__all__ = ["MAX_SECONDS", "CoordinatorConfig"]


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(ModelSourceConfig, StateFolderConfig):
    """Settings that `python -m coordinator` reads."""

    prefill: Annotated[
        NonNegativeInt, help_text("Prefill nodes that `up` starts; 0 is colocated")
    ] = 1
    mode: Annotated[
        Literal["disaggregated", "colocated", "auto"],
        help_text(
            "Who computes prompts: prefill nodes, decode nodes, or auto: "
            "whichever is predicted to be sooner"
        ),
    ] = "disaggregated"
    local_prefill_share: Annotated[
        float,
        Meta(gt=0, le=10),
        help_text(
            "Mode auto: what prompts that a decode node computes may add to its steps, "
            "as a share of them"
        ),
    ] = 0.5
    degrade_wait: Annotated[
        Seconds,
        help_text(
            "Seconds a request may wait, where its class has no max_wait, "
            "before service is degraded step by step"
        ),
    ] = 5.0
    degraded_max_tokens: Annotated[
        NonNegativeInt,
        help_text(
            "Most output tokens of new requests while service is degraded so far; 0: never capped"
        ),
    ] = 0
    request_timeout: Annotated[
        Seconds,
        help_text("Seconds a request may take at most, and when its client gives no deadline"),
    ] = 600.0
    unknown_fields: Annotated[
        Literal["error", "ignore"],
        help_text(
            "Fields of a request that Baton does not know: "
            "refuse the request, or drop and count them"
        ),
    ] = "error"
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral"],
        help_text(
            "How the model writes tool calls: hermes (also Qwen), llama3_json, mistral; "
            "auto finds it in the chat template"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3"],
        help_text(
            "How the model marks its reasoning: deepseek_r1 begins with it, qwen3 if a tag does; "
            "auto finds it in the chat template"
        ),
    ] = "auto"
    max_queue: Annotated[
        PositiveInt, help_text("Requests that may wait; more are refused with 429")
    ] = 1024
    max_queue_tokens: Annotated[
        PositiveInt,
        help_text("Prompt tokens that may wait, about 36 bytes each; more are refused with 429"),
    ] = 8388608
    placement: Annotated[
        Literal["round_robin", "least_loaded", "prefix_aware"],
        help_text("How nodes are chosen for a request"),
    ] = "prefix_aware"
    explain_keep: Annotated[
        int, Meta(ge=0, le=1 << 20), help_text("Ended requests that `baton explain` knows")
    ] = 4096
    slo: Annotated[
        str,
        help_text("What counts as good, for `ratio advise`, `ratio auto` and baton_goodput_ratio"),
    ] = "ttft=500ms,tpot=50ms"
    ratio_auto: Annotated[
        bool,
        help_text("Begin with `ratio auto` for --slo, also after a restart of the coordinator"),
    ] = False
    host: Annotated[str, help_text("Address of the HTTP and gRPC ports")] = "127.0.0.1"
    port: Annotated[Port, help_text("HTTP port; 0 picks a free one")] = 8000
    grpc_port: Annotated[Port, help_text("gRPC port; 0 picks a free one")] = 50051
    admin_host: Annotated[str, help_text("Address of the admin port")] = "127.0.0.1"
    admin_port: Annotated[Port, help_text("Admin HTTP port; 0 picks a free one")] = 9000
    metrics_on_http: Annotated[
        bool,
        help_text("Serve /metrics on the HTTP port too, to whom the admin port would serve it"),
    ] = False
    cluster_host: Annotated[str, help_text("Address where nodes dial the coordinator")] = (
        "127.0.0.1"
    )
    cluster_port: Annotated[
        Port, help_text("Port where nodes dial the coordinator; 0 picks a free one")
    ] = 0
    max_connections: Annotated[
        NonNegativeInt,
        help_text(
            "Connections that the HTTP port may hold, and the gRPC port; "
            "0: by the limit of open files"
        ),
    ] = 0
    api_key: Annotated[
        str, help_text("Key that clients send as a bearer token; @FILE reads it from a file")
    ] = ""
    tenants: Annotated[
        str,
        help_text(
            "File of tenants in TOML: hashed keys, classes, weights, limits; read again on SIGHUP"
        ),
    ] = ""
    admin_token: Annotated[
        str, help_text("Token of the admin port and of Cluster calls; @FILE reads it from a file")
    ] = ""
    allowed_origins: Annotated[
        str,
        help_text(
            "Origins whose web pages may call the HTTP port, as https://chat.example, "
            "comma-separated"
        ),
    ] = ""
    failpoints_rpc: Annotated[
        bool, help_text("Let Cluster.ArmFailpoints inject faults (tests)")
    ] = False
    heartbeat: Annotated[Seconds, help_text("Seconds between heartbeats")] = 1.0
    stall: Annotated[
        Seconds, help_text("Seconds without progress after which a busy node is given up")
    ] = 15.0
    max_attempts: Annotated[PositiveInt, help_text("Placements of one request before it fails")] = 8
    retry_budget: Annotated[
        float,
        Meta(ge=0, le=1),
        help_text("Share of the requests that come in that may be retries after a failure"),
    ] = 0.2
    flip_timeout: Annotated[
        Seconds,
        help_text(
            "Seconds a node that changes its role may finish what it has; then it is placed again"
        ),
    ] = 30.0

"""The table of every setting.

Every field of `Config` is a flag `--field-name`, a variable `BATON_FIELD_NAME` and a TOML key
`field_name`; `baton.config.resolve` merges them. A `Config` is frozen: a value of "auto" is
resolved and logged where it is used.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
MAX_SECONDS = 1e6  # eleven days; timers cannot wait for ever
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]


NO_POOL = "0"  # value of --pool-memory and --pool-disk for no pool, no disk


def _help_text(text: str) -> Meta:
    return Meta(description=text)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every process. A process ignores those that do not concern it."""

    # the model
    model: Annotated[
        str, _help_text("Model folder in the Hugging Face format, or a hub id such as org/name")
    ] = ""
    served_model_name: Annotated[
        str, _help_text("Name clients use; the last part of --model by default")
    ] = ""
    engine: Annotated[
        Literal["model", "paced"],
        _help_text("paced waits as a cost model says instead of computing"),
    ] = "model"
    load_format: Annotated[
        Literal["auto", "dummy"], _help_text("dummy: seeded random weights, no files of them")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        _help_text("What computes; auto: an NVIDIA GPU if there is one"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _help_text("Of weights and cache; auto: the model's own, float16 as bfloat16"),
    ] = "auto"
    threads: Annotated[
        str, _help_text("Compute threads of a node; auto: the cores, shared out among the nodes")
    ] = "auto"

    # the cluster
    prefill: Annotated[
        NonNegativeInt, _help_text("Prefill nodes that `up` starts; 0 is colocated")
    ] = 1
    decode: Annotated[PositiveInt, _help_text("Decode nodes that `up` starts")] = 1
    mode: Annotated[
        Literal["disaggregated", "colocated", "auto"],
        _help_text(
            "Who computes prompts: prefill nodes, decode nodes, or auto: "
            "whichever is predicted to be sooner"
        ),
    ] = "disaggregated"
    max_model_len: Annotated[
        NonNegativeInt, _help_text("Longest prompt plus output in tokens; 0 takes the model's own")
    ] = 0
    kv_memory: Annotated[
        str,
        _help_text(
            "Cache memory of a node: 4GiB, a share such as 0.5, or auto: a tenth, at most 1GiB"
        ),
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=256), _help_text("Tokens of a KV block")] = 16
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096), _help_text("Sequences that a node runs at once")
    ] = 64
    max_batched_tokens: Annotated[
        int, Meta(ge=16, le=65536), _help_text("Tokens that a node computes in one step")
    ] = 512
    preemption: Annotated[
        Literal["most_blocks", "cheapest"],
        _help_text(
            "Who of the lowest class gives way when blocks run out: most blocks held, "
            "or cheapest to resume"
        ),
    ] = "most_blocks"
    local_prefill_share: Annotated[
        float,
        Meta(gt=0, le=10),
        _help_text(
            "Mode auto: what prompts that a decode node computes may add to its steps, "
            "as a share of them"
        ),
    ] = 0.5
    degrade_wait: Annotated[
        Seconds,
        _help_text(
            "Seconds a request may wait, where its class has no max_wait, "
            "before service is degraded step by step"
        ),
    ] = 5.0
    degraded_max_tokens: Annotated[
        NonNegativeInt,
        _help_text(
            "Most output tokens of new requests while service is degraded so far; 0: never capped"
        ),
    ] = 0
    request_timeout: Annotated[
        Seconds,
        _help_text("Seconds a request may take at most, and when its client gives no deadline"),
    ] = 600.0
    unknown_fields: Annotated[
        Literal["error", "ignore"],
        _help_text(
            "Fields of a request that Baton does not know: "
            "refuse the request, or drop and count them"
        ),
    ] = "error"
    max_queue: Annotated[
        PositiveInt, _help_text("Requests that may wait; more are refused with 429")
    ] = 1024
    max_queue_tokens: Annotated[
        PositiveInt,
        _help_text("Prompt tokens that may wait, about 36 bytes each; more are refused with 429"),
    ] = 8388608
    placement: Annotated[
        Literal["round_robin", "least_loaded", "prefix_aware"],
        _help_text("How nodes are chosen for a request"),
    ] = "prefix_aware"
    explain_keep: Annotated[
        int, Meta(ge=0, le=1 << 20), _help_text("Ended requests that `baton explain` knows")
    ] = 4096
    slo: Annotated[
        str,
        _help_text("What counts as good, for `ratio advise`, `ratio auto` and baton_goodput_ratio"),
    ] = "ttft=500ms,tpot=50ms"
    ratio_auto: Annotated[
        bool,
        _help_text("Begin with `ratio auto` for --slo, also after a restart of the coordinator"),
    ] = False

    # where things listen
    host: Annotated[str, _help_text("Address of the HTTP and gRPC ports")] = "127.0.0.1"
    port: Annotated[Port, _help_text("HTTP port; 0 picks a free one")] = 8000
    grpc_port: Annotated[Port, _help_text("gRPC port; 0 picks a free one")] = 50051
    admin_host: Annotated[str, _help_text("Address of the admin port")] = "127.0.0.1"
    admin_port: Annotated[Port, _help_text("Admin HTTP port; 0 picks a free one")] = 9000
    metrics_on_http: Annotated[
        bool,
        _help_text("Serve /metrics on the HTTP port too, to whom the admin port would serve it"),
    ] = False
    cluster_host: Annotated[str, _help_text("Address where nodes dial the coordinator")] = (
        "127.0.0.1"
    )
    cluster_port: Annotated[
        Port, _help_text("Port where nodes dial the coordinator; 0 picks a free one")
    ] = 0
    max_connections: Annotated[
        NonNegativeInt,
        _help_text(
            "Connections that the HTTP port may hold, and the gRPC port; "
            "0: by the limit of open files"
        ),
    ] = 0
    max_connections_per_address: Annotated[
        NonNegativeInt,
        _help_text(
            "Connections to one port from one address that is not loopback; "
            "0: half of what the port may hold"
        ),
    ] = 0
    state_dir: Annotated[
        str, _help_text("Folder of `up`: ports in use, pids, logs of detached clusters")
    ] = ""

    # who may do what
    api_key: Annotated[
        str, _help_text("Key that clients send as a bearer token; @FILE reads it from a file")
    ] = ""
    tenants: Annotated[
        str,
        _help_text(
            "File of tenants in TOML: hashed keys, classes, weights, limits; read again on SIGHUP"
        ),
    ] = ""
    cluster_token: Annotated[
        str, _help_text("Secret shared by the cluster's processes; @FILE reads it from a file")
    ] = ""
    admin_token: Annotated[
        str, _help_text("Token of the admin port and of Cluster calls; @FILE reads it from a file")
    ] = ""
    allowed_origins: Annotated[
        str,
        _help_text(
            "Origins whose web pages may call the HTTP port, as https://chat.example, "
            "comma-separated"
        ),
    ] = ""
    insecure: Annotated[bool, _help_text("Allow non-loopback binds without keys")] = False
    core_dumps: Annotated[
        bool,
        _help_text(
            "Let processes be dumped and traced (core files, gdb, py-spy); "
            "prompts and keys are in there"
        ),
    ] = False
    failpoints_rpc: Annotated[
        bool, _help_text("Let Cluster.ArmFailpoints inject faults (tests)")
    ] = False

    # a node
    coordinator: Annotated[str, _help_text("HOST:PORT of the coordinator's cluster port")] = ""
    name: Annotated[str, _help_text("Name of this node; minted when empty")] = ""
    listen: Annotated[
        str, _help_text("HOST:PORT of this node's transfer socket; port 0 is ephemeral")
    ] = "127.0.0.1:0"
    advertise: Annotated[
        str,
        _help_text(
            "HOST or HOST:PORT that peers dial, or auto: as seen by the coordinator; "
            "else that of --listen"
        ),
    ] = ""
    health_port: Annotated[
        int, Meta(ge=-1, le=65535), _help_text("gRPC health port of a node; -1 is none")
    ] = 0
    host_id: Annotated[
        str, _help_text("Nodes of equal host id share memory; proven by a file when empty")
    ] = ""
    segment_dir: Annotated[str, _help_text("Folder of shared-memory segments")] = "/dev/shm"
    transport: Annotated[
        Literal["auto", "shm", "zmq", "grpc"],
        _help_text("How KV travels; auto: shared memory on one host, zmq between hosts"),
    ] = "auto"
    layers_per_message: Annotated[
        NonNegativeInt, _help_text("Layers in one transfer message; 0 adapts")
    ] = 0

    # the pool of a host
    pool: Annotated[
        str, _help_text("HOST:PORT of this host's pool; a node without one computes what it lacks")
    ] = ""
    pool_memory: Annotated[
        str,
        _help_text(
            "Memory of a host's pool: 4GiB, a share such as 0.5, auto: a tenth, at most 4GiB; "
            "0 is no pool"
        ),
    ] = "auto"
    pool_disk: Annotated[
        str,
        _help_text(
            "Disk behind a host's pool, for what its memory evicts: 100GiB, a share such as 0.5; "
            "0 is none"
        ),
    ] = "0"
    pool_disk_dir: Annotated[
        str, _help_text("Folder of the pool's disk file; that of --state-dir when empty")
    ] = ""
    pool_port: Annotated[
        Port, _help_text("Port where `up` lets its nodes dial the pool; 0 picks a free one")
    ] = 0
    pool_eviction: Annotated[
        Literal["cost", "lru"],
        _help_text(
            "What leaves the pool first: what is least worth keeping, or least recently used"
        ),
    ] = "cost"
    pool_patience: Annotated[
        Seconds,
        _help_text(
            "Seconds a node waits for the first answer of its host's pool; then it computes"
        ),
    ] = 0.05
    pool_publish_rate: Annotated[
        str, _help_text("What a decode node copies into the pool in a second at most")
    ] = "256MiB"

    # patience
    heartbeat: Annotated[Seconds, _help_text("Seconds between heartbeats")] = 1.0
    silence: Annotated[
        Seconds, _help_text("Seconds without a message after which a node is given up")
    ] = 5.0
    stall: Annotated[
        Seconds, _help_text("Seconds without progress after which a busy node is given up")
    ] = 15.0
    ticket_ttl: Annotated[Seconds, _help_text("Seconds a ticket lives without renewal")] = 10.0
    progress_timeout: Annotated[
        Seconds, _help_text("Seconds a started hand-off may stand still")
    ] = 10.0
    max_attempts: Annotated[
        PositiveInt, _help_text("Placements of one request before it fails")
    ] = 8
    retry_budget: Annotated[
        float,
        Meta(ge=0, le=1),
        _help_text("Share of the requests that come in that may be retries after a failure"),
    ] = 0.2
    drain_timeout: Annotated[
        Seconds, _help_text("Seconds a stopping cluster waits for its requests")
    ] = 30.0
    liveness_timeout: Annotated[
        float,
        # A process sends a liveness signal every second, and a busy machine delays some.
        Meta(ge=5, le=MAX_SECONDS),
        _help_text(
            "Seconds without a sign of life after which `up` ends a process and starts it again; "
            "at least 5"
        ),
    ] = 30.0
    flip_timeout: Annotated[
        Seconds,
        _help_text(
            "Seconds a node that changes its role may finish what it has; then it is placed again"
        ),
    ] = 30.0

    # the paced engine's cost model
    paced_prefill_us_per_token: Annotated[
        float, Meta(ge=0), _help_text("Microseconds for each prompt token")
    ] = 50.0
    paced_step_ms: Annotated[float, Meta(ge=0), _help_text("Milliseconds for each decode step")] = (
        2.0
    )
    paced_sequence_us: Annotated[
        float, Meta(ge=0), _help_text("Microseconds of a decode step for each sequence")
    ] = 20.0
    paced_vocab_size: Annotated[PositiveInt, _help_text("Token ids are below this")] = 32000
    paced_reread: Annotated[
        bool, _help_text("Check the whole context again at every full block (tests)")
    ] = False

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _help_text("Least weight that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"], _help_text("auto: console on a terminal, else json")
    ] = "auto"
    log_max_bytes: Annotated[
        int,
        Meta(ge=4096),
        _help_text("Bytes after which `up --detach` begins a process's log file anew"),
    ] = 64 << 20
    log_backups: Annotated[
        int,
        Meta(ge=0, le=1000),
        _help_text("Full log files that are kept for each process, beside the one in use"),
    ] = 3

    @property
    def has_pool(self) -> bool:
        """Whether `up` starts a pool."""
        return self.pool_memory.strip() != NO_POOL

    @property
    def has_pool_disk(self) -> bool:
        """Whether the pool has a disk behind its memory."""
        return self.pool_disk.strip() != NO_POOL


SECRET_FIELDS = frozenset({"api_key", "cluster_token", "admin_token"})
ENV_PREFIX = "BATON_"
# Variables that are not settings: for commands, for tests, and from a supervisor to its children.
NON_SETTING_VARIABLES = frozenset(
    {
        *(
            "BATON_CONFIG",
            "BATON_ENDPOINT",
            "BATON_URL",
            "BATON_FAILPOINTS",
            "BATON_FAILPOINTS_SEED",
        ),
        *("BATON_SUPERVISOR_PID", "BATON_LIVENESS_FD"),
    }
)


def get_served_model_name(config: Config) -> str:
    """Return the name that clients use: --served-model-name, or the last part of --model."""
    return config.served_model_name or Path(config.model).name or config.engine

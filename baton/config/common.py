"""Settings that several processes share, and the types of all settings.

A setting stands in one class, as a field with its default, its bounds and its help text. The
configuration of a process inherits from the classes here that it needs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
MAX_SECONDS = 1e6  # eleven days; timers cannot wait for ever
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]


def help_text(text: str) -> Meta:
    """Attach the help text of a setting to its type."""
    return Meta(description=text)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Settings that every process reads."""

    max_connections_per_address: Annotated[
        NonNegativeInt,
        help_text(
            "Connections to one port from one address that is not loopback; "
            "0: half of what the port may hold"
        ),
    ] = 0
    cluster_token: Annotated[
        str, help_text("Secret shared by the cluster's processes; @FILE reads it from a file")
    ] = ""
    insecure: Annotated[bool, help_text("Allow non-loopback binds without keys")] = False
    core_dumps: Annotated[
        bool,
        help_text(
            "Let processes be dumped and traced (core files, gdb, py-spy); "
            "prompts and keys are in there"
        ),
    ] = False
    silence: Annotated[
        Seconds, help_text("Seconds without a message after which a node is given up")
    ] = 5.0
    drain_timeout: Annotated[
        Seconds, help_text("Seconds a stopping cluster waits for its requests")
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], help_text("Least weight that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"], help_text("auto: console on a terminal, else json")
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelSourceConfig(ProcessConfig):
    """Settings of the processes that read files of the model: the coordinator and the nodes."""

    model: Annotated[
        str, help_text("Model folder in the Hugging Face format, or a hub id such as org/name")
    ] = ""
    served_model_name: Annotated[
        str, help_text("Name clients use; the last part of --model by default")
    ] = ""
    engine: Annotated[
        Literal["model", "paced"],
        help_text("paced waits as a cost model says instead of computing"),
    ] = "model"
    load_format: Annotated[
        Literal["auto", "dummy"], help_text("dummy: seeded random weights, no files of them")
    ] = "auto"
    grammar_timeout: Annotated[
        Seconds,
        help_text("Seconds in which the grammar of a structured output is compiled, or refused"),
    ] = 5.0
    grammar_cache: Annotated[
        PositiveInt, help_text("Grammars of structured outputs that a process keeps compiled")
    ] = 64

    @property
    def public_model_name(self) -> str:
        """The name that clients use: --served-model-name, or the last part of --model."""
        return self.served_model_name or Path(self.model).name or self.engine


@dataclass(frozen=True, kw_only=True)
class StateFolderConfig(ProcessConfig):
    """Settings of the processes that keep files between runs: the coordinator and the pool."""

    state_dir: Annotated[
        str, help_text("Folder of `up`: ports in use, pids, logs of detached clusters")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class MemberConfig(ProcessConfig):
    """Settings of the processes that join the coordinator and transfer KV: nodes and pools."""

    coordinator: Annotated[str, help_text("HOST:PORT of the coordinator's cluster port")] = ""
    name: Annotated[str, help_text("Name of this node; minted when empty")] = ""
    listen: Annotated[
        str, help_text("HOST:PORT of this node's transfer socket; port 0 is ephemeral")
    ] = "127.0.0.1:0"
    advertise: Annotated[
        str,
        help_text(
            "HOST or HOST:PORT that peers dial, or auto: as seen by the coordinator; "
            "else that of --listen"
        ),
    ] = ""
    health_port: Annotated[
        int, Meta(ge=-1, le=65535), help_text("gRPC health port of a node; -1 is none")
    ] = 0
    host_id: Annotated[
        str, help_text("Nodes of equal host id share memory; proven by a file when empty")
    ] = ""
    segment_dir: Annotated[str, help_text("Folder of shared-memory segments")] = "/dev/shm"
    transport: Annotated[
        Literal["auto", "cuda_ipc", "shm", "zmq", "grpc"],
        help_text(
            "How KV travels; auto: between GPUs or shared memory on one host, zmq between hosts"
        ),
    ] = "auto"
    layers_per_message: Annotated[
        NonNegativeInt,
        help_text("Layers handed over together; 0 adapts to measured layer and link times"),
    ] = 0
    ticket_ttl: Annotated[Seconds, help_text("Seconds a ticket lives without renewal")] = 10.0
    progress_timeout: Annotated[
        Seconds, help_text("Seconds a started hand-off may stand still")
    ] = 10.0

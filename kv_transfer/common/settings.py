"""The transfer plane's settings, made once from the node's configuration."""

from dataclasses import dataclass
from pathlib import Path

from baton.network.connection_limits import PortLimit, compute_port_limit
from baton.process.descriptors import get_descriptor_limit
from baton.shared_memory.segment import DEFAULT_SEGMENT_FOLDER
from kv_transfer.core.send_queue import SendSettings

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Settings of one plane. Times are in seconds, sizes in bytes."""

    # auto: cuda_ipc or shm on the same host, else zmq; or cuda_ipc, shm, zmq, grpc, memory
    transport: str = "auto"
    listen: str = "127.0.0.1:0"  # where decode's transfer socket binds; port 0 is an ephemeral one
    insecure: bool = False  # may listen beyond loopback without a cluster token
    advertise: str = ""  # HOST or HOST:PORT that writers dial, if it is not the one bound
    segment_folder: Path = DEFAULT_SEGMENT_FOLDER
    ticket_ttl: float = 10.0  # a ticket not renewed for this long is lost
    progress_timeout: float = 10.0  # a started hand-off without progress for this long is lost
    renew_interval: float = 1.0  # how often a writer renews each ticket
    fence_retry_interval: float = 0.2  # how often decode tries again to fence a quarantined ticket
    credit_bytes: int = 32 * MIB  # per hand-off: may be sent and not yet landed
    # Per message. Each message costs Python time, for which the thread that computes waits; longer
    # ones overlap less of writing with landing. `baton bench plane`: 4 MiB cost half of 1 MiB.
    max_payload_bytes: int = 4 * MIB
    # Credit and message where a device writes: nothing is buffered, and each message costs Python
    # time on both sides, during which a GPU would have copied 100 MiB and more.
    device_credit_bytes: int = 512 * MIB
    device_payload_bytes: int = 64 * MIB
    layers_per_message: int = 0  # 0: as many layers as are ready and fit
    max_queued_messages: int = 64  # per link and direction, of zmq and grpc
    link_timeout: float = 5.0  # for a handshake, and for TCP's acknowledgement
    close_timeout: float = 1.0  # how long a side waits at close for its aborts to be acknowledged
    # Connections of one host to decode's transfer socket; 0: half of those that it may hold.
    max_connections_per_address: int = 0

    def make_send_settings(self) -> SendSettings:
        """How the hand-offs of a sender are cut into messages."""
        return SendSettings(
            max_payload_bytes=self.max_payload_bytes,
            layers_per_message=self.layers_per_message,
            window_bytes=self.credit_bytes,
            renew_interval=self.renew_interval,
            answer_timeout=self.progress_timeout,
        )

    def port_limit(self) -> PortLimit:
        """How many connections decode's transfer socket may hold, by this process's descriptors."""
        return compute_port_limit(
            "transfer", get_descriptor_limit(), per_address=self.max_connections_per_address
        )

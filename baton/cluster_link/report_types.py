"""Values that reports of nodes and pools carry: load, a hand-off, a block ledger."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.types import AttemptKey, Incarnation


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """One committed hand-off, on the prefill node's own clock."""

    transport: str = ""  # shm, zmq or grpc
    bytes: int = 0  # of KV
    slabs: int = 0  # a slab is one layer of one block
    slabs_landed_before_last_layer: int = 0  # hidden behind computing
    compute_seconds: float = 0.0  # forward passes of this request's prompt
    exposed_seconds: float = 0.0  # last layer computed to last slab landed
    commit_seconds: float = 0.0  # last slab landed to commit
    computed_tokens: int = 0  # of the prompt, by the prefill node
    cached_tokens: int = 0  # of the prompt, from its cache or the shared pool
    slowed_seconds: float = 0.0  # of `compute_seconds`, spent because of hand-offs
    group_layers: int = 0  # that the last step of the prompt handed over together


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a node computes on, and how well it uses it."""

    device: str = "cpu"  # cpu, or cuda:INDEX
    name: str = ""  # of the GPU or the processor
    threads: int = 0  # that compute a step on a CPU; 0 for a GPU
    # of the GPU, or of the machine for a CPU, whoever uses it; 0: it cannot be measured
    memory_total_bytes: int = 0
    memory_used_bytes: int = 0
    # shares of the device's peak rates that recent steps have reached; None: no recent steps, or
    # the peak is not known
    mfu: float | None = None  # model FLOPs utilisation
    mbu: float | None = None  # model bandwidth utilisation
    # weights in the layout of the native CPU kernels; 0: they do not compute here
    packed_weight_bytes: int = 0
    packed_weight_source: str = ""  # where they were found: segment, cache file or checkpoint


@dataclass(frozen=True, slots=True)
class NodeStats:
    """A node's load. Blocks are counted by state, as in its ledger."""

    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0  # not referenced, and found by their content
    blocks_reserved: int = 0  # promised to a KV writer
    blocks_writing: int = 0  # that writer has begun
    blocks_in_use: int = 0  # of a sequence, or of a sender that still reads them
    blocks_quarantined: int = 0  # lost, and the writer is not proven gone
    waiting: int = 0  # sequences that do not decode
    running: int = 0  # sequences that do
    queued_tokens: int = 0  # prompt tokens not yet computed
    # since the compute thread last finished a step or found nothing to do
    progress_age_seconds: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)  # by metric name, cumulative
    # steps in which every sequence took one token; cumulative, as are the next three
    decode_steps: int = 0
    decode_step_seconds: float = 0.0  # that they took
    decode_step_sequences: int = 0  # in them
    decode_step_tokens: int = 0  # in the caches that they read
    device: DeviceReport | None = None  # None for a pool


@dataclass(frozen=True, slots=True)
class LedgerOwner:
    """The blocks of one owner in one state."""

    owner: str  # attempt key or ticket
    state: str
    num_blocks: int
    age_seconds: float  # since the owner got them


@dataclass(frozen=True, slots=True)
class MemberLedger:
    """The block ledger of a node, of a pool, or of a pool's disk."""

    name: str
    incarnation: Incarnation
    num_blocks: int  # the reader compares it with the sum of `counts`
    counts: Mapping[str, int]  # blocks by state
    owners: tuple[LedgerOwner, ...]  # of all blocks that are neither free nor cached


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """Draft tokens of one sequence that a step verified."""

    key: AttemptKey
    num_tokens: int
    num_accepted: int  # of them, those that were drawn as well

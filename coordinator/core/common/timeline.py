"""Where the time of one request went, as its client and operators are told."""

from dataclasses import dataclass

from baton.cluster_link.report_types import HandoffReport


@dataclass(slots=True)
class Timeline:
    """Seconds of the coordinator's clock; the stages partition the time to the first token."""

    queue: float = 0.0  # until it was placed; attempts that were lost count as waiting
    reserve: float = 0.0  # until decode had reserved blocks, or had what it needs
    prefill: float = 0.0  # from there until the prompt was computed
    transfer: float = 0.0  # its exposed part: from there until the hand-off had landed
    first_token: float = 0.0  # from there until the coordinator had the first token
    ttft: float = 0.0  # time to first token: the sum
    total: float = 0.0  # of the whole request
    attempts: int = 0  # placements
    prefill_node: str = ""  # of the last attempt
    decode_node: str = ""  # of the last attempt
    handoff: HandoffReport | None = None  # may arrive after the end; None if there was none
    # digests of the identities of all nodes that it was placed on, each once: always one
    models: tuple[str, ...] = ()
    grammar: float = 0.0  # before it arrived in the queue: compiling the grammar of its output

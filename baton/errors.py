"""Every error that leaves a component, in one tree.

    BatonError
     + Rejected         the caller's fault; nothing was allocated
     |   InvalidRequest 400, TooLong 400, TooLarge 413, Unauthenticated 401, NotFound 404, NotAvailable 501,
     |   Overloaded 429 (OverLimit), Draining 503, Unavailable 503
     + HandoffFailed    a hand-off that did not commit: placed again, else 503
     |   PeerGone, LayoutMismatch, Incomplete, ChecksumMismatch, Stale, LeaseExpired, Unmappable
     + NodeFailed       a node could not go on: placed again, else 503
     |   OutOfBlocks, OutOfMemory, Stalled, Preempted, WrongModel, NodeGone, Drained
     + SlowReader       the client read too slowly; its stream was cut
     + DeadlineExceeded 504
     + Cancelled        499
     + ConfigError      start-up only: one line with cause and fix, exit code 2

A message names the value, the bound and the knob. Foreign exceptions (zmq, grpc, torch, OSError)
are translated at the one boundary where they enter: kv_transfer's transports, the two links, the
engine, `segment.py`.
"""

from typing import ClassVar


class BatonError(Exception):
    """Root. `http_status` and `grpc_code` (a name of grpc.StatusCode) are the outside view of the
    class."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "server_error"  # OpenAI's error.type
    code: ClassVar[str] = "internal_error"  # OpenAI's error.code; also the name on Baton's own wire
    is_retryable: ClassVar[bool] = False  # may the coordinator place the request again?

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class RequestRejected(BatonError):
    """The request is refused; another attempt would not help."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(RequestRejected):
    """A value, a field or their combination is wrong."""


class ContextLengthExceeded(RequestRejected):
    """Prompt and output do not fit the context, or the cache."""

    code = "context_length_exceeded"


class RequestTooLarge(RequestRejected):
    """The body is longer than is read."""

    http_status = 413
    code = "request_too_large"


class Unauthenticated(RequestRejected):
    """A key is missing or wrong."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    openai_type = "authentication_error"
    code = "invalid_api_key"


class NotFound(RequestRejected):
    """There is no such path, node or request."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "not_found"


class ModelNotFound(NotFound):
    """There is no such model."""

    code = "model_not_found"


class NotSupported(RequestRejected):
    """It is not built in this version."""

    http_status = 501
    grpc_code = "UNIMPLEMENTED"
    code = "not_available"


class Overloaded(RequestRejected):
    """It would be served too late, too many wait (--max-queue), or its tenant has used up its
    limits."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    code = "overloaded"


class TenantLimitExceeded(Overloaded):
    """Its tenant has used up a limit of its own: the cluster may well have room."""


class ShuttingDown(RequestRejected):
    """The coordinator is stopping."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    openai_type = "server_error"
    code = "draining"


class ServiceUnavailable(RequestRejected):
    """No node can serve it now."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    openai_type = "server_error"
    code = "unavailable"


class SlowReader(BatonError):
    """The client read so slowly that its bounded buffer filled."""

    grpc_code = "RESOURCE_EXHAUSTED"
    code = "slow_reader"


class HandoffFailed(BatonError):
    """The hand-off did not commit, for no nearer reason."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "handoff_failed"
    is_retryable = True


class PeerUnreachable(HandoffFailed):
    """The other end is gone or does not answer."""

    code = "peer_gone"


class LayoutMismatch(HandoffFailed):
    """Geometry or protocol of the two ends differ."""

    code = "layout_mismatch"


class IncompleteTransfer(HandoffFailed):
    """Slabs are missing, overlap, or do not fit the manifest."""

    code = "incomplete"


class ChecksumMismatch(HandoffFailed):
    """Bytes that landed are not those that were sent."""

    code = "checksum_mismatch"


class StaleMessage(HandoffFailed):
    """Of another incarnation or attempt, or closed off."""

    code = "stale"


class LeaseExpired(HandoffFailed):
    """The ticket was not renewed."""

    code = "lease_expired"


class UnmappableSegment(HandoffFailed):
    """The writer cannot map decode's segment: the two are not on one host after all."""

    code = "unmappable"


class NodeFailed(BatonError):
    """A node could not go on."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "node_failed"
    is_retryable = True


class OutOfBlocks(NodeFailed):
    """It needs more blocks than the cache has."""

    code = "out_of_blocks"


class OutOfMemory(NodeFailed):
    """The device has no memory for this step."""

    code = "out_of_memory"


class NodeStalled(NodeFailed):
    """No progress, or no answer."""

    code = "stalled"


class Preempted(NodeFailed):
    """It gave its blocks to other work."""

    code = "preempted"


class ModelMismatch(NodeFailed):
    """The request is bound to another model than the node serves."""

    code = "wrong_model"


class NodeLost(NodeFailed):
    """The node left the cluster."""

    code = "node_gone"


class NodeDrained(NodeFailed):
    """The node is taken out of service and has had its time."""

    code = "drained"


class DeadlineExceeded(BatonError):
    """The request's time is over."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(BatonError):
    """The client went away or cancelled."""

    http_status = 499
    grpc_code = "CANCELLED"
    openai_type = "cancelled"
    code = "cancelled"


class ConfigError(BatonError):
    """A start-up error. Printed as one line, `cause: fix`, and the process exits with 2."""

    code = "config"


def _errors_by_code(root: type[BatonError]) -> dict[str, type[BatonError]]:
    found: dict[str, type[BatonError]] = {}
    for child in root.__subclasses__():
        found.update(_errors_by_code(child))
        if "code" in vars(child):
            found[child.code] = child
    return found


ERRORS_BY_CODE: dict[str, type[BatonError]] = _errors_by_code(BatonError)


def error_from_code(code: str, message: str, param: str | None = None) -> BatonError:
    """Rebuild an error that crossed Baton's own wire. An unknown code becomes a plain
    BatonError."""
    return ERRORS_BY_CODE.get(code, BatonError)(message, param=param)


def handoff_error_from_peer(code: str, message: str) -> BatonError:
    """Rebuild the reason for which the other end of a hand-off gave it up. It ends the hand-off and
    never the request: whether that can be served elsewhere is not the peer's to say. Cancelled
    stays what it is: somebody meant it."""
    error = error_from_code(code, message)
    return (
        error
        if error.is_retryable or isinstance(error, Cancelled)
        else HandoffFailed(f"the other end: {message}")
    )

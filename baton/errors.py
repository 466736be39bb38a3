"""Every error that leaves a component, in one tree.

    BatonError
     + RequestRejected  the request is refused and nothing was allocated
     |   InvalidRequest 400, ContextLengthExceeded 400, RequestTooLarge 413, Unauthenticated 401,
     |   NotFound 404 (ModelNotFound), NotSupported 501, Overloaded 429 (TenantLimitExceeded),
     |   ShuttingDown 503, ServiceUnavailable 503
     + HandoffFailed    a hand-off did not commit: the request is placed again, or gets 503
     |   PeerUnreachable, LayoutMismatch, IncompleteTransfer, ChecksumMismatch, StaleMessage,
     |   LeaseExpired, UnmappableSegment
     + NodeFailed       a node could not continue: the request is placed again, or gets 503
     |   OutOfBlocks, OutOfMemory, NodeStalled, Preempted, ModelMismatch, NodeLost, NodeDrained
     + GrammarFailed    400, or an error event: a grammar that is too large was admitted
     + SlowReader       the client read too slowly, and its stream was cut
     + DeadlineExceeded 504
     + Cancelled        499
     + ConfigError      at start-up only: one line with cause and fix, exit code 2

A message names the value, the bound and the setting to change. Exceptions of libraries (zmq, grpc,
torch, OSError) are translated at the one boundary where they enter: the transports of kv_transfer,
the node and pool links, the engine, and baton/shared_memory/segment.py.
"""

from typing import ClassVar


class BatonError(Exception):
    """Root of all errors."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"  # a name of grpc.StatusCode
    openai_type: ClassVar[str] = "server_error"  # OpenAI's error.type
    code: ClassVar[str] = "internal_error"  # OpenAI's error.code, and the code between processes
    is_retryable: ClassVar[bool] = False  # whether the coordinator may place the request again

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        """`param` names the request field or setting; `retry_after` is in seconds."""
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
    """A field, its value, or a combination of fields is invalid."""


class ContextLengthExceeded(RequestRejected):
    """Prompt and output do not fit in the model's context or in the cache."""

    code = "context_length_exceeded"


class RequestTooLarge(RequestRejected):
    """The body exceeds the size limit."""

    http_status = 413
    code = "request_too_large"


class Unauthenticated(RequestRejected):
    """A key is missing or wrong."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    openai_type = "authentication_error"
    code = "invalid_api_key"


class NotFound(RequestRejected):
    """The path, node or request does not exist."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "not_found"


class ModelNotFound(NotFound):
    """The model does not exist."""

    code = "model_not_found"


class NotSupported(RequestRejected):
    """This version does not implement the feature."""

    http_status = 501
    grpc_code = "UNIMPLEMENTED"
    code = "not_available"


class Overloaded(RequestRejected):
    """The request would be served too late, or the queue is full (--max-queue)."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    code = "overloaded"


class TenantLimitExceeded(Overloaded):
    """The tenant has used up its limits, although the cluster may have room."""


class ShuttingDown(RequestRejected):
    """The process is stopping."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    openai_type = "server_error"
    code = "draining"


class ServiceUnavailable(RequestRejected):
    """No node can serve the request now."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    openai_type = "server_error"
    code = "unavailable"


class SlowReader(BatonError):
    """The client read so slowly that its bounded buffer is full."""

    grpc_code = "RESOURCE_EXHAUSTED"
    code = "slow_reader"


class HandoffFailed(BatonError):
    """The hand-off did not commit. Used itself where no subclass fits."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "handoff_failed"
    is_retryable = True


class PeerUnreachable(HandoffFailed):
    """The other end is lost or does not answer."""

    code = "peer_gone"


class LayoutMismatch(HandoffFailed):
    """KV layout or protocol of the two ends differ."""

    code = "layout_mismatch"


class IncompleteTransfer(HandoffFailed):
    """Slabs are missing, overlap, or contradict the manifest."""

    code = "incomplete"


class ChecksumMismatch(HandoffFailed):
    """The received bytes are not those that were sent."""

    code = "checksum_mismatch"


class StaleMessage(HandoffFailed):
    """The message belongs to an old incarnation or attempt, or to a closed ticket."""

    code = "stale"


class LeaseExpired(HandoffFailed):
    """The ticket was not renewed."""

    code = "lease_expired"


class UnmappableSegment(HandoffFailed):
    """The writer cannot map decode's segment: the two do not share a segment folder."""

    code = "unmappable"


class NodeFailed(BatonError):
    """A node could not continue."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "node_failed"
    is_retryable = True


class GrammarFailed(BatonError):
    """The output cannot obey its grammar: a limit was reached, or a token contradicts it."""

    http_status = 400  # nearly always a limit; clients repeat what gets 500
    grpc_code = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"
    code = "grammar_failed"


class OutOfBlocks(NodeFailed):
    """The sequence needs more blocks than the cache has."""

    code = "out_of_blocks"


class OutOfMemory(NodeFailed):
    """The device has too little memory for this step."""

    code = "out_of_memory"


class NodeStalled(NodeFailed):
    """The node makes no progress, or does not answer."""

    code = "stalled"


class Preempted(NodeFailed):
    """The attempt's blocks were given to other requests."""

    code = "preempted"


class ModelMismatch(NodeFailed):
    """The request is bound to another model than the node serves."""

    code = "wrong_model"


class NodeLost(NodeFailed):
    """The node left the cluster."""

    code = "node_gone"


class NodeDrained(NodeFailed):
    """The node is being taken out of service and its drain time-out has passed."""

    code = "drained"


class DeadlineExceeded(BatonError):
    """The request's deadline has passed."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(BatonError):
    """The client disconnected or cancelled the request."""

    http_status = 499
    grpc_code = "CANCELLED"
    openai_type = "cancelled"
    code = "cancelled"


class ConfigError(BatonError):
    """A start-up error. The process prints it as one line, `cause: fix`, and exits with 2."""

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
    """Rebuild an error that another process sent. An unknown code becomes a plain BatonError."""
    return ERRORS_BY_CODE.get(code, BatonError)(message, param=param)


def handoff_error_from_peer(code: str, message: str) -> BatonError:
    """Rebuild the reason why the other end of a hand-off aborted it.

    An error that is not retryable becomes HandoffFailed: it ends the hand-off and not the request,
    because the peer cannot know whether another node can serve it. Cancelled stays Cancelled.
    """
    error = error_from_code(code, message)
    return (
        error
        if error.is_retryable or isinstance(error, Cancelled)
        else HandoffFailed(f"the other end: {message}")
    )

"""Orders for a node without a coordinator, decoded as a node decodes them."""

from baton.cluster_link.messages import LinkControl, NodeOrder
from baton.cluster_link.order_codec import attempt_spec_to_pb, decode_order
from baton.pb import cluster_pb2
from baton.types import AttemptKey, AttemptSpec, Request, RequestId, SamplingParams

_TIMEOUT_SECONDS = 600.0


def make_order(
    number: int, prompt: tuple[int, ...], sampling: SamplingParams, identity_digest: bytes
) -> NodeOrder | LinkControl | None:
    """An order to compute a prompt and to decode, as request `number` of a run."""
    request_id = RequestId(f"{number:032x}")
    request = Request(request_id, prompt, sampling, _TIMEOUT_SECONDS)
    work = AttemptSpec(AttemptKey(request_id, 1, 0), request, identity_digest=identity_digest)
    submit = cluster_pb2.Submit(work=attempt_spec_to_pb(work))
    return decode_order(cluster_pb2.CoordinatorMessage(submit=submit))

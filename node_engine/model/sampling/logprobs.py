"""Log probabilities of tokens, and of the most likely alternatives, from raw logits."""

from collections.abc import Sequence

import torch

from baton.errors import NodeFailed
from baton.types import TokenLogprobs

_MAX_LOGITS_AT_ONCE = 1 << 24  # 64 MiB in float32, and as much again for the sum over them


def compute_rows_at_once(vocab_size: int) -> int:
    """Number of rows of prompt logits to process at a time, so that memory is bounded.

    The bound is three float32 tensors of 2**24 elements, or of one row if that is larger.
    """
    return max(1, _MAX_LOGITS_AT_ONCE // vocab_size)


def compute_logprobs(
    logits: torch.Tensor,  # float32 [rows, vocab], raw
    tokens: Sequence[int],  # one per row
    tops: Sequence[int],  # how many alternatives, per row
) -> list[TokenLogprobs]:
    """Log softmax of each row at its token and at its most likely tokens, best first.

    Raises NodeFailed if a row is not finite.
    """
    if not tokens:
        return []
    total = logits.logsumexp(-1, keepdim=True)  # [rows, 1]
    at = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    chosen = (logits.gather(1, at) - total).squeeze(1)
    if not bool(chosen.isfinite().all()):
        raise NodeFailed(
            "log probabilities are not finite: the model's weights or its KV cache are damaged"
        )
    best = logits.topk(min(max(tops), logits.shape[1]))
    # Rounding may leave a certain token a little above 0.
    logprobs: list[float] = chosen.clamp_(max=0.0).tolist()
    values: list[list[float]] = (best.values - total).clamp_(max=0.0).tolist()
    ids: list[list[int]] = best.indices.tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(ids[row][:top], values[row][:top], strict=True)))
        for row, (logprob, top) in enumerate(zip(logprobs, tops, strict=True))
    ]

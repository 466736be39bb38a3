"""Log probabilities of tokens, and of the most likely ones in their place, from raw logits."""

from collections.abc import Sequence

import torch

from baton.errors import NodeFailed
from baton.types import TokenLogprobs

_MAX_LOGITS_AT_ONCE = 1 << 24  # 64 MiB in float32, and as much again for the sum over them


def compute_rows_at_once(vocab_size: int) -> int:
    """Into how many rows the logits of a prompt are cut, so that its scores take a bounded amount
    of memory: at most three tensors of 2**24 elements in float32, or of one row."""
    return max(1, _MAX_LOGITS_AT_ONCE // vocab_size)


def compute_logprobs(
    logits: torch.Tensor,  # float32 [rows, vocab], raw
    tokens: Sequence[int],  # one per row
    tops: Sequence[int],  # how many alternatives, per row
) -> list[TokenLogprobs]:
    """Log softmax of each row at its token and at its most likely ones, the best first. Raises
    NodeFailed when a row is not finite."""
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

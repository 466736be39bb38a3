"""Held-out loss in windows that overlap by half, which gives nearly every token a long context."""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tools.demo_model.common.corpus_files import TokenArray
from tools.demo_model.training.batch_sampler import BOS_ID

_WINDOWS_PER_BATCH = 8  # windows at once


@torch.no_grad()
def sum_nats(model: nn.Module, tokens: TokenArray, device: torch.device, window: int) -> float:
    """Return the loss summed over all tokens but those that begin a document."""
    was_training = model.training
    model.eval()
    total = 0.0
    for inputs, targets in _windows(tokens, window):
        with autocast(device):
            logits = model(inputs.to(device))
        total += F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.to(device).flatten(),
            ignore_index=-1,
            reduction="sum",
        ).item()
    model.train(was_training)
    return total


def bits_per_byte(total_nats: float, utf8_bytes: int) -> float:
    return total_nats / math.log(2) / utf8_bytes


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _windows(tokens: TokenArray, window: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets [rows, window]; the target is -1 where a token is not counted."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    step = window // 2
    rows = []
    for start in range(0, max(len(ids) - 1, 1), step):
        piece = ids[start : start + window + 1]
        padded = F.pad(piece, (0, window + 1 - len(piece)))
        targets = padded[1:].clone()
        targets[targets == BOS_ID] = -1
        targets[len(piece) - 1 :] = -1
        if start:
            targets[: window - step] = -1
        rows.append((padded[:-1], targets))
        if start + window + 1 >= len(ids):
            break
    for first in range(0, len(rows), _WINDOWS_PER_BATCH):
        chunk = rows[first : first + _WINDOWS_PER_BATCH]
        yield torch.stack([row[0] for row in chunk]), torch.stack([row[1] for row in chunk])

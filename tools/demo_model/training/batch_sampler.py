"""Training rows: each from a part drawn by its share, half of them at the start of a document."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tools.demo_model.common.corpus_files import TokenArray

BOS_ID = 0
DOCUMENT_START_SHARE = 0.5  # share of the rows that begin at the start of a document


class BatchSampler:
    """A seeded sampler; a row continues across documents as they follow one another in the part."""

    def __init__(
        self,
        parts: Mapping[str, TokenArray],
        shares: Mapping[str, float],
        device: torch.device,
        seed: int,
    ):
        self._names: Sequence[str] = list(parts)
        weights = np.array([shares[name] for name in self._names])
        self._shares = weights / weights.sum()
        self._starts = {name: np.flatnonzero(tokens == BOS_ID) for name, tokens in parts.items()}
        self._tokens = {
            name: torch.from_numpy(tokens.astype(np.int32)).to(device)
            for name, tokens in parts.items()
        }
        self._random = np.random.default_rng(seed)

    def sample_batch(self, rows: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64 [rows, positions]."""
        chosen = self._random.choice(len(self._names), size=rows, p=self._shares)
        lines = [self._sample_row(self._names[index], positions + 1) for index in chosen]
        block = torch.stack(lines).long()
        return block[:, :-1], block[:, 1:]

    def _sample_row(self, name: str, length: int) -> torch.Tensor:
        tokens = self._tokens[name]
        last = len(tokens) - length
        if last < 0:
            raise ValueError(
                f"part {name} has {len(tokens)} tokens, fewer than a row of {length}: "
                "shorten --sequence"
            )
        if self._random.random() < DOCUMENT_START_SHARE:
            start = min(int(self._random.choice(self._starts[name])), last)
        else:
            start = int(self._random.integers(last + 1))
        return tokens[start : start + length]

import numpy as np
import pytest
import torch

from tools.demo_model.training.batch_sampler import BOS_ID, BatchSampler

CPU = torch.device("cpu")
RISING = np.array([BOS_ID, *range(1, 50), BOS_ID, *range(100, 150)], dtype=np.uint16)
HIGH = np.array([BOS_ID, *range(1000, 1100)], dtype=np.uint16)


def test_targets_are_the_next_tokens_and_a_seed_draws_the_same() -> None:
    inputs, targets = BatchSampler({"a": RISING}, {"a": 1.0}, CPU, 3).sample_batch(8, 12)
    assert inputs.shape == targets.shape == (8, 12)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again, _ = BatchSampler({"a": RISING}, {"a": 1.0}, CPU, 3).sample_batch(8, 12)
    other, _ = BatchSampler({"a": RISING}, {"a": 1.0}, CPU, 4).sample_batch(8, 12)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)


def test_rows_come_by_share_and_half_of_them_from_a_start() -> None:
    inputs, _ = BatchSampler({"a": RISING, "b": HIGH}, {"a": 3.0, "b": 1.0}, CPU, 0).sample_batch(
        800, 4
    )
    from_high = (inputs >= 1000).any(dim=1).float().mean().item()
    assert 0.19 < from_high < 0.31
    assert 0.44 < (inputs[:, 0] == BOS_ID).float().mean().item() < 0.58


def test_a_part_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="--sequence"):
        BatchSampler({"a": RISING}, {"a": 1.0}, CPU, 0).sample_batch(1, len(RISING))

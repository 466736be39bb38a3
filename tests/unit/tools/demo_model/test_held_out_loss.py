import math

import numpy as np
import torch
from torch import Tensor, nn

from tools.demo_model.training.batch_sampler import BOS_ID
from tools.demo_model.training.held_out_loss import bits_per_byte, sum_nats

VOCABULARY = 16
CPU = torch.device("cpu")


class UniformModel(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, VOCABULARY)


class EchoModel(nn.Module):
    """All of its mass on the token it has just read."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.one_hot(tokens, VOCABULARY) * 1e4


def test_every_token_is_counted_once_whatever_the_window() -> None:
    tokens = np.array([BOS_ID, *[3] * 20, BOS_ID, *[4] * 30], dtype=np.uint16)
    for window in (4, 8, 10, 50, 64):
        counted = sum_nats(UniformModel(), tokens, CPU, window) / math.log(VOCABULARY)
        assert round(counted, 3) == 50, window  # all but the two that begin a document


def test_a_token_is_compared_with_the_one_before_it() -> None:
    tokens = np.array([5] * 23, dtype=np.uint16)
    assert sum_nats(EchoModel(), tokens, CPU, 8) == 0.0
    tokens[11] = 6  # wrong there, and right after it
    assert round(sum_nats(EchoModel(), tokens, CPU, 8)) == 20000


def test_the_model_keeps_its_mode() -> None:
    tokens = np.array([1, 2, 3], dtype=np.uint16)
    for training in (True, False):
        model = UniformModel().train(training)
        sum_nats(model, tokens, CPU, 4)
        assert model.training is training


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(2) * 30, 10) == 3.0

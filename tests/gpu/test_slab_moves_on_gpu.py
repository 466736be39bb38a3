"""The kernel that writes a hand-off into a peer's arena, on an NVIDIA GPU; skipped without one."""

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu import block_comparisons

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]


@pytest.mark.parametrize(("slab_words", "layers"), [(3, 4), (64, 3), (8192, 5), (1000, 2)])
@pytest.mark.parametrize("copies", [True, False])
def test_moved_layers_and_their_checksums(slab_words: int, layers: int, copies: bool) -> None:
    """From blocks to others, by numbers in pinned memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = block_comparisons.check_slab_moves(device, slab_words, layers, copies=copies)
    assert found == (True, True)

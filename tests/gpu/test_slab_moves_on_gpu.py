"""The kernel that writes a hand-off into a peer's arena, on an NVIDIA GPU; skipped without one."""

from queue import SimpleQueue

import pytest
import torch

from baton.kv.blocks import KVLayout
from kv_transfer.core.slabs import SlabRange
from kv_transfer.device.device_memory import DeviceFailed

pytest.importorskip("triton")

from kv_transfer.device.cuda_memory import CudaMemory
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


def test_slabs_are_read_to_host_memory() -> None:
    """For transports that travel through it: one layer of a few blocks."""
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
    arena = torch.randint(0, 256, (9, 3, layout.slab_bytes), dtype=torch.uint8, device="cuda")
    memory = CudaMemory(arena, 8, layout, "", receives=False)
    read: SimpleQueue[memoryview | DeviceFailed] = SimpleQueue()
    for layer in range(3):
        memory.read_slabs(SlabRange(layer, 1, 0, 3), [5, 0, 3], read.put)
        memory.pass_on_ends(of_checks=False)
        payload = read.get(timeout=30)
        assert isinstance(payload, memoryview)
        assert bytes(payload) == arena[[5, 0, 3], layer].cpu().numpy().tobytes()
    memory.close()

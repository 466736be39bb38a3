"""The kernel that writes a hand-off into a peer's arena, on an NVIDIA GPU; skipped without one."""

from queue import SimpleQueue

import pytest
import torch

from baton.kv.blocks import KVLayout
from kv_transfer.core.slabs import SlabRange
from kv_transfer.device.device_memory import DeviceFailed
from kv_transfer.device.host_memory import compute_checksum

pytest.importorskip("triton")

from kv_transfer.device import cuda_launches
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


def test_layers_are_copied_as_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each layer, behind its own event; the checksum is that of all layers."""
    monkeypatch.setattr(cuda_launches, "_MIN_LAUNCH_BYTES", 1)
    layout = KVLayout(num_layers=5, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
    arena = torch.zeros(9, 5, layout.slab_bytes, dtype=torch.uint8, device="cuda")
    final = torch.randint_like(arena, 0, 256)
    memory = CudaMemory(arena, 8, layout, "", receives=False)
    memory.warm_up()
    peer = torch.zeros_like(arena)
    source, target = [5, 0, 3], [1, 2, 7]
    layers, ends = SlabRange(1, 4, 0, len(source)), []
    computing = torch.cuda.Stream()
    with torch.cuda.stream(computing):
        for layer in range(1, 5):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
            arena[:, layer] = final[:, layer]
            ends.append(torch.cuda.Event())
            ends[-1].record()
    copied: SimpleQueue[int | DeviceFailed] = SimpleQueue()
    words = peer.view(-1).view(torch.int64)
    memory.copy_slabs(layers, source, target, words, copied.put, after=ends)
    memory.pass_on_ends(of_checks=False)
    assert copied.empty()
    ends[1].synchronize()
    assert not ends[-1].query()
    ends[-1].synchronize()
    memory.pass_on_ends(of_checks=False)
    checksum = copied.get(timeout=30)
    wanted = torch.zeros_like(peer)
    wanted[target, 1:] = final[source, 1:]
    assert torch.equal(peer, wanted)
    payload = final[source, 1:].transpose(0, 1).contiguous().cpu().numpy().data.cast("B")
    assert checksum == compute_checksum(payload, layers)
    memory.close()


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

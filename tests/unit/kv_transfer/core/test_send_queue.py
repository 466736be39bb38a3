"""How ready slabs are cut into messages."""

from hypothesis import given
from hypothesis import strategies as st

from baton.types import BlockIndex
from kv_transfer.core.send_queue import ReadyGate, ReadySlabs, split_next_write
from tests.device_events import IdentityEvent


def _slabs(ready: ReadySlabs) -> list[tuple[int, int, int]]:
    return [
        (ready.layer, ready.first_block + n, source) for n, source in enumerate(ready.source_blocks)
    ]


@st.composite
def queues(draw: st.DrawFn) -> tuple[ReadySlabs, ...]:
    """Chunks of a forward pass, layer by layer, each over its own blocks."""
    layers, first, queue = draw(st.integers(1, 5)), 0, []
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)):
        source = tuple(BlockIndex(draw(st.integers(0, 99))) for _ in range(size))
        queue += [ReadySlabs(layer, first, source) for layer in range(layers)]
        first += size
    return tuple(queue[draw(st.integers(0, len(queue) - 1)) :])


@given(queues(), st.integers(1, 12), st.integers(0, 4))
def test_every_slab_is_sent_once_within_message_bounds(
    queue: tuple[ReadySlabs, ...], slabs: int, layers: int
) -> None:
    expected = [slab for ready in queue for slab in _slabs(ready)]
    sent = []
    while queue:
        write, queue = split_next_write(queue, slabs, layers)
        assert write.slab_range.num_slabs <= slabs
        assert write.slab_range.num_layers <= (layers or slabs)
        assert len(write.source_blocks) == write.slab_range.num_blocks
        for layer in range(write.slab_range.first_layer, write.slab_range.end_layer):
            sent += [
                (layer, write.slab_range.first_block + n, source)
                for n, source in enumerate(write.source_blocks)
            ]
    assert sorted(sent) == sorted(expected)


@given(queues(), st.integers(0, 20))
def test_blocks_held_by_decode_are_not_sent(queue: tuple[ReadySlabs, ...], first: int) -> None:
    for ready in queue:
        kept = [slab for piece in ready.clip_before(first) for slab in _slabs(piece)]
        assert kept == [slab for slab in _slabs(ready) if slab[1] >= first]


def test_layers_of_one_chunk_share_a_message_and_those_of_two_do_not() -> None:
    source, other = (BlockIndex(1), BlockIndex(2)), (BlockIndex(3),)
    queue = (ReadySlabs(0, 0, source), ReadySlabs(1, 0, source), ReadySlabs(0, 2, other))
    write, rest = split_next_write(queue, 100, 0)
    assert (write.slab_range.num_layers, write.slab_range.num_blocks, rest) == (
        2,
        2,
        queue[2:],
    )


def test_layers_behind_different_gates_do_not_travel_together() -> None:
    events = [IdentityEvent() for _ in range(4)]
    gates = [ReadyGate({layer: events[layer] for layer in pair}) for pair in ((0, 1), (2, 3))]
    blocks = (BlockIndex(4), BlockIndex(5))
    queue = tuple(ReadySlabs(layer, 0, blocks, gates[layer // 2]) for layer in range(4))
    writes = []
    while queue:
        write, queue = split_next_write(queue, 6, 0)
        writes.append(write)
    assert [(write.slab_range.num_layers, write.gate) for write in writes] == [
        (2, gates[0]),
        (2, gates[1]),
    ]
    assert [write.layer_ends for write in writes] == [tuple(events[:2]), tuple(events[2:])]


def test_layers_whose_gates_have_passed_travel_together() -> None:
    gates = [ReadyGate({}, passed_at=1.0) for _ in range(2)]
    blocks = (BlockIndex(4), BlockIndex(5))
    queue = tuple(ReadySlabs(layer, 0, blocks, gates[layer // 2]) for layer in range(4))
    write, queue = split_next_write(queue, 8, 0)
    assert (write.slab_range.num_layers, write.gate, queue) == (4, None, ())
    assert write.layer_ends == ()


def test_parts_of_a_layer_keep_its_gate() -> None:
    event = IdentityEvent()
    gate = ReadyGate({0: event})
    queue: tuple[ReadySlabs, ...] = (ReadySlabs(0, 0, (BlockIndex(4), BlockIndex(5)), gate),)
    write, queue = split_next_write(queue, 1, 0)
    assert (write.gate, write.layer_ends) == (gate, (event,))
    write, queue = split_next_write(queue, 1, 0)
    assert (write.gate, queue) == (gate, ())

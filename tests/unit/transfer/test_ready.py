from hypothesis import given
from hypothesis import strategies as st

from baton.types import BlockIndex
from kv_transfer.core.ready import Announced, take


def _slabs(ready: Announced) -> list[tuple[int, int, int]]:
    return [(ready.layer, ready.block + n, source) for n, source in enumerate(ready.source)]


@st.composite
def queues(draw: st.DrawFn) -> tuple[Announced, ...]:
    """Chunks of a forward pass, layer by layer, each over its own blocks."""
    layers, first, queue = draw(st.integers(1, 5)), 0, []
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)):
        source = tuple(BlockIndex(draw(st.integers(0, 99))) for _ in range(size))
        queue += [Announced(layer, first, source) for layer in range(layers)]
        first += size
    return tuple(queue[draw(st.integers(0, len(queue) - 1)) :])


@given(queues(), st.integers(1, 12), st.integers(0, 4))
def test_every_slab_goes_once_in_messages_within_bounds(queue: tuple[Announced, ...], slabs: int, layers: int) -> None:
    expected = [slab for ready in queue for slab in _slabs(ready)]
    sent = []
    while queue:
        outgoing, queue = take(queue, slabs, layers)
        assert outgoing.area.slabs <= slabs
        assert outgoing.area.layers <= (layers or slabs)
        assert len(outgoing.source) == outgoing.area.blocks
        for layer in range(outgoing.area.layer, outgoing.area.last_layer):
            sent += [(layer, outgoing.area.block + n, source) for n, source in enumerate(outgoing.source)]
    assert sorted(sent) == sorted(expected)


@given(queues(), st.integers(0, 20))
def test_what_decode_holds_is_cut_off(queue: tuple[Announced, ...], first: int) -> None:
    for ready in queue:
        kept = [slab for piece in ready.beyond(first) for slab in _slabs(piece)]
        assert kept == [slab for slab in _slabs(ready) if slab[1] >= first]


def test_layers_of_one_chunk_share_a_message_and_those_of_two_do_not() -> None:
    source, other = (BlockIndex(1), BlockIndex(2)), (BlockIndex(3),)
    queue = (Announced(0, 0, source), Announced(1, 0, source), Announced(0, 2, other))
    outgoing, rest = take(queue, 100, 0)
    assert (outgoing.area.layers, outgoing.area.blocks, rest) == (2, 2, queue[2:])

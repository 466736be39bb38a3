"""What the scheduler does with prompts that are handed over and sequences that arrive."""

import pytest

from baton.errors import OutOfBlocks
from baton.types import FinishReason, TicketId
from node_engine.core.ledger import BlockState, LedgerError
from node_engine.core.outcome import PrefillCompleted
from node_engine.core.residency import Refusal
from node_engine.core.sequence import SequenceState
from tests.unit.node_core.nodes import BLOCK, PROMPT, Node, T, deliver, expected, other, work


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("known", [0, 16, 48])
def test_a_hand_off(length: int, known: int) -> None:
    prefill, decode = Node(), Node()
    if known:
        for node in (prefill, decode):
            node.add(work("warm", PROMPT[:known], 1))
            node.run()
    job = work("a", PROMPT[:length], 20)
    sent = prefill.add(job, hand_off=True)
    awaited = decode.scheduler.expect(job, decode.root, T)
    assert not isinstance(awaited, Refusal)
    assert awaited.state is SequenceState.AWAITING_KV
    assert len(awaited.block_table) == min(known, length - 1) // BLOCK
    assert len(awaited.block_table) + len(awaited.promised) == -(-length // BLOCK)
    prefill.scheduler.ticket_arrived(job.key)
    assert decode.step() is None, "nothing is visible before the commit"
    prefill.run()
    assert sent.state is SequenceState.HANDING_OFF
    assert sent.output == tuple(expected(job)[:1])
    deliver(prefill, decode, job.key, T)
    decode.run()
    assert decode.emitted(job) == expected(job)
    assert sum(batch.num_tokens for batch in decode.batches if batch.slices[0].sequence == awaited.id) == 19
    for node in (prefill, decode):
        node.pool.check()
        assert node.pool.count(BlockState.IN_USE) == node.pool.count(BlockState.WRITING) == 0


def test_chunks_end_on_block_boundaries_also_behind_part_of_a_block() -> None:
    node = Node(max_batched_tokens=40, max_num_seqs=2)
    node.add(work("warm", PROMPT[:32], 1))
    node.run()
    node.batches.clear()
    sequence = node.add(work("a", PROMPT[:27] + other(73, 5), 1), hand_off=True)
    node.run()
    assert sequence.num_cached == 27
    pieces = [batch.slices[0] for batch in node.batches]
    assert [(piece.start, len(piece.tokens)) for piece in pieces] == [(27, 37), (64, 36)]


def test_the_first_token_may_be_the_last() -> None:
    prefill, decode = Node(), Node()
    tokens = expected(work("a", PROMPT[:5]))
    job = work("a", PROMPT[:5], 8, stop=tokens[:1])
    decode.scheduler.expect(job, decode.root, T)
    prefill.add(job, hand_off=True)
    prefill.run()
    [completed] = prefill.outcomes
    assert isinstance(completed, PrefillCompleted)
    assert completed.event.finish is FinishReason.STOP
    assert completed.sequence.state is SequenceState.HANDING_OFF, "its blocks stay until they are released"
    deliver(prefill, decode, job.key, T)
    assert decode.emitted(job) == tokens[:1]
    assert decode.scheduler.get(job.key) is None
    assert decode.pool.count(BlockState.IN_USE) == 0


def test_a_decode_moves_on() -> None:
    """Without a token drawn elsewhere, the last token of the context runs here."""
    first, second = Node(), Node()
    job = work("a", PROMPT[:20], 12)
    moved = work("a", PROMPT[:20], 12, emitted=expected(job)[:5])
    first.add(moved, hand_off=True)
    first.run()
    awaited = second.scheduler.expect(moved, second.root, T)
    assert not isinstance(awaited, Refusal)
    second.pool.mark_writing(T)
    size = first.engine.layout.block_bytes
    source = first.scheduler.get(moved.key)
    assert source is not None
    for block, destination in zip(source.block_table, awaited.promised, strict=True):
        second.arena[destination * size : (destination + 1) * size] = first.arena[block * size : (block + 1) * size]
    assert second.scheduler.adopt(moved.key) == []
    second.run()
    assert second.emitted(moved) == expected(job)[5:]


def test_adopt_wants_a_sequence_that_waits_and_one_token() -> None:
    node = Node()
    job = work("a", PROMPT[:20])
    with pytest.raises(LedgerError, match="unknown"):
        node.scheduler.adopt(job.key, (1,))
    node.scheduler.expect(job, node.root, T)
    node.pool.mark_writing(T)
    with pytest.raises(LedgerError, match="2 tokens"):
        node.scheduler.adopt(job.key, (1, 2))


def test_reserve_is_refused_at_once() -> None:
    node = Node(num_blocks=4, max_num_seqs=2)
    node.scheduler.expect(work("a", PROMPT[:40]), node.root, T)
    assert node.scheduler.expect(work("b", other(20, 1)), node.root, TicketId("u")) == Refusal(2, 1, 1)
    assert not isinstance(node.scheduler.expect(work("c", other(9, 2)), node.root, TicketId("v")), Refusal)
    refused = node.scheduler.expect(work("d", other(9, 3)), node.root, TicketId("w"))
    assert refused == Refusal(1, 0, 0)
    assert node.scheduler.get(work("b", [1]).key) is None
    node.pool.check()
    with pytest.raises(OutOfBlocks, match="needs 5 blocks, the cache has 4"):
        node.scheduler.expect(work("e", other(65, 4)), node.root, TicketId("x"))


def test_what_is_matched_is_not_there_to_be_reserved() -> None:
    node = Node(num_blocks=4)
    node.add(work("warm", PROMPT[:32], 1))
    node.run()
    node.add(work("a", other(10, 1), 30))
    node.step()
    assert node.scheduler.free_blocks == 2
    refused = node.scheduler.expect(work("b", PROMPT[:33]), node.root, T)
    assert refused == Refusal(1, 0, 7), "two are matched, one is left, and that one is kept for growth"
    node.pool.check()


def test_an_arrival_takes_no_place_of_those_who_wait() -> None:
    node = Node(max_num_seqs=2)
    node.add(work("a", other(10, 1)))
    node.add(work("b", other(10, 2)))
    assert node.scheduler.free_slots == 0
    assert isinstance(node.scheduler.expect(work("c", other(10, 3)), node.root, T), Refusal)


def test_an_arrival_does_not_overtake_those_who_wait() -> None:
    node = Node(num_blocks=8, max_num_seqs=4)
    node.add(work("a", other(60, 1)))
    node.step()
    node.add(work("b", other(60, 2)))
    node.step()
    assert node.scheduler.load().sequences[SequenceState.WAITING] == 1, "one block is kept for the growth of the first"
    assert node.scheduler.free_blocks == 0
    assert isinstance(node.scheduler.expect(work("c", other(9, 3)), node.root, T), Refusal)

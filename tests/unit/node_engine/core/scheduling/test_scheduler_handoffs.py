"""What the scheduler does with prompts that are handed over and sequences that arrive."""

import pytest

from baton.errors import OutOfBlocks
from baton.types import FinishReason, TicketId
from node_engine.core.blocks.block_records import BlockLedgerError, BlockState
from node_engine.core.scheduling.capacity import CapacityRefusal
from node_engine.core.sequences.outcomes import PrefillCompleted
from node_engine.core.sequences.sequence import SequenceState
from tests.unit.node_engine.core.stepped_node import (
    BLOCK,
    PROMPT,
    TICKET_ID,
    SteppedNode,
    expected_tokens,
    make_work,
    transfer_kv,
    unshared_prompt,
)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("known", [0, 16, 48])
def test_handoff_keeps_the_tokens(length: int, known: int) -> None:
    prefill, decode = SteppedNode(), SteppedNode()
    if known:
        for node in (prefill, decode):
            node.add_work(make_work("warm", PROMPT[:known], 1))
            node.run()
    work = make_work("a", PROMPT[:length], 20)
    sent = prefill.add_work(work, is_prefill_only=True)
    awaited = decode.scheduler.reserve_for_handoff(work, decode.root, TICKET_ID)
    assert not isinstance(awaited, CapacityRefusal)
    assert awaited.state is SequenceState.AWAITING_KV
    assert len(awaited.block_table) == min(known, length - 1) // BLOCK
    assert len(awaited.block_table) + len(awaited.reserved_blocks) == -(-length // BLOCK)
    prefill.scheduler.mark_ticketed(work.key)
    assert decode.step() is None, "nothing is visible before the commit"
    prefill.run()
    assert sent.state is SequenceState.HANDING_OFF
    assert sent.output_token_ids == tuple(expected_tokens(work)[:1])
    transfer_kv(prefill, decode, work.key, TICKET_ID)
    decode.run()
    assert decode.emitted_tokens(work) == expected_tokens(work)
    assert (
        sum(
            batch.num_tokens
            for batch in decode.batches
            if batch.slices[0].sequence_id == awaited.id
        )
        == 19
    )
    for node in (prefill, decode):
        node.pool.check_invariants()
        assert (
            node.pool.ownership.count_blocks(BlockState.IN_USE)
            == node.pool.ownership.count_blocks(BlockState.WRITING)
            == 0
        )


def test_chunks_end_on_block_boundaries_also_behind_part_of_a_block() -> None:
    node = SteppedNode(max_batched_tokens=40, max_num_seqs=2)
    node.add_work(make_work("warm", PROMPT[:32], 1))
    node.run()
    node.batches.clear()
    sequence = node.add_work(
        make_work("a", PROMPT[:27] + unshared_prompt(73, 5), 1), is_prefill_only=True
    )
    node.run()
    assert sequence.num_cached_tokens == 27
    slices = [batch.slices[0] for batch in node.batches]
    assert [(slice_.start, len(slice_.token_ids)) for slice_ in slices] == [(27, 37), (64, 36)]


def test_the_first_token_may_be_the_last() -> None:
    prefill, decode = SteppedNode(), SteppedNode()
    tokens = expected_tokens(make_work("a", PROMPT[:5]))
    work = make_work("a", PROMPT[:5], 8, stop=tokens[:1])
    decode.scheduler.reserve_for_handoff(work, decode.root, TICKET_ID)
    prefill.add_work(work, is_prefill_only=True)
    prefill.run()
    [completed] = prefill.outcomes
    assert isinstance(completed, PrefillCompleted)
    assert completed.event.finish_reason is FinishReason.STOP
    assert completed.sequence.state is SequenceState.HANDING_OFF, (
        "its blocks stay until they are released"
    )
    transfer_kv(prefill, decode, work.key, TICKET_ID)
    assert decode.emitted_tokens(work) == tokens[:1]
    assert decode.scheduler.sequences.get(work.key) is None
    assert decode.pool.ownership.count_blocks(BlockState.IN_USE) == 0


def test_running_decode_resumes_on_another_node() -> None:
    """Without a token drawn elsewhere, the last token of the context runs here."""
    first, second = SteppedNode(), SteppedNode()
    work = make_work("a", PROMPT[:20], 12)
    moved = make_work("a", PROMPT[:20], 12, emitted=expected_tokens(work)[:5])
    first.add_work(moved, is_prefill_only=True)
    first.run()
    awaited = second.scheduler.reserve_for_handoff(moved, second.root, TICKET_ID)
    assert not isinstance(awaited, CapacityRefusal)
    second.pool.reservations.mark_writing(TICKET_ID)
    size = first.engine.layout.block_bytes
    source = first.scheduler.sequences.get(moved.key)
    assert source is not None
    for block, destination in zip(source.block_table, awaited.reserved_blocks, strict=True):
        second.arena[destination * size : (destination + 1) * size] = first.arena[
            block * size : (block + 1) * size
        ]
    assert second.scheduler.commit_handoff(moved.key) == []
    second.run()
    assert second.emitted_tokens(moved) == expected_tokens(work)[5:]


def test_commit_handoff_checks_its_arguments() -> None:
    node = SteppedNode()
    work = make_work("a", PROMPT[:20])
    with pytest.raises(BlockLedgerError, match="unknown"):
        node.scheduler.commit_handoff(work.key, (1,))
    node.scheduler.reserve_for_handoff(work, node.root, TICKET_ID)
    node.pool.reservations.mark_writing(TICKET_ID)
    with pytest.raises(BlockLedgerError, match="2 tokens"):
        node.scheduler.commit_handoff(work.key, (1, 2))


def test_reservation_without_room_is_refused_at_once() -> None:
    node = SteppedNode(num_blocks=4, max_num_seqs=2)
    node.scheduler.reserve_for_handoff(make_work("a", PROMPT[:40]), node.root, TICKET_ID)
    assert node.scheduler.reserve_for_handoff(
        make_work("b", unshared_prompt(20, 1)), node.root, TicketId("u")
    ) == CapacityRefusal(2, 1, 1)
    assert not isinstance(
        node.scheduler.reserve_for_handoff(
            make_work("c", unshared_prompt(9, 2)), node.root, TicketId("v")
        ),
        CapacityRefusal,
    )
    refused = node.scheduler.reserve_for_handoff(
        make_work("d", unshared_prompt(9, 3)), node.root, TicketId("w")
    )
    assert refused == CapacityRefusal(1, 0, 0)
    assert node.scheduler.sequences.get(make_work("b", [1]).key) is None
    node.pool.check_invariants()
    with pytest.raises(OutOfBlocks, match="needs 5 blocks, the cache has 4"):
        node.scheduler.reserve_for_handoff(
            make_work("e", unshared_prompt(65, 4)), node.root, TicketId("x")
        )


def test_matched_blocks_are_not_counted_as_free() -> None:
    node = SteppedNode(num_blocks=4)
    node.add_work(make_work("warm", PROMPT[:32], 1))
    node.run()
    node.add_work(make_work("a", unshared_prompt(10, 1), 30))
    node.step()
    assert node.scheduler.capacity.unclaimed_blocks == 2
    refused = node.scheduler.reserve_for_handoff(make_work("b", PROMPT[:33]), node.root, TICKET_ID)
    assert refused == CapacityRefusal(1, 0, 7), (
        "two are matched, one is left, and that one is kept for growth"
    )
    node.pool.check_invariants()


def test_handoff_leaves_slots_to_waiting_sequences() -> None:
    node = SteppedNode(max_num_seqs=2)
    node.add_work(make_work("a", unshared_prompt(10, 1)))
    node.add_work(make_work("b", unshared_prompt(10, 2)))
    assert node.scheduler.capacity.unclaimed_slots == 0
    assert isinstance(
        node.scheduler.reserve_for_handoff(
            make_work("c", unshared_prompt(10, 3)), node.root, TICKET_ID
        ),
        CapacityRefusal,
    )


def test_handoff_leaves_blocks_to_waiting_sequences() -> None:
    node = SteppedNode(num_blocks=8, max_num_seqs=4)
    node.add_work(make_work("a", unshared_prompt(60, 1)))
    node.step()
    node.add_work(make_work("b", unshared_prompt(60, 2)))
    node.step()
    assert node.scheduler.capacity.get_load().num_sequences_by_state[SequenceState.WAITING] == 1, (
        "one block is kept for the growth of the first"
    )
    assert node.scheduler.capacity.unclaimed_blocks == 0
    assert isinstance(
        node.scheduler.reserve_for_handoff(
            make_work("c", unshared_prompt(9, 3)), node.root, TICKET_ID
        ),
        CapacityRefusal,
    )

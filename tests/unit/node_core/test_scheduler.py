"""What the scheduler decides, on cases small enough to say what it must be."""

from collections.abc import Callable

import pytest

from baton.errors import ConfigError, OutOfBlocks, TooLong
from baton.types import FinishReason, TicketId
from node_engine.core.block_pool import BlockPool
from node_engine.core.ledger import BlockState, LedgerError
from node_engine.core.outcome import Dropped, Emitted, Failed, PrefillCompleted
from node_engine.core.residency import Refusal
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.core.sequence import SequenceState, pin_label
from node_engine.core.step import StepBatch
from tests.unit.node_core.nodes import BLOCK, Node, deliver, expected, work

T = TicketId("t")
PROMPT = [(7 * position) % 997 + 1 for position in range(512)]


def other(length: int, salt: int) -> list[int]:
    """A prompt that shares no beginning with any other."""
    return [(salt * 31 + position) % 997 + 1 for position in range(length)]


def shape(batch: StepBatch | None) -> list[tuple[int, int, bool]]:
    assert batch is not None
    return [(piece.start, len(piece.tokens), piece.sample is not None) for piece in batch.slices]


# the shape of steps


def test_chunks_end_on_block_boundaries() -> None:
    node = Node(max_batched_tokens=40, max_num_seqs=2)
    node.add(work("a", PROMPT[:100], 3))
    assert [shape(node.step()) for _ in range(5)] == [
        [(0, 32, False)],
        [(32, 32, False)],
        [(64, 36, True)],
        [(100, 1, True)],
        [(101, 1, True)],
    ]
    assert node.step() is None


def test_running_sequences_go_first_and_prompts_share_the_rest() -> None:
    node = Node(max_batched_tokens=64)
    node.add(work("a", other(5, 1), 9))
    node.step()
    node.add(work("b", other(20, 2)))
    node.add(work("c", other(20, 3)))
    node.add(work("d", other(90, 4)))
    assert shape(node.step()) == [(5, 1, True), (0, 20, True), (0, 20, True), (0, 16, False)]


def test_a_prompt_that_gets_no_whole_block_waits_for_the_next_step() -> None:
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    node.add(work("a", other(30, 1)))
    node.add(work("b", other(30, 2)))
    assert shape(node.step()) == [(0, 30, True)]
    assert shape(node.step()) == [(30, 1, True), (0, 30, True)]


def test_no_more_sequences_than_allowed() -> None:
    node = Node(max_num_seqs=2, max_batched_tokens=64)
    jobs = [work(name, other(4, name), 3) for name in range(5)]
    for job in jobs:
        node.add(job)
    assert node.scheduler.load().sequences[SequenceState.WAITING] == 5
    assert node.scheduler.load().queued_tokens == 20
    assert len(node.step().slices) == 2  # type: ignore[union-attr]
    node.run()
    assert all(node.emitted(job) == expected(job) for job in jobs)


def test_limits_that_could_starve_a_prompt_are_refused() -> None:
    pool = BlockPool(8, BLOCK, lambda: 0.0)
    with pytest.raises(ConfigError, match="needs 23"):
        Scheduler(pool, SchedulerLimits(8, 22, 100))
    Scheduler(pool, SchedulerLimits(8, 23, 100))


def test_emitted_tokens_are_context_and_count() -> None:
    node = Node()
    whole = work("whole", PROMPT[:20], 6)
    resumed = work("resumed", PROMPT[:20], 6, emitted=expected(whole)[:4])
    node.add(resumed)
    assert shape(node.step()) == [(0, 24, True)]
    node.run()
    assert node.emitted(resumed) == expected(whole)[4:]
    events = [each.event for each in node.outcomes if isinstance(each, Emitted)]
    assert [(event.index, event.finish) for event in events] == [(4, None), (5, FinishReason.LENGTH)]
    assert [piece.sample.position for batch in node.batches for piece in batch.slices if piece.sample] == [24, 25]


def test_min_tokens_forbids_eos_and_stop_ids() -> None:
    node = Node()
    node.add(work("a", PROMPT[:4], 4, min_tokens=2, stop=[9]))
    node.run()
    forbidden = [piece.sample.forbidden for batch in node.batches for piece in batch.slices if piece.sample]
    assert forbidden == [(0, 9), (0, 9), (), ()]


def test_a_stop_token_is_emitted_and_ends_the_output() -> None:
    job = work("a", PROMPT[:4], 8)
    tokens = expected(job)
    node = Node()
    node.add(work("a", PROMPT[:4], 8, stop=[tokens[2]]))
    node.run()
    assert node.emitted(job) == tokens[:3]
    assert [each.event.finish for each in node.outcomes if isinstance(each, Emitted)][-1] is FinishReason.STOP


def test_the_model_length_ends_the_output() -> None:
    node = Node(max_model_len=20)
    job = work("a", PROMPT[:15], 100)
    node.add(job)
    node.run()
    assert node.emitted(job) == expected(job)[:5]
    with pytest.raises(TooLong, match="has 20 tokens, max_model_len is 20"):
        node.add(work("b", PROMPT[:20]))


def test_one_live_sequence_per_key() -> None:
    node = Node()
    node.add(work("a", PROMPT[:4]))
    with pytest.raises(LedgerError, match="here already"):
        node.add(work("a", PROMPT[:4]))
    with pytest.raises(LedgerError, match="0 tokens"):
        node.add(work("b", []))
    with pytest.raises(LedgerError, match="here already"):
        node.scheduler.expect(work("a", PROMPT[:4]), node.root, T)
    assert node.pool.count(BlockState.RESERVED) == 0


# prefix reuse


HELD: dict[str, Callable[[int], int]] = {
    "nothing": lambda length: 0,
    "one block": lambda length: BLOCK,
    "half": lambda length: length // 2,
    "all but one": lambda length: length - 1,
    "all": lambda length: length,
}
REUSE = [(length, held) for length in (1, 15, 16, 17, 31, 32, 33) for held in HELD if HELD[held](length) <= length]


@pytest.mark.parametrize(("length", "held"), REUSE)
def test_cached_prefixes_and_copy_on_write(length: int, held: str) -> None:
    """Whatever was computed before, the tokens are the same and only what is missing is computed."""
    shared = HELD[held](length)
    node = Node()
    # The warming prompt goes on differently after `shared` tokens and is long enough to fill its blocks.
    node.add(work("warm", [*PROMPT[:shared], 999, *other(2 * BLOCK, 5)], 1))
    node.run()
    node.batches.clear()
    job = work("a", PROMPT[:length], 20)
    sequence = node.add(job)
    node.run()
    assert node.emitted(job) == expected(job)
    assert sequence.num_cached == min(shared, length - 1)
    first = node.batches[0]
    assert [(piece.start, len(piece.tokens)) for piece in first.slices] == [
        (sequence.num_cached, length - sequence.num_cached)
    ]
    assert len(first.copies) == (1 if sequence.num_cached % BLOCK else 0), "a shared block is never written"
    assert node.pool.count(BlockState.IN_USE) == 0


def test_the_source_of_a_copy_is_held_until_the_copy_is_made() -> None:
    node = Node(num_blocks=4)
    node.add(work("warm", PROMPT[:16], 1))
    node.run()
    node.add(work("a", PROMPT[:10], 1))
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    [(source, _)] = plan.batch.copies
    assert node.pool.state(source) is BlockState.IN_USE
    node.scheduler.update(plan.batch, node.engine.run(plan.batch))
    assert node.pool.state(source) is BlockState.CACHED
    node.pool.check()


def test_the_source_of_a_copy_never_stands_in_the_way() -> None:
    """Two blocks, both cached. The prompt needs both; a reference on the second, to copy from it, would be a third."""
    node = Node(num_blocks=2)
    node.add(work("warm", PROMPT[:32], 1))
    node.run()
    job = work("a", PROMPT[:30], 1)
    sequence = node.add(job)
    node.run()
    assert node.emitted(job) == expected(job)
    assert sequence.num_cached == 16


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    node = Node()
    job = work("a", PROMPT[:10], 40)
    node.add(job)
    node.run()
    turn = work("b", [*PROMPT[:10], *expected(job)], 4)
    sequence = node.add(turn)
    node.run()
    assert node.emitted(turn) == expected(turn)
    assert sequence.num_cached == 48, "50 tokens; of the last one's block nothing was computed yet"


def test_other_tenants_find_nothing() -> None:
    node = Node()
    node.add(work("warm", PROMPT[:64], 1))
    node.run()
    sequence = node.scheduler.add(work("a", PROMPT[:64], 1), node.root[::-1])  # type: ignore[arg-type]
    node.run()
    assert sequence.num_cached == 0


# hand-offs


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


# when blocks run out


def test_a_younger_prompt_gives_way_half_computed() -> None:
    node = Node(num_blocks=6, max_num_seqs=2, max_batched_tokens=17)
    old, young = work("old", other(15, 1), 30), work("young", other(64, 2), 30)
    node.add(old)
    node.step()
    node.add(young)
    node.step()
    assert node.pool.reserve(1, T, "someone else") is not None
    node.run()
    assert node.errors() == {young.key: "preempted"}
    assert node.emitted(young) == []
    assert node.emitted(old) == expected(old)


def test_preemption_returns_blocks_and_lets_the_oldest_finish() -> None:
    node = Node(num_blocks=6, max_num_seqs=3, max_batched_tokens=64)
    jobs = [work(name, other(16, name), 60) for name in range(3)]
    for job in jobs:
        node.add(job)
    node.run()
    assert node.emitted(jobs[0]) == expected(jobs[0])
    assert node.errors() == {jobs[2].key: "preempted", jobs[1].key: "preempted"}
    for job in jobs[1:]:
        seen = node.emitted(job)
        assert seen == expected(job)[: len(seen)]
    assert node.pool.count(BlockState.IN_USE) == 0


def test_what_outgrows_the_cache_fails() -> None:
    node = Node(num_blocks=2)
    job = work("a", PROMPT[:20], 50)
    node.add(job)
    node.run()
    assert node.errors() == {job.key: "out_of_blocks"}
    assert node.emitted(job) == expected(job)[:13], "33 tokens: the KV of the last one has no room"
    [failed] = [each for each in node.outcomes if isinstance(each, Failed)]
    assert "needs 3 blocks, the cache has 2" in failed.error.message
    assert node.pool.count(BlockState.IN_USE) == 0


def test_what_is_pinned_is_waited_for() -> None:
    """The oldest sequence needs a block, and everything else is under a ticket: it goes on when that is fenced."""
    node = Node(num_blocks=4, max_num_seqs=2)
    job = work("a", PROMPT[:10], 30)
    node.add(job)
    node.step()
    awaited = work("b", other(32, 1))
    assert not isinstance(node.scheduler.expect(awaited, node.root, T), Refusal)
    node.pool.reserve(1, TicketId("u"), "someone else")
    node.run()
    waiting = node.emitted(job)
    assert len(waiting) < 30
    assert node.step() is None
    assert node.scheduler.cancel(awaited.key)
    node.pool.quarantine(T)
    assert node.step() is None, "in quarantine nothing may be reused"
    node.pool.fenced(T)
    node.run()
    assert node.emitted(job) == expected(job)


def test_speculative_work_is_dropped_first_newest_first() -> None:
    node = Node(num_blocks=8, max_num_seqs=8, max_batched_tokens=64)
    guesses = [work(f"guess{salt}", other(32, salt)) for salt in range(3)]
    for guess in guesses:
        node.add(guess, hand_off=True)
    node.step()
    node.step()
    firm = work("firm", other(60, 9))
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    node.step()
    dropped = [each.sequence.key for each in node.outcomes if isinstance(each, Dropped)]
    assert dropped == [guesses[2].key]
    sequence = node.scheduler.get(guesses[2].key)
    assert sequence is not None
    assert (sequence.state, sequence.block_table, sequence.num_computed) == (SequenceState.WAITING, [], 0)
    node.scheduler.release(firm.key)
    node.run()
    completed = [each.event for each in node.outcomes if isinstance(each, PrefillCompleted)]
    again = [event.token for event in completed if event.key == guesses[2].key]
    assert set(again) == set(expected(guesses[2])[:1])
    assert sequence.state is SequenceState.HANDING_OFF


def test_blocks_that_a_sender_still_holds_are_on_their_way() -> None:
    """A hand-off's own references outlive the drop for a moment: that is no reason to drop the next one as well."""
    node = Node(num_blocks=8, max_num_seqs=8, max_batched_tokens=128)
    guesses = [node.add(work(f"guess{salt}", other(32, salt)), hand_off=True) for salt in range(4)]
    node.run()
    tables = [tuple(guess.block_table) for guess in guesses]
    for guess in guesses:
        node.pool.share(guess.block_table, pin_label(guess.key))
    firm = work("firm", other(20, 9))
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    for _ in range(3):
        assert node.step() is None
    assert [each.sequence for each in node.outcomes if isinstance(each, Dropped)] == [guesses[3]]
    node.scheduler.cancel(guesses[3].key)
    node.pool.release(tables[3], pin_label(guesses[3].key))
    assert shape(node.step()) == [(0, 20, True)]


def test_growth_waits_for_what_a_sender_still_holds() -> None:
    node = Node(num_blocks=4, max_num_seqs=4)
    old, young = work("old", other(15, 1), 30), work("young", other(3, 2), 12)
    guess = node.add(work("guess", other(30, 3)), hand_off=True)
    node.add(old)
    node.add(young)
    node.step()
    node.pool.share(guess.block_table, pin_label(guess.key))
    table = tuple(guess.block_table)
    node.run()
    assert [each.sequence for each in node.outcomes if isinstance(each, Dropped)] == [guess]
    assert len(node.emitted(old)) < 30
    assert node.emitted(young) == expected(young), "it was not preempted for what is on its way"
    node.scheduler.cancel(guess.key)
    node.pool.release(table, pin_label(guess.key))
    node.run()
    assert node.emitted(old) == expected(old)


def test_growth_takes_from_the_speculative_before_it_preempts() -> None:
    node = Node(num_blocks=4, max_num_seqs=4)
    old, young, guess = work("old", other(15, 1), 16), work("young", other(15, 2), 16), work("guess", other(16, 3))
    node.add(old)
    node.add(guess, hand_off=True)
    node.add(young)
    node.run()
    assert node.errors() == {}
    assert [each.sequence.key for each in node.outcomes if isinstance(each, Dropped)] == [guess.key]
    assert node.emitted(old) == expected(old)
    assert node.emitted(young) == expected(young)


def test_nothing_is_dropped_in_vain() -> None:
    node = Node(num_blocks=8, max_num_seqs=8)
    pinned, guess = work("pinned", other(64, 1)), work("guess", other(32, 2))
    node.add(pinned, hand_off=True)
    node.scheduler.ticket_arrived(pinned.key)
    node.add(guess, hand_off=True)
    node.run()
    firm = work("firm", other(80, 3))
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    assert node.step() is None
    assert not [each for each in node.outcomes if isinstance(each, Dropped)], (
        "4 + 2 blocks are less than 5 and 4 pinned"
    )
    node.scheduler.release(pinned.key)
    node.run()
    assert [each.event.key for each in node.outcomes if isinstance(each, PrefillCompleted)][-1] == firm.key


def test_a_ticket_makes_firm() -> None:
    node = Node(num_blocks=8, max_num_seqs=8)
    guess, firm = work("guess", other(64, 1)), work("firm", other(80, 2))
    node.add(guess, hand_off=True)
    node.run()
    node.scheduler.ticket_arrived(guess.key)
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    assert node.step() is None
    assert node.pool.held_by(str(guess.key)) == 4


def test_the_firm_go_before_the_speculative() -> None:
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    guess, firm = work("guess", other(64, 1)), work("firm", other(32, 2))
    node.add(guess, hand_off=True)
    node.step()
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    batch = node.step()
    assert shape(batch) == [(0, 32, True)]


def test_a_late_ticket_overtakes_nobody_who_writes() -> None:
    """Decode gives a hand-off up in which nothing moves for a while: an older prompt, however long, must wait its turn
    if its ticket came later."""
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    long, begun = work("long", other(512, 1)), work("begun", other(96, 2))
    node.add(long, hand_off=True)
    node.add(begun, hand_off=True)
    node.scheduler.ticket_arrived(begun.key)
    assert shape(node.step()) == [(0, 32, False)]
    node.scheduler.ticket_arrived(long.key)
    assert shape(node.step()) == [(32, 32, False)]
    assert shape(node.step()) == [(64, 32, True)]
    node.run()
    assert [each.event.key for each in node.outcomes if isinstance(each, PrefillCompleted)] == [begun.key, long.key]


# between next_step and update


def test_a_step_that_failed_is_tried_again() -> None:
    node = Node()
    node.add(work("warm", PROMPT[:32], 1))
    node.run()
    job = work("a", PROMPT[:30], 5)
    node.add(job)
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    node.scheduler.abandon(plan.batch)
    node.pool.check()
    again = node.scheduler.next_step()
    assert again.batch == plan.batch
    node.scheduler.abandon(again.batch)
    node.run()
    assert node.emitted(job) == expected(job)


def test_one_step_at_a_time() -> None:
    node = Node()
    node.add(work("a", PROMPT[:30], 5))
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    with pytest.raises(LedgerError, match="in flight"):
        node.scheduler.next_step()
    with pytest.raises(LedgerError, match="in flight"):
        node.scheduler.update(StepBatch(()), ())
    with pytest.raises(ValueError, match="zip"):
        node.scheduler.update(plan.batch, ())


@pytest.mark.parametrize("how", ["update", "abandon"])
def test_blocks_being_written_return_when_the_step_has_ended(how: str) -> None:
    node = Node()
    job, stays = work("a", other(30, 1)), work("b", other(30, 2))
    node.add(job)
    node.add(stays)
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    assert node.scheduler.cancel(job.key)
    assert node.pool.held_by(str(job.key)) == 2, "the engine may be writing them"
    if how == "update":
        outcomes = node.scheduler.update(plan.batch, node.engine.run(plan.batch))
        assert [each.sequence.key for each in outcomes] == [stays.key]
    else:
        node.scheduler.abandon(plan.batch)
    assert node.pool.held_by(str(job.key)) == 0
    assert node.scheduler.get(job.key) is None
    assert not node.scheduler.cancel(job.key)
    node.pool.check()


def test_stopping_keeps_blocks_for_the_sender() -> None:
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    job = work("a", other(100, 1))
    node.add(job, hand_off=True)
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    node.scheduler.stop(job.key)
    assert node.scheduler.update(plan.batch, node.engine.run(plan.batch)) == []
    assert node.step() is None, "nothing more is computed"
    assert node.pool.held_by(str(job.key)) == 7
    firm = work("firm", other(16 * 60, 2))
    node.add(firm)
    assert node.step() is None, "and nothing is dropped: a sender may be reading"
    node.scheduler.release(job.key)
    assert node.pool.held_by(str(job.key)) == 0
    assert node.step() is not None

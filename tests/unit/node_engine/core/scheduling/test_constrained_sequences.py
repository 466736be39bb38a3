"""What a grammar changes in the scheduler: masks of samples, ends of outputs, rejected tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from baton.types import FinishReason
from node_engine.core.sequences.outcomes import PrefillCompleted, SequenceFailed, TokenEmitted
from node_engine.core.sequences.sequence import Sequence as NodeSequence
from node_engine.core.sequences.sequence import SequenceState
from node_engine.core.step.step_batch import SliceResult
from tests.unit.node_engine.core.stepped_node import (
    PROMPT,
    TICKET_ID,
    SteppedNode,
    expected_tokens,
    make_work,
)

EOS = 0  # of the paced engine


@dataclass
class RecordedMask:
    excluded: tuple[int, ...]

    def wait_for_words(self) -> npt.NDArray[np.int32]:
        raise AssertionError("the paced engine has no use for masks")


@dataclass
class RecordedConstraint:
    """Accepts `length` tokens, but none of `rejected`."""

    length: int = 100
    rejected: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    masks: list[RecordedMask] = field(default_factory=list)
    pending: RecordedMask | None = None
    is_ready: bool = True

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) == self.length

    def can_join_step(self, excluded_token_ids: tuple[int, ...]) -> bool:
        self.start_mask_computation(excluded_token_ids)
        return self.is_ready

    def start_mask_computation(self, excluded_token_ids: tuple[int, ...]) -> RecordedMask:
        if self.pending is None:
            self.pending = RecordedMask(excluded_token_ids)
            self.masks.append(self.pending)
        return self.pending

    def start_draft_mask_computations(
        self, draft: Sequence[int], excluded_token_ids: Sequence[tuple[int, ...]]
    ) -> list[RecordedMask]:
        raise AssertionError("the node does not speculate")

    def accept_token(self, token: int) -> str:
        self.pending = None
        if token in self.rejected:
            return "it is rejected"
        self.tokens.append(token)
        return ""

    def roll_back(self, num_tokens: int) -> None:
        self.pending = None
        del self.tokens[len(self.tokens) - num_tokens :]


def add_constrained(
    node: SteppedNode, constraint: RecordedConstraint, **fields: bool | int
) -> NodeSequence:
    is_prefill_only = bool(fields.pop("is_prefill_only", False))
    work = make_work("a", PROMPT[:40], 6, **fields)  # type: ignore[arg-type]
    return node.scheduler.add_sequence(
        work, node.root, is_prefill_only=is_prefill_only, constraint=constraint
    )


def test_each_sampled_position_has_a_mask_and_each_token_is_accepted() -> None:
    node, constraint = SteppedNode(max_batched_tokens=32), RecordedConstraint()
    sequence = add_constrained(node, constraint)
    node.run()
    assert constraint.tokens == expected_tokens(sequence.work)
    assert len(constraint.masks) == 6
    sampled = [
        slice_.sample_spec
        for batch in node.batches
        for slice_ in batch.slices
        if slice_.sample_spec is not None
    ]
    assert [spec.mask for spec in sampled] == constraint.masks
    assert all(spec.forbidden_token_ids == () for spec in sampled)


@pytest.mark.parametrize(
    ("fields", "excluded"),
    [
        ({}, [(), (), ()]),
        ({"min_tokens": 2}, [(EOS,), (EOS,), ()]),
        ({"ignore_eos": True}, [(EOS,), (EOS,), (EOS,)]),
    ],
)
def test_ends_that_are_not_wanted_are_left_out_of_the_mask(
    fields: dict[str, int], excluded: list[tuple[int, ...]]
) -> None:
    node, constraint = SteppedNode(), RecordedConstraint()
    add_constrained(node, constraint, **fields)
    for _ in range(3):
        node.step()
    assert [mask.excluded for mask in constraint.masks] == excluded


def test_an_output_that_can_only_end_has_ended() -> None:
    """Also if max_tokens is reached with the same token."""
    for length in (3, 6):
        node, constraint = SteppedNode(), RecordedConstraint(length)
        add_constrained(node, constraint)
        node.run()
        events = [each.event for each in node.outcomes if isinstance(each, TokenEmitted)]
        assert [event.finish_reason for event in events] == [
            *[None] * (length - 1),
            FinishReason.STOP,
        ]
        assert len(node.scheduler.sequences) == 0


def test_a_rejected_token_ends_the_sequence_with_an_error() -> None:
    node = SteppedNode()
    wanted = expected_tokens(make_work("a", PROMPT[:40], 6))
    sequence = add_constrained(node, RecordedConstraint(rejected=frozenset(wanted[2:3])))
    node.run()
    assert node.emitted_tokens(sequence.work) == wanted[:2]
    assert node.error_codes() == {sequence.key: "grammar_failed"}
    assert len(node.scheduler.sequences) == 0


def test_the_first_token_of_a_hand_off_obeys_the_grammar_on_both_nodes() -> None:
    node, constraint = SteppedNode(), RecordedConstraint(1)
    sequence = add_constrained(node, constraint, is_prefill_only=True)
    node.step()
    (completed,) = node.outcomes
    assert isinstance(completed, PrefillCompleted)
    assert completed.event.finish_reason is FinishReason.STOP
    (token,) = constraint.tokens
    for rejected, kind in ((frozenset[int](), TokenEmitted), (frozenset({token}), SequenceFailed)):
        target = SteppedNode()
        theirs = RecordedConstraint(rejected=rejected)
        target.scheduler.reserve_for_handoff(
            sequence.work, target.root, TICKET_ID, constraint=theirs
        )
        target.pool.reservations.mark_writing(TICKET_ID)
        (outcome,) = target.scheduler.commit_handoff(sequence.key, (token,))
        assert isinstance(outcome, kind)
        target.pool.check_invariants()


def test_a_deferred_slice_keeps_its_mask() -> None:
    node, constraint = SteppedNode(), RecordedConstraint()
    add_constrained(node, constraint)
    for _ in range(2):
        batch = node.scheduler.schedule_step().batch
        assert batch is not None
        node.scheduler.update_from_results(batch, [SliceResult(is_deferred=True)])
    assert len(constraint.masks) == 1


def test_a_sequence_stays_out_of_steps_until_its_mask_is_ready() -> None:
    node, constraint = SteppedNode(), RecordedConstraint()
    slow = add_constrained(node, constraint)
    other = node.add_work(make_work("b", PROMPT[40:60], 6))
    node.step()
    constraint.is_ready = False
    node.step()
    assert len(node.emitted_tokens(slow.work)) == 1
    assert len(node.emitted_tokens(other.work)) == 2
    constraint.is_ready = True
    node.run()
    assert node.emitted_tokens(slow.work) == expected_tokens(slow.work)
    assert len(constraint.masks) == 6, "the mask that was begun is the one that is used"


def test_a_prefill_that_starts_over_rolls_the_grammar_back() -> None:
    node, constraint = SteppedNode(), RecordedConstraint()
    sequence = add_constrained(node, constraint, is_prefill_only=True)
    node.step()
    assert len(constraint.tokens) == 1
    sequence.restart_prefill()
    assert constraint.tokens == []
    assert sequence.state is SequenceState.HANDING_OFF


def test_tokens_of_earlier_attempts_are_not_accepted_again() -> None:
    node, constraint = SteppedNode(), RecordedConstraint()
    work = make_work("a", PROMPT[:40], 6)
    emitted = expected_tokens(work)[:3]
    resumed = replace(work, emitted_token_ids=tuple(emitted))
    node.scheduler.add_sequence(resumed, node.root, constraint=constraint)
    node.run()
    assert constraint.tokens == expected_tokens(work)[3:]

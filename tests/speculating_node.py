"""A scheduler over an engine with a model, with speculative decoding or without."""

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from unittest.mock import patch

from baton.kv.blocks import root_hash
from baton.process.clock import FakeClock
from baton.types import AttemptKey, AttemptSpec, Request, RequestId, SamplingParams, TokenEvent
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.scheduling import speculator
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import SequenceFailed, SequenceOutcome, TokenEmitted
from node_engine.core.sequences.token_constraint import TokenConstraint
from node_engine.core.speculation.model_drafter import ModelDrafter
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import StepBatch

BLOCK_SIZE = 16


@dataclass
class SpeculatingNode:
    """Steps sequences to their end."""

    engine: Engine
    max_draft_tokens: int
    num_blocks: int = 128
    draft_engine: Engine | None = None
    num_draft_blocks: int = 128
    outcomes: list[SequenceOutcome] = field(default_factory=list)
    batches: list[StepBatch] = field(default_factory=list)
    # Set when a sequence that was kept out of steps may join them, see ConstraintFactory.
    mask_computed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._arena = bytearray(self.num_blocks * self.engine.layout.block_bytes)
        self.engine.bind_cache(memoryview(self._arena), self.num_blocks)
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE, FakeClock())
        limits = SchedulerLimits(8, 96, 1024, max_draft_tokens=self.max_draft_tokens)
        self.drafter = self._make_drafter() if self.draft_engine is not None else None
        self.scheduler = Scheduler(self.pool, limits, self.engine.eos_token_ids)
        if self.drafter is not None:
            self.scheduler.speculator.use_draft_model(self.drafter)
        self.root = root_hash(self.engine.model_digest, self.engine.layout, b"")

    def _make_drafter(self) -> ModelDrafter:
        engine = self.draft_engine
        assert engine is not None
        self._draft_arena = bytearray(self.num_draft_blocks * engine.layout.block_bytes)
        engine.bind_cache(memoryview(self._draft_arena), self.num_draft_blocks)
        return ModelDrafter(
            engine.run,
            num_blocks=self.num_draft_blocks,
            block_size=engine.layout.block_size,
            max_model_len=engine.max_model_len,
            vocab_size=min(engine.vocab_size, self.engine.vocab_size),
            clock=FakeClock(),
        )

    def run_works(
        self, works: Sequence[AttemptSpec], constraints: Mapping[AttemptKey, TokenConstraint] = {}
    ) -> None:
        for work in works:
            self.scheduler.add_sequence(work, self.root, constraint=constraints.get(work.key))
        while len(self.scheduler.sequences):
            self.mask_computed.clear()
            if not self.step():
                assert self.mask_computed.wait(60), "sequences wait, but not for a mask"
        assert self.pool.ownership.count_blocks(BlockState.IN_USE) == 0
        if self.drafter is not None:
            self.drafter.release_ended_sequences()
            assert self.drafter.num_free_blocks == self.num_draft_blocks

    def step(self) -> bool:
        plan = self.scheduler.schedule_step()
        self.outcomes += plan.outcomes
        if plan.batch is not None:
            self.batches.append(plan.batch)
            self.outcomes += self.scheduler.update_from_results(
                plan.batch, self.engine.run(plan.batch)
            )
        self.pool.check_invariants()
        return plan.batch is not None

    def list_events(self, work: AttemptSpec) -> list[TokenEvent]:
        return [
            each.event
            for each in self.outcomes
            if isinstance(each, TokenEmitted) and each.event.key == work.key
        ]

    def list_tokens(self, work: AttemptSpec) -> list[int]:
        return [event.token_id for event in self.list_events(work)]

    def list_failed(self) -> dict[AttemptKey, str]:
        return {
            each.sequence.key: each.error.code
            for each in self.outcomes
            if isinstance(each, SequenceFailed)
        }

    def count_drafts(self, result: str) -> float:
        counters = self.scheduler.speculator.counters()
        return counters.get(f'baton_draft_tokens_total{{result="{result}"}}', 0.0)


def make_speculated_work(
    name: str, prompt: Sequence[int], sampling: SamplingParams, emitted: Sequence[int] = ()
) -> AttemptSpec:
    key = AttemptKey(RequestId(name), 0, 0)
    return AttemptSpec(key, Request(key.request_id, tuple(prompt), sampling, 60.0), tuple(emitted))


class KnowingProposer:
    """Proposes outputs that are known, each token wrong with the probability `error_share`."""

    def __init__(
        self, tokens: Sequence[int], known: Sequence[Sequence[int]], error_share: float, seed: int
    ) -> None:
        self._tokens = tokens
        self._known = known
        self._error_share = error_share
        self._dice = random.Random(seed)

    def propose_tokens(self, max_tokens: int) -> list[int]:
        length = len(self._tokens)
        right = next(
            (whole for whole in self._known if list(whole[:length]) == list(self._tokens)), ()
        )[length : length + max(0, max_tokens)]
        return [token if self._dice.random() >= self._error_share else token ^ 1 for token in right]


@contextmanager
def knowing_proposers(
    contexts: Sequence[Sequence[int]], error_share: float, seed: int = 0
) -> Iterator[None]:
    """Draft what `contexts` (prompts and their outputs) say, so that drafts are often right."""

    numbers = count(1000 * seed)

    def make_proposer(tokens: Sequence[int]) -> KnowingProposer:
        return KnowingProposer(tokens, contexts, error_share, next(numbers))

    with patch.object(speculator, "NgramProposer", make_proposer):
        yield

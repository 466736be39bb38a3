"""What a draft model is to draft for a running sequence, and with which parameters."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from node_engine.core.sequences.sequence import Sequence, SequenceState
from node_engine.core.sequences.stop_rules import forbidden_token_ids
from node_engine.core.speculation.model_drafter import DraftOrder
from node_engine.core.step.step_batch import SampleSpec


def make_draft_order(
    sequence: Sequence, num_tokens: int, eos_token_ids: tuple[int, ...], vocab_size: int
) -> DraftOrder:
    """An order for at most `num_tokens` tokens, of the first `vocab_size` of the vocabulary.

    They are sampled as the step does at their positions, but for the grammar of the output.
    """
    request = sequence.work.request
    params = request.sampling
    if params.logprobs is not None:
        params = replace(params, logprobs=None)
    if any(token >= vocab_size for token, _ in params.logit_bias):
        # The served model may have logits for ids that the draft model has none for.
        known = tuple(entry for entry in params.logit_bias if entry[0] < vocab_size)
        params = replace(params, logit_bias=known)
    counts = sequence.update_token_counts() if sequence.has_penalties else None

    def make_spec(draft: SequenceOf[int]) -> SampleSpec:
        return SampleSpec(
            params,
            sequence.key.choice_index,
            len(sequence.token_ids) + len(draft),
            forbidden_token_ids(params, eos_token_ids, sequence.num_output_tokens + len(draft)),
            counts.count_draft(draft) if counts is not None and draft else counts,
        )

    return DraftOrder(
        sequence.id,
        sequence.token_ids,
        lambda: sequence.state is SequenceState.RUNNING,
        num_tokens,
        make_spec,
    )

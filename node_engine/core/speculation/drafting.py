"""What a running sequence has of speculative decoding. It is a function of its tokens and steps."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from node_engine.core.speculation.acceptance_rate import AcceptanceRate


class DraftResult(NamedTuple):
    """What became of the draft tokens that a step verified for one sequence."""

    num_accepted: int = 0  # drawn as well, and so part of the output
    num_rejected: int = 0  # another token was drawn
    num_unused: int = 0  # behind a rejected one, or behind the end of the output

    @property
    def num_drafted(self) -> int:
        return sum(self)


class Proposer(Protocol):
    """Proposes how one sequence goes on."""

    def propose_tokens(self, max_tokens: int) -> Sequence[int]: ...


class Drafting:
    """The drafts of one sequence. Compute thread only."""

    def __init__(self, proposer: Proposer | None, node_acceptance: AcceptanceRate) -> None:
        """Without `proposer`, proposals come from elsewhere (`set_proposal`).

        `node_acceptance` learns from all sequences, and is what a new one begins with.
        """
        self._proposer = proposer
        self._node_acceptance = node_acceptance
        self.acceptance = AcceptanceRate(node_acceptance.rate)
        self._proposed_tokens: Sequence[int] = ()
        self.verified_tokens: Sequence[int] = ()  # the draft tokens of the next step

    @property
    def has_proposal(self) -> bool:
        return bool(self._proposed_tokens)

    def propose_tokens(self, max_tokens: int) -> Sequence[int]:
        """Propose how the sequence goes on."""
        return self.set_proposal(
            self._proposer.propose_tokens(max_tokens) if self._proposer else ()
        )

    def set_proposal(self, tokens: Sequence[int]) -> Sequence[int]:
        """Propose these tokens, of which none is verified yet."""
        self._proposed_tokens = tokens
        self.verified_tokens = ()
        return tokens

    def cut_proposal(self, max_tokens: int, end_token_ids: Sequence[int]) -> Sequence[int]:
        """Shorten the proposal; it stops before a token that ends the output."""
        proposed = self._proposed_tokens[: max(0, max_tokens)]
        ends = (place for place, token in enumerate(proposed) if token in end_token_ids)
        self._proposed_tokens = proposed[: next(ends, len(proposed))]
        return self._proposed_tokens

    def discard_proposal(self) -> None:
        """There is no draft for the next step, and nothing to learn from it."""
        self._proposed_tokens = self.verified_tokens = ()

    def verify_tokens(self, count: int) -> None:
        """Let the next step verify the first `count` tokens of the proposal."""
        self.verified_tokens = self._proposed_tokens[:count]

    def record_output(
        self, drawn: Sequence[int], verified: Sequence[int], *, has_ended: bool
    ) -> DraftResult:
        """Learn from a step that appended `drawn` and had verified the tokens `verified`.

        `has_ended`: the sequence ended with the last of `drawn`.
        """
        self._learn(drawn)
        num_accepted = max(0, min(len(drawn) - 1, len(verified)))
        num_left = len(verified) - num_accepted
        num_rejected = int(num_left > 0 and not has_ended)
        return DraftResult(num_accepted, num_rejected, num_left - num_rejected)

    def _learn(self, drawn: Sequence[int]) -> None:
        num_right, is_wrong = 0, False
        for token, proposed in zip(drawn, self._proposed_tokens, strict=False):
            if token != proposed:
                is_wrong = True
                break
            num_right += 1
        for acceptance in (self.acceptance, self._node_acceptance):
            acceptance.add_trials(num_right, is_wrong=is_wrong)
        self.discard_proposal()

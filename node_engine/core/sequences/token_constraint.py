"""What the scheduler needs of a grammar that the output of a sequence must obey.

The state of a grammar is a function of the request and its output tokens, so each node rebuilds it
from the attempt that it receives: nothing of it is handed off. `node_engine/structured_output`
implements the protocol.
"""

from collections.abc import Sequence
from typing import Protocol

from node_engine.core.step.step_batch import TokenMask


class TokenConstraint(Protocol):
    """The state of one sequence's grammar after its last token. Compute thread only."""

    @property
    def is_complete(self) -> bool:
        """Whether the output obeys the grammar and no token can follow."""
        ...

    def can_join_step(self, excluded_token_ids: tuple[int, ...]) -> bool:
        """Whether a step that begins now need not wait for the mask of the next token.

        False after a mask that took long, until the next one is computed: meanwhile the sequence
        stays out of steps, so that others do not wait for it.
        """
        ...

    def start_mask_computation(self, excluded_token_ids: tuple[int, ...]) -> TokenMask:
        """Begin to compute which tokens may come next.

        `excluded_token_ids` are left out, unless nothing would remain. Called again at the same
        position, it returns the same mask.
        """
        ...

    def start_draft_mask_computations(
        self, draft: Sequence[int], excluded_token_ids: Sequence[tuple[int, ...]]
    ) -> Sequence[TokenMask]:
        """Begin to compute the masks after the first draft token, after the first two, and so on.

        Returns one for each of the leading draft tokens that the grammar allows and that do not
        complete it; none if the masks would take long. `excluded_token_ids` has those of each
        position. To be called before `start_mask_computation`; the state stays as it is.
        """
        ...

    def accept_token(self, token: int) -> str:
        """Advance by one token. Returns "", or why the grammar does not allow it."""
        ...

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last tokens that were accepted."""
        ...

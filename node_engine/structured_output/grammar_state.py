"""The state of one sequence's grammar: a matcher at its last output token."""

from collections.abc import Callable, Sequence
from typing import Protocol

from llguidance import LLMatcher

from node_engine.structured_output.token_masks import PendingMask

SLOW_MASK_SECONDS = 0.005  # a sequence whose masks take longer stays out of steps meanwhile


class RequestMask(Protocol):
    """Begins to compute the mask of a matcher; see MaskThread."""

    def __call__(
        self, matcher: LLMatcher, excluded: tuple[int, ...], *, is_awaited: bool
    ) -> PendingMask: ...


class GrammarState:
    """A `TokenConstraint`. Compute thread only, once it is made."""

    def __init__(
        self,
        matcher: LLMatcher,
        request_mask: RequestMask,
        *,
        excluded_token_ids: tuple[int, ...] = (),
        first_mask: PendingMask | None = None,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        """`excluded_token_ids` are never allowed: tokens that end a text for the tokenizer, but not
        for the model. `first_mask` is that of the present position. `on_failed` is called when a
        limit of the grammar is reached."""
        self._matcher = matcher
        self._request_mask = request_mask
        self._excluded_token_ids = excluded_token_ids
        self._on_failed = on_failed
        self._mask = first_mask  # of the present position, once requested
        self._is_slow = False  # of the last position

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def start_mask_computation(self, excluded_token_ids: tuple[int, ...]) -> PendingMask:
        """See TokenConstraint."""
        return self._get_mask(excluded_token_ids, is_awaited=False)

    def can_join_step(self, excluded_token_ids: tuple[int, ...]) -> bool:
        """See TokenConstraint."""
        return not self._is_slow or self._get_mask(excluded_token_ids, is_awaited=True).is_ready

    def start_draft_mask_computations(
        self, draft: Sequence[int], excluded_token_ids: Sequence[tuple[int, ...]]
    ) -> Sequence[PendingMask]:
        """See TokenConstraint."""
        if self._is_slow or self._mask is not None or self._matcher.is_error():
            return ()
        masks: list[PendingMask] = []
        matcher = self._matcher.deep_copy()
        for token, excluded in zip(draft, excluded_token_ids, strict=True):
            if matcher.try_consume_tokens([token]) != 1 or matcher.is_error():
                break
            if matcher.is_stopped():
                break
            everywhere = self._excluded_token_ids
            masks.append(
                self._request_mask(matcher.deep_copy(), (*everywhere, *excluded), is_awaited=False)
            )
        return masks

    def accept_token(self, token: int) -> str:
        """See TokenConstraint."""
        self._release_matcher()
        if self._matcher.is_error():
            return self._describe_failure()
        if self._matcher.try_consume_tokens([token]) == 1 and not self._matcher.is_error():
            return ""
        if self._matcher.is_error():
            return self._describe_failure()
        return f"the output breaks its grammar: token {token} is not allowed after what precedes it"

    def roll_back(self, num_tokens: int) -> None:
        """See TokenConstraint."""
        self._release_matcher()
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def _get_mask(self, excluded_token_ids: tuple[int, ...], *, is_awaited: bool) -> PendingMask:
        if self._mask is None:
            excluded = (*self._excluded_token_ids, *excluded_token_ids)
            self._mask = self._request_mask(self._matcher, excluded, is_awaited=is_awaited)
        return self._mask

    def _release_matcher(self) -> None:
        """Make sure that no other thread uses the matcher."""
        if self._mask is not None:
            self._mask.discard()
            self._is_slow = self._mask.seconds > SLOW_MASK_SECONDS
            self._mask = None

    def _describe_failure(self) -> str:
        self._on_failed()
        return f"a limit of the output's grammar was reached: {self._matcher.stop_reason()}"

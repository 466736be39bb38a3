"""What placement reads of a request: `requests.record.RequestRecord` has all of it."""

from typing import Protocol

from baton.types import Incarnation, Request
from coordinator.core.common.prompt_block_hashes import PromptBlockHashes


class PlaceableRequest(Protocol):
    """A request that waits to be placed. The attributes that are not properties are set here."""

    prompt_block_hashes: PromptBlockHashes | None  # None until placement was tried once
    cached_at_first_placement: int  # prompt tokens that some cache had at the first placement

    @property
    def request(self) -> Request: ...

    @property
    def deadline(self) -> float: ...

    @property
    def emitted_token_ids(self) -> list[int]: ...

    @property
    def remaining_tokens(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def max_total_tokens(self) -> int: ...

    @property
    def awaits_prompt_logprobs(self) -> bool: ...

    @property
    def prefix_holder(self) -> Incarnation | None: ...

    @property
    def probe_node(self) -> Incarnation | None: ...

    @property
    def avoided_nodes(self) -> frozenset[Incarnation]: ...

"""Spreads waiting prompts over decode steps that wait for the weights to be read.

A step of few sequences takes as long as the weights take to be read, and could compute more tokens
in the same time: up to the ridge point of the roofline model (Williams, Waterman, Patterson,
"Roofline", CACM 52, 2009). As far as the tokens of a prompt stay below it, they cost next to
nothing. So prompts that wait are computed in small chunks beside decode, over SPREAD_STEPS steps,
instead of at once: the same tokens take less time in all and running sequences wait less at once,
for a prompt that may wait longer.

Prompts that keep coming would make a queue, because each would wait for those before it. After
MAX_SPREAD_RUN steps with prompts in a row, prompts are therefore computed at once until a step has
none.
"""

SPREAD_STEPS = 16  # in which the prompts that wait are computed, if no more come
MAX_SPREAD_RUN = 2 * SPREAD_STEPS
_MIN_SPARE_SHARE = 0.25  # of a block: with less to spare, prompts are not spread


class PromptSpreading:
    """Chooses the chunks of the prompts that wait. Knows nothing of what steps take."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._run_length = 0  # steps with prompts since the last one without
        self._steps_left = SPREAD_STEPS
        self._waiting_tokens = 0  # if no more have come since the last step

    def limit_tokens(self, waiting_tokens: int, spare_tokens: int) -> int | None:
        """Prompt tokens for the next step, in whole blocks; None: all, as far as bounds allow.

        `waiting_tokens` of all prompts are not computed, and `spare_tokens` would cost nothing.
        """
        if waiting_tokens > self._waiting_tokens:
            self._steps_left = SPREAD_STEPS
        self._waiting_tokens = waiting_tokens
        is_worth_it = spare_tokens > 0 and spare_tokens >= _MIN_SPARE_SHARE * self._block_size
        if not is_worth_it or self._run_length >= MAX_SPREAD_RUN:
            return None
        blocks = -(-waiting_tokens // (self._steps_left * self._block_size))
        return max(blocks, spare_tokens // self._block_size, 1) * self._block_size

    def observe_step(self, prompt_tokens: int) -> None:
        """Count a step that has computed so many prompt tokens."""
        self._run_length = self._run_length + 1 if prompt_tokens else 0
        self._waiting_tokens = max(0, self._waiting_tokens - prompt_tokens)
        if prompt_tokens:
            self._steps_left = max(1, self._steps_left - 1)

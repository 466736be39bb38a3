"""Makes what a node needs for structured output, and reads its tokenizer in time."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.node_config import NodeConfig
from baton.process.clock import monotonic_clock
from baton.structured_output.tokenizer_file import find_tokenizer_file
from node_engine.core.scheduling.step_limits import DeviceType

if TYPE_CHECKING:  # llguidance is imported only if a model with a tokenizer is served
    from node_engine.structured_output.constraint_factory import ConstraintFactory

_TOKENIZER_DELAY_SECONDS = 2.0  # in which a node has joined and computed the warm-up request


def make_node_constraints(
    config: NodeConfig, device: DeviceType, opened: ExitStack
) -> "ConstraintFactory | None":
    """What makes the grammars of a node's outputs; see make_constraint_factory.

    Reading the tokenizer takes Python's lock for up to half a second. For a GPU this is done at
    once, while the weights are loaded.
    """
    factory = make_constraint_factory(config, opened)
    if factory is not None and device == "cuda":
        factory.begin_loading()
    return factory


def read_tokenizer_later(constraints: "ConstraintFactory | None", opened: ExitStack) -> None:
    """Read the tokenizer in a while: before a request needs it, but after the node has joined."""
    if constraints is not None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_TOKENIZER_DELAY_SECONDS, constraints.begin_loading)
        opened.callback(timer.cancel)


def make_constraint_factory(config: NodeConfig, opened: ExitStack) -> "ConstraintFactory | None":
    """What makes the grammars of outputs; None for a model without a tokenizer.json.

    `opened` closes the factory. Raises ConfigError for a bad model folder.
    """
    tokenizer_file = find_tokenizer_file(config.model, config.engine)
    if tokenizer_file is None:
        return None
    from node_engine.model.config.model_config import load_model_config
    from node_engine.structured_output.constraint_factory import ConstraintFactory

    model = load_model_config(Path(config.model))
    factory = ConstraintFactory(
        tokenizer_file,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_grammars=config.grammar_cache,
        clock=monotonic_clock,
    )
    opened.callback(factory.close)
    return factory

"""Makes the factory of a node's grammars, which structured output needs."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.node_config import NodeConfig
from baton.process.clock import monotonic_clock
from baton.structured_output.tokenizer_file import find_tokenizer_file

if TYPE_CHECKING:  # llguidance is imported only if a model with a tokenizer is served
    from node_engine.structured_output.constraint_factory import ConstraintFactory


def make_constraint_factory(config: NodeConfig, opened: ExitStack) -> "ConstraintFactory | None":
    """What makes the grammars of outputs; None for a model without a tokenizer.json.

    It begins to read the tokenizer, while the weights are loaded. `opened` closes the factory.
    Raises ConfigError for a bad model folder.
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
    factory.start_tokenizer_loading()
    return factory

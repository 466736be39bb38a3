"""Loads the draft model of a decode node, with a cache of its own in private memory."""

import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.models.model_source import is_hub_id, require_model_folder, with_local_model
from baton.process import log
from baton.process.clock import monotonic_clock
from baton.shared_memory.available_memory import measure_private_memory
from baton.structured_output.tokenizer_file import find_tokenizer_file
from baton.types import Role
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.speculation.model_drafter import ModelDrafter, RunDraftStep
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import SliceResult, StepBatch
from node_engine.host.engine_factory import build_engine
from node_engine.host.host_arena import HostArena

CACHE_SHARE = 8  # the cache of the draft model is at most this part of the node's cache
_log = log.get_logger("engine")


def check_draft_settings(config: NodeConfig) -> None:
    """Raise ConfigError for settings of a draft model that cannot be used. Loads nothing."""
    if config.speculative != "draft":
        if config.draft_model:
            raise ConfigError(
                f"--draft-model {config.draft_model} needs --speculative draft, and that is"
                f" {config.speculative}",
                param="draft_model",
            )
        return
    if not config.draft_model:
        raise ConfigError(
            "--speculative draft needs a draft model: give --draft-model a folder or a hub id",
            param="draft_model",
        )
    if config.engine != "model":
        raise ConfigError(
            f"--speculative draft is for models, and --engine is {config.engine}:"
            " choose --speculative ngram or none",
            param="speculative",
        )
    if not is_hub_id(config.draft_model):
        require_model_folder(config.draft_model, "--draft-model", "draft_model")


def build_drafter(
    config: NodeConfig, role: Role, limits: StepLimits, engine: Engine, arena: HostArena
) -> ModelDrafter | None:
    """Load the draft model that the settings name; this takes seconds.

    None without one, and for a node that starts as a prefill node: it does not draft if it decodes
    later. Raises ConfigError for a draft model that cannot be used with the served one.
    """
    check_draft_settings(config)
    if config.speculative != "draft" or role is not Role.DECODE:
        return None
    try:
        own = with_local_model(replace(config, model=config.draft_model, max_model_len=0))
    except ConfigError as error:
        message = error.message.replace("--model", "--draft-model")
        raise ConfigError(message, param="draft_model") from error
    _check_vocabulary(config, own)
    try:
        draft_engine = build_engine(own, "cpu", limits)
    except ConfigError as error:
        raise ConfigError(
            f"--draft-model {config.draft_model}: {error.message}", param="draft_model"
        ) from error
    return _make_drafter(limits, engine, arena, draft_engine)


def _make_drafter(
    limits: StepLimits, engine: Engine, arena: HostArena, draft_engine: Engine
) -> ModelDrafter:
    layout = draft_engine.layout
    longest = min(engine.max_model_len, draft_engine.max_model_len)
    needed = limits.max_num_seqs * -(-longest // layout.block_size)
    most = arena.num_blocks * engine.layout.block_bytes // CACHE_SHARE // layout.block_bytes
    num_blocks = max(1, min(needed, most))
    num_bytes = num_blocks * layout.block_bytes
    available = measure_private_memory()
    if num_bytes > available.usable_bytes:
        raise ConfigError(
            f"the cache of the draft model needs {num_bytes} bytes, and {available.usable_bytes}"
            f" are usable ({available.limited_by}): lower --kv-memory, of which it is a share of"
            f" 1/{CACHE_SHARE}, or leave --speculative out",
            param="draft_model",
        )
    draft_engine.bind_cache(memoryview(mmap.mmap(-1, num_bytes)), num_blocks)
    draft_engine.warm_up(limits.max_batched_tokens)
    _log.info("draft model loaded", cache_bytes=num_bytes, blocks=num_blocks, max_model_len=longest)
    return ModelDrafter(
        _make_run_step(draft_engine),
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_model_len=draft_engine.max_model_len,
        vocab_size=min(engine.vocab_size, draft_engine.vocab_size),
        clock=monotonic_clock,
    )


def _make_run_step(draft_engine: Engine) -> RunDraftStep:
    def run_step(batch: StepBatch) -> Sequence[SliceResult] | None:
        try:
            return draft_engine.run(batch)
        except Exception as error:  # whatever it is, requests go on without drafts
            _log.error("draft model failed", **log.get_error_fields(error))
            return None

    return run_step


def _check_vocabulary(served: NodeConfig, draft: NodeConfig) -> None:
    """Raise ConfigError unless both tokenizers have the same tokens with the same ids.

    Models without a tokenizer.json are compared by the sizes of their vocabularies alone, when
    their tokens are used.
    """
    files = [find_tokenizer_file(each.model, each.engine) for each in (served, draft)]
    tokens = [None if file is None else _read_tokens(file) for file in files]
    if None not in tokens and tokens[0] != tokens[1]:
        raise ConfigError(
            f"--draft-model {served.draft_model} has another vocabulary than the model"
            f" {served.model}: choose a draft model with the same tokenizer",
            param="draft_model",
        )


def _read_tokens(file: Path) -> dict[str, Any]:
    """The vocabulary of a tokenizer.json, with its added tokens by id. Raises ConfigError."""
    try:
        tokenizer = msgspec.json.decode(file.read_bytes())
        added = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", ())}
        return {"vocab": tokenizer["model"]["vocab"], "added": added}
    except (OSError, msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no tokenizer ({error})", param="draft_model") from None

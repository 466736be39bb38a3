"""Baton serves large language models; this is its Python API, which is imported when it is used.

from baton import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline.llm import LLM as LLM
    from offline.outputs import CompletionOutput as CompletionOutput
    from offline.outputs import PromptsFailed as PromptsFailed
    from offline.outputs import RequestOutput as RequestOutput
    from offline.sampling_params import SamplingParams as SamplingParams

_MODULES = {
    "LLM": "offline.llm",
    "SamplingParams": "offline.sampling_params",
    "RequestOutput": "offline.outputs",
    "CompletionOutput": "offline.outputs",
    "PromptsFailed": "offline.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

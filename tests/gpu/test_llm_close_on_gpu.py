"""`LLM.close()` gives the memory of the device back at once, without Python's garbage collector."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.shared_memory.segment import DEFAULT_SEGMENT_FOLDER
from offline.llm import LLM
from offline.sampling_params import SamplingParams
from tests.models import build_model

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
CACHE_BYTES = 256 << 20


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def measure_used_bytes() -> int:
    """Memory of the device that is used, without what torch keeps for later: some of it is for
    cuBLAS, 32 MiB for each stream that an engine had."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture
def segment_folder() -> Iterator[str]:
    """On a tmpfs, whose memory the device can use."""
    with tempfile.TemporaryDirectory(dir=DEFAULT_SEGMENT_FOLDER) as folder:
        yield folder


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("kind", ["plain", "grammar"])
def test_closing_frees_the_memory_of_the_device(
    kind: str, tmp_path: Path, segment_folder: str
) -> None:
    model = build_model("llama", tmp_path)
    settings: dict[str, Any] = {"device": "cuda", "max_model_len": 256, "max_num_seqs": 4}
    settings |= {"kv_memory": "256MiB", "segment_dir": segment_folder}
    extra = {"structured_outputs": {"regex": "[a-z ]+"}} if kind == "grammar" else {}
    params = SamplingParams(temperature=0, max_tokens=4, extra_body=extra)
    used: list[int] = []
    for _ in range(3):
        llm = LLM(str(model), **settings)
        assert len(llm.generate(["The baton"] * 3, params, use_tqdm=False)) == 3
        in_use = torch.cuda.memory_allocated()
        llm.close()
        used.append(measure_used_bytes())
        assert in_use >= CACHE_BYTES
        assert torch.cuda.memory_allocated() < 1 << 20
    assert used[2] == used[1]  # the first one also loads kernels, for good

"""The same kernels and the same engine on an NVIDIA GPU, held against their CPU twins. Skipped,
loudly, without one."""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.shared_memory.segment import DEFAULT_SEGMENT_FOLDER
from baton.types import BlockIndex, SamplingParams
from kv_kernels import fused_prefill as causal_chunk
from kv_kernels.dispatch import kernels_for
from kv_kernels.reference import paged_attention
from kv_kernels.reference.paged_attention import AttentionContext, PagedCache, SlotMapping
from kv_kernels.triton import decode_attention as triton_decode
from kv_kernels.triton import kv_write as triton_write
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.model_loader import load_model_engine
from tests.models import FamilyName, build_model, find_stable_prompts
from tests.pool.model_node import check_reads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
# (kv_heads, heads per kv_head, dim, block_size, context lengths, window)
SHAPES = {
    "grouped": (2, 7, 64, 16, (5, 1024, 1, 777), None),
    "several splits": (8, 4, 128, 16, (4099, 2, 33), None),
    "odd sizes": (1, 1, 24, 6, (11,), None),
    "windowed": (8, 4, 128, 16, (4099, 600, 517, 516, 33), 517),
}


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_decode_equals_the_cpu_reference(shape: str, kind: str) -> None:
    kv_heads, group, dim, block_size, lengths, window = SHAPES[shape]
    dtype = getattr(torch, kind)
    generator = torch.Generator().manual_seed(0)
    widths = [-(-length // block_size) for length in lengths]
    arena = torch.randn(sum(widths), 2, 2, kv_heads, block_size, dim, generator=generator).to(dtype)
    order = torch.randperm(sum(widths), generator=generator)
    blocks = [part.numpy() for part in order.split(widths)]
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    wholes = [AttentionContext(blocks[i], lengths[i]) for i in longest_first]
    contexts = [paged_attention.clip_to_window(whole, window, 1, block_size) for whole in wholes]
    query = torch.randn(len(lengths), kv_heads * group, dim, generator=generator).to(dtype)
    exact = torch.zeros(query.shape)
    for part in paged_attention.plan_decode(
        PagedCache.from_arena(arena.float()), contexts, torch.float32
    ):
        part(query.float(), 1, exact)
    out = torch.full(query.shape, torch.nan, dtype=dtype, device="cuda")
    for part in triton_decode.plan_decode(PagedCache.from_arena(arena.cuda()), contexts, dtype):
        part(query.cuda(), 1, out)
    assert float((out.cpu().float() - exact).abs().max()) < TOLERANCE[kind]


@pytest.mark.parametrize("window", [None, 22])
@pytest.mark.parametrize("kind", TOLERANCE)
def test_prefill_chunk_may_start_at_any_offset(kind: str, window: int | None) -> None:
    """Masks are slices: their rows begin at any multiple of two bytes."""
    dtype = getattr(torch, kind)
    generator = torch.Generator().manual_seed(2)
    arena = torch.randn(6, 2, 2, 2, 16, 32, generator=generator).to(dtype)
    query = torch.randn(96, 4, 32, generator=generator).to(dtype)
    mask = paged_attention.causal_mask if window is None else paged_attention.window_mask
    reach = 96 if window is None else window
    blocks = torch.arange(6).numpy()
    for start in range(20):
        for count in (1, 16 - start % 16, 32 - start % 16, 61):
            context = AttentionContext(blocks, start + count)

            def attend(
                cache: torch.Tensor, queries: torch.Tensor, *, of: AttentionContext, count: int
            ) -> torch.Tensor:
                made = mask(reach, queries.dtype, queries.device)
                part = causal_chunk.plan_fused_prefill(
                    PagedCache.from_arena(cache), 0, count, of, made
                )
                out = torch.full(
                    queries.shape, torch.nan, dtype=queries.dtype, device=queries.device
                )
                part(queries, 1, out)
                return out.cpu().float()[:count]

            exact = attend(arena.float(), query.float(), of=context, count=count)
            there = attend(arena.cuda(), query.cuda(), of=context, count=count)
            assert float((there - exact).abs().max()) < TOLERANCE[kind], (start, count)


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("count", [300, 64, 1])
def test_a_chunk_in_one_call_equals_its_tiles(kind: str, group: int, count: int) -> None:
    dtype = getattr(torch, kind)
    generator = torch.Generator().manual_seed(3)
    cache = PagedCache.from_arena(
        torch.randn(20, 2, 2, 2, 16, 64, generator=generator).to(dtype).cuda()
    )
    query = torch.randn(count, 2 * group, 64, generator=generator).to(dtype).cuda()
    context, mask = (
        AttentionContext(torch.arange(19).numpy(), 300),
        paged_attention.causal_mask(300, dtype, query.device),
    )
    tiles, once = torch.empty_like(query), torch.empty_like(query)
    paged_attention.plan_prefill(cache, 0, count, context, mask)(query, 1, tiles)
    part = causal_chunk.plan_fused_prefill(cache, 0, count, context, mask)
    assert isinstance(part, causal_chunk.FusedPrefillAttention)
    part(query, 1, once)
    assert float((once.float() - tiles.float()).abs().max()) < TOLERANCE[kind]


def test_cudnn_attention_is_off_once_the_kernels_are_chosen() -> None:
    kernels_for(torch.device("cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("kind", TOLERANCE)
def test_kv_write_equals_the_cpu_reference(kind: str) -> None:
    dtype = getattr(torch, kind)
    generator = torch.Generator().manual_seed(1)
    arena = torch.randn(4, 2, 2, 2, 4, 12, generator=generator).to(dtype)
    twin = arena.clone()
    kv = torch.randn(3, 4, 12, generator=generator).to(dtype)
    slots = SlotMapping(torch.tensor([2, 0, 3]), torch.tensor([3, 0, 1]))
    there = arena.cuda()
    triton_write.write_kv(
        kv.cuda(),
        PagedCache.from_arena(there),
        1,
        SlotMapping(slots.blocks.cuda(), slots.offsets.cuda()),
    )
    paged_attention.write_kv(kv, PagedCache.from_arena(twin), 1, slots)
    assert torch.equal(there.cpu(), twin)


def generate(engine: BaseEngine, prompt: Sequence[int], count: int, chunk: int) -> list[int]:
    """Greedy tokens: the prompt in chunks, then one token a step, in blocks in reverse order."""
    size = engine.layout.block_size
    table = [BlockIndex(block) for block in reversed(range(-(-(len(prompt) + count) // size)))]
    params = SamplingParams(max_tokens=count, temperature=0.0)
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        end = min(len(tokens), start + chunk)
        spec = SampleSpec(params, 0, end) if end == len(tokens) else None
        (made,) = engine.run(
            StepBatch((SequenceSlice(SequenceId(0), tuple(tokens[start:end]), start, table, spec),))
        )
        start = end
        if made.token_id is not None:
            tokens.append(made.token_id)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3", "mixed", "linear"])
def test_gpu_tokens_equal_transformers(family: FamilyName, tmp_path: Path) -> None:
    folder = build_model(family, tmp_path)
    engine = load_model_engine(folder, dtype="float32", device="cuda")
    blocks = 64
    engine.bind_cache(memoryview(mmap.mmap(-1, blocks * engine.layout.block_bytes)), blocks)
    for wanted in find_stable_prompts(folder, (1, 17, 130, 257), 24):
        assert generate(engine, wanted.prompt, 24, chunk=64) == list(wanted.reference_tokens)


@pytest.fixture
def segments() -> Iterator[Path]:
    """A folder of a tmpfs: of other files the kernel lets nobody pin pages."""
    with tempfile.TemporaryDirectory(prefix="baton-test-", dir=DEFAULT_SEGMENT_FOLDER) as folder:
        yield Path(folder)


def test_blocks_of_the_shared_pool_are_copied_in(tmp_path: Path, segments: Path) -> None:
    folder = build_model("llama", tmp_path)
    (wanted,) = find_stable_prompts(folder, (80,), 12)
    check_reads(folder, segments, "cuda", wanted.prompt, wanted.reference_tokens, in_place=False)


def test_unpinnable_memory_is_reported_with_a_fix(tmp_path: Path) -> None:
    engine = load_model_engine(build_model("llama", tmp_path), dtype="float32", device="cuda")
    size = 64 * engine.layout.block_bytes
    file = tmp_path / "mapped"
    file.write_bytes(bytes(size))
    with (
        file.open("r+b") as opened,
        pytest.raises(ConfigError, match="choose one with --segment-dir"),
    ):
        engine.bind_cache(memoryview(mmap.mmap(opened.fileno(), size)), 64)

"""What the cores of a machine reach at one thing alone: reading memory, and matrix products."""

import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.device.step_bounds import ProductShape, StepRates
from benchmarks.device.timing import time_call
from kv_kernels.native.native_library import NativeLibrary, load_library

_HUGE_PAGE = 2 << 20
_PRODUCT_ROUNDS = 3
_LONG_PRODUCT_SECONDS = 1.0
PRECISIONS = ("bfloat16", "int8", "float32")


@dataclass(frozen=True, slots=True)
class RateSizes:
    """What the rates are measured with."""

    read_bytes: int = 512 << 20  # of all threads: more than most CPU caches hold
    product_tokens: tuple[int, ...] = (512, 2048)
    square: int = 2048  # rows and columns of a weight that is measured beside those of the model


SIZES = RateSizes()


@dataclass(frozen=True, slots=True)
class CpuRates:
    """Rates of the threads together, per second."""

    read_bytes: float
    products: dict[str, float]  # operations, by precision

    def of_steps(self, precision: str) -> StepRates:
        """The rates of steps whose products are of this precision.

        Products of bf16 and int8 can also be computed in fp32, which some CPUs multiply faster.
        """
        usable = {precision, "float32"}
        return StepRates(self.read_bytes, max(self.products[name] for name in usable))


class MemoryReader:
    """Reads memory on some threads at once, each in two streams.

    The memory lies in huge pages if the system grants them, as weights do that are packed for
    speed. Without the native library, scalar products of torch read it, which are slower.
    """

    def __init__(self, threads: int, total_bytes: int) -> None:
        each = max(total_bytes // threads, _HUGE_PAGE)
        areas = [allocate_huge_page_buffer(each) for _ in range(threads)]
        self._reads = [_plan_read(area) for area in areas]
        self._bytes = sum(area.nbytes for area in areas)

    def measure_bandwidth(self) -> float:
        """Return the bytes per second of one pass over the memory."""
        torch.set_num_threads(1)  # of each thread below
        ready, times = threading.Barrier(len(self._reads)), list[float]()

        def read(once: Callable[[], object]) -> None:
            ready.wait()
            times.append(time.perf_counter())
            once()  # releases Python's lock
            times.append(time.perf_counter())

        readers = [threading.Thread(target=read, args=(once,)) for once in self._reads]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return self._bytes / (max(times) - min(times))


def describe_reading() -> str:
    """Say how a `MemoryReader` reads."""
    if isinstance(load_library(), NativeLibrary):
        return "two streams a core"
    return "by torch.dot, which is slower than what is possible"


def allocate_huge_page_buffer(size: int) -> torch.Tensor:
    """Return written memory, in huge pages where that is possible."""
    # Linux rarely backs shared anonymous memory, which is mmap's default, with huge pages.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = mmap.mmap(-1, size // _HUGE_PAGE * _HUGE_PAGE, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.float32).fill_(1e-3)


def _plan_read(area: torch.Tensor) -> Callable[[], object]:
    """Return a call that reads the area as two streams at once."""
    library = load_library()
    if isinstance(library, NativeLibrary):
        read = library.functions.kvn_read_two_streams
        return lambda: read(area.data_ptr(), area.nbytes)
    left, right = area.chunk(2)
    return lambda: torch.dot(left, right)


def measure_product_rates(
    threads: int, shapes: Sequence[ProductShape], sizes: RateSizes
) -> dict[str, float]:
    """Measure the rate of products of each precision, as the best of a few.

    `shapes` are the products of the model: one of them may be faster than a square one.
    """
    weights = (ProductShape("square", sizes.square, sizes.square), *shapes)
    return {
        precision: measure_product_rate(threads, precision, weights, sizes.product_tokens)
        for precision in PRECISIONS
    }


def measure_product_rate(
    threads: int, precision: str, shapes: Iterable[ProductShape], token_counts: Iterable[int]
) -> float:
    """Return torch's highest rate, in operations per second, at matrix products of these shapes.

    `token_counts` ascend. A product that takes long is measured once, and no larger one after it:
    torch multiplies int8 on CPUs without VNNI at a hundredth of what it reaches with it.
    """
    torch.set_num_threads(threads)
    best = 0.0
    for shape in shapes:
        for tokens in token_counts:
            product = _plan_product(precision, tokens, shape)
            seconds = time_call(product)
            is_long = seconds > _LONG_PRODUCT_SECONDS
            if not is_long:
                seconds = min(time_call(product) for _ in range(_PRODUCT_ROUNDS))
            best = max(best, 2 * tokens * shape.elements / seconds)
            if is_long:
                break
    return best


def _plan_product(precision: str, tokens: int, shape: ProductShape) -> Callable[[], object]:
    if precision == "int8":
        left = torch.randint(-127, 128, (tokens, shape.columns), dtype=torch.int8)
        right = torch.randint(-127, 128, (shape.rows, shape.columns), dtype=torch.int8).T
        return lambda: torch._int_mm(left, right)
    dtype = getattr(torch, precision)
    inputs, weight = (torch.randn(n, shape.columns).to(dtype) for n in (tokens, shape.rows))
    return lambda: torch.nn.functional.linear(inputs, weight)

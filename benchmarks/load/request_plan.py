"""What a load generator will send, and when: drawn before the run begins, from a seed. Pure."""

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money"
).split()


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of lengths in tokens, each between 1 and `max_tokens`.

    `fixed`: always `low_or_median`. `uniform`: integers from `low_or_median` to `high_or_sigma`.
    `lognormal`: median `low_or_median`, and `high_or_sigma` the standard deviation of the
    logarithm.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low_or_median: float
    high_or_sigma: float = 0.0
    max_tokens: int = 1 << 20

    def sample(self, random_source: random.Random) -> int:
        match self.kind:
            case "fixed":
                drawn = self.low_or_median
            case "uniform":
                drawn = random_source.randint(round(self.low_or_median), round(self.high_or_sigma))
            case "lognormal":
                drawn = random_source.lognormvariate(
                    math.log(self.low_or_median), self.high_or_sigma
                )
        return max(1, min(self.max_tokens, round(drawn)))


def parse_lengths(text: str) -> LengthDistribution:
    """`512`, `uniform:100:800`, `lognormal:256:0.8` or `lognormal:256:0.8:2048` (the last is the
    most).

    Raises ValueError naming the text and the forms.
    """
    words = text.split(":")
    try:
        match words:
            case [fixed]:
                found = LengthDistribution("fixed", int(fixed))
            case ["uniform", low, high]:
                found = LengthDistribution("uniform", int(low), int(high))
            case ["lognormal", median, sigma]:
                found = LengthDistribution("lognormal", float(median), float(sigma))
            case ["lognormal", median, sigma, most]:
                found = LengthDistribution("lognormal", float(median), float(sigma), int(most))
            case _:
                raise ValueError
        if (
            found.low_or_median < 1
            or found.max_tokens < 1
            or found.high_or_sigma < 0
            or (found.kind == "uniform" and found.high_or_sigma < found.low_or_median)
        ):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is not N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"
        ) from None
    return found


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each sending its next request when its last one has ended."""

    concurrency: int

    def __str__(self) -> str:
        return f"c{self.concurrency}"


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Requests arrive by themselves, `requests_per_second` a second on average, however slow the
    answers are."""

    requests_per_second: float

    def __str__(self) -> str:
        return f"r{self.requests_per_second:g}"


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt made of blocks of `block_tokens` tokens: equal ids are equal blocks, different ids
    differ within their first tokens. `max_block_id` is the highest id of the run."""

    salt: str
    block_ids: tuple[int, ...]
    block_tokens: int
    max_block_id: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send, `start_seconds` seconds after the start (always 0 in a closed loop). Its
    prompt is drawn from `salt` and `seed`, or is what `block_prompt` says."""

    start_seconds: float
    prompt_tokens: int
    output_tokens: int
    seed: int
    block_prompt: BlockPrompt | None = None
    salt: str = ""


def plan_requests(
    load: ClosedLoop | PoissonArrivals,
    prompt: LengthDistribution,
    output: LengthDistribution,
    count: int,
    seed: str,
) -> list[PlannedRequest]:
    """`count` requests. The same seed gives the same plan; every request has a prompt of its
    own."""
    source = random.Random(seed)
    times = (
        poisson_times(load.requests_per_second, source)
        if isinstance(load, PoissonArrivals)
        else iter(lambda: 0.0, None)
    )
    return [
        PlannedRequest(at, prompt.sample(source), output.sample(source), source.getrandbits(63))
        for _, at in zip(range(count), times, strict=False)
    ]


def poisson_times(rate: float, source: random.Random) -> Iterator[float]:
    """Moments of a Poisson process of `rate` a second, without end."""
    now = 0.0
    while True:
        now += source.expovariate(rate)
        yield now


def make_token_prompt(request: PlannedRequest, vocabulary: int) -> list[int]:
    """Random token ids. Low ids are left out: special tokens tend to live there. Raises ValueError
    for shared blocks that are too short to tell themselves apart."""
    ids = range(min(16, vocabulary // 2), vocabulary)
    if request.block_prompt is None:
        return _random_source(request).choices(ids, k=request.prompt_tokens)
    shared = request.block_prompt
    found = [
        token
        for block in shared.block_ids
        for token in _block_token_ids(
            shared.salt, block, shared.block_tokens, shared.max_block_id, ids
        )
    ]
    return found[: request.prompt_tokens]


@functools.lru_cache(maxsize=8192)
def _block_token_ids(salt: str, block: int, tokens: int, most: int, ids: range) -> tuple[int, ...]:
    """The block's id in the digits that there are, then noise."""
    digits: list[int] = []
    while most > 0 or not digits:
        digits.append(ids[block % len(ids)])
        block, most = block // len(ids), most // len(ids)
    if len(digits) > tokens:
        raise ValueError(
            f"a block of {tokens} tokens cannot hold its id, which needs {len(digits)}: scale lengths less"
        )
    noise = random.Random(f"{salt}/{digits}").choices(ids, k=tokens - len(digits))
    return (*digits, *noise)


def _random_source(request: PlannedRequest) -> random.Random:
    return random.Random(f"{request.salt}/{request.seed}" if request.salt else request.seed)


def make_text_prompt(request: PlannedRequest) -> str:
    """Random words, about one token each, for a server that takes no token ids."""
    if request.block_prompt is None:
        return " ".join(_random_source(request).choices(_WORDS, k=request.prompt_tokens))
    shared = request.block_prompt
    words: list[str] = []
    for block in shared.block_ids:
        noise = random.Random(f"{shared.salt}/{block}")
        words += [f"part-{block}", *noise.choices(_WORDS, k=shared.block_tokens - 1)]
    return " ".join(words[: request.prompt_tokens])

"""What a load generator will send, and when: drawn from a seed before the run begins. Pure."""

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money"
).split()


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of lengths in tokens."""

    kind: Literal["fixed", "uniform", "lognormal"]
    # fixed: the length; uniform: the least; lognormal: the median
    low_or_median: float
    # uniform: the greatest; lognormal: the standard deviation of the logarithm
    high_or_sigma: float = 0.0
    max_tokens: int = 1 << 20  # samples are cut to 1..max_tokens

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
    """Parse `512`, `uniform:100:800`, `lognormal:256:0.8` or `lognormal:256:0.8:2048`.

    The last number of the last form is the maximum. Raises ValueError that names the text and the
    forms.
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
    """`concurrency` clients, each of which sends its next request when its last one has ended."""

    concurrency: int

    def __str__(self) -> str:
        return f"c{self.concurrency}"


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """A Poisson process of requests, which does not depend on how slow the answers are."""

    requests_per_second: float

    def __str__(self) -> str:
        return f"r{self.requests_per_second:g}"


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt made of numbered blocks.

    Equal ids are equal blocks; different ids differ within their first tokens.
    """

    salt: str
    block_ids: tuple[int, ...]
    block_tokens: int  # of each block
    max_block_id: int  # of the whole run


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send."""

    start_seconds: float  # after the start; always 0 in a closed loop
    prompt_tokens: int
    output_tokens: int
    seed: int  # with `salt`, determines the random prompt
    block_prompt: BlockPrompt | None = None  # in place of a random prompt
    salt: str = ""


def plan_requests(
    load: ClosedLoop | PoissonArrivals,
    prompt: LengthDistribution,
    output: LengthDistribution,
    count: int,
    seed: str,
) -> list[PlannedRequest]:
    """Return `count` requests with distinct prompts; the same seed gives the same plan."""
    random_source = random.Random(seed)
    times = (
        poisson_times(load.requests_per_second, random_source)
        if isinstance(load, PoissonArrivals)
        else iter(lambda: 0.0, None)
    )
    return [
        PlannedRequest(
            start,
            prompt.sample(random_source),
            output.sample(random_source),
            random_source.getrandbits(63),
        )
        for _, start in zip(range(count), times, strict=False)
    ]


def poisson_times(rate: float, random_source: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process with `rate` events per second, without end."""
    now = 0.0
    while True:
        now += random_source.expovariate(rate)
        yield now


def make_token_prompt(request: PlannedRequest, vocabulary: int) -> list[int]:
    """Return random token ids. Low ids are left out, since special tokens tend to have them.

    Raises ValueError for shared blocks that are too short to contain their id.
    """
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
def _block_token_ids(
    salt: str, block: int, tokens: int, max_id: int, ids: range
) -> tuple[int, ...]:
    """Return the block's id as digits in the base of the vocabulary, followed by noise."""
    digits: list[int] = []
    while max_id > 0 or not digits:
        digits.append(ids[block % len(ids)])
        block, max_id = block // len(ids), max_id // len(ids)
    if len(digits) > tokens:
        raise ValueError(
            f"a block of {tokens} tokens cannot hold its id, which needs {len(digits)}: "
            "scale lengths less"
        )
    noise = random.Random(f"{salt}/{digits}").choices(ids, k=tokens - len(digits))
    return (*digits, *noise)


def _random_source(request: PlannedRequest) -> random.Random:
    return random.Random(f"{request.salt}/{request.seed}" if request.salt else request.seed)


def make_text_prompt(request: PlannedRequest) -> str:
    """Return random words, about one token each, for a server that takes no token ids."""
    if request.block_prompt is None:
        return " ".join(_random_source(request).choices(_WORDS, k=request.prompt_tokens))
    shared = request.block_prompt
    words: list[str] = []
    for block in shared.block_ids:
        noise = random.Random(f"{shared.salt}/{block}")
        words += [f"part-{block}", *noise.choices(_WORDS, k=shared.block_tokens - 1)]
    return " ".join(words[: request.prompt_tokens])

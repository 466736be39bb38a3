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
class Lengths:
    """A distribution of lengths in tokens, each between 1 and `most`.

    `fixed`: always `a`. `uniform`: integers from `a` to `b`. `lognormal`: median `a`, and `b` the standard deviation of
    the logarithm.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    a: float
    b: float = 0.0
    most: int = 1 << 20

    def draw(self, random_source: random.Random) -> int:
        match self.kind:
            case "fixed":
                drawn = self.a
            case "uniform":
                drawn = random_source.randint(round(self.a), round(self.b))
            case "lognormal":
                drawn = random_source.lognormvariate(math.log(self.a), self.b)
        return max(1, min(self.most, round(drawn)))


def parse_lengths(text: str) -> Lengths:
    """`512`, `uniform:100:800`, `lognormal:256:0.8` or `lognormal:256:0.8:2048` (the last is the most).

    Raises ValueError naming the text and the forms.
    """
    words = text.split(":")
    try:
        match words:
            case [fixed]:
                found = Lengths("fixed", int(fixed))
            case ["uniform", low, high]:
                found = Lengths("uniform", int(low), int(high))
            case ["lognormal", median, sigma]:
                found = Lengths("lognormal", float(median), float(sigma))
            case ["lognormal", median, sigma, most]:
                found = Lengths("lognormal", float(median), float(sigma), int(most))
            case _:
                raise ValueError
        if found.a < 1 or found.most < 1 or found.b < 0 or (found.kind == "uniform" and found.b < found.a):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is not N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]") from None
    return found


@dataclass(frozen=True, slots=True)
class Closed:
    """`concurrency` clients, each sending its next request when its last one has ended."""

    concurrency: int

    def __str__(self) -> str:
        return f"c{self.concurrency}"


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests arrive by themselves, `rate` a second on average, however slow the answers are."""

    rate: float

    def __str__(self) -> str:
        return f"r{self.rate:g}"


@dataclass(frozen=True, slots=True)
class Shared:
    """A prompt made of blocks of `tokens` tokens: equal ids are equal blocks, different ids differ within their first
    tokens. `most` is the highest id of the run."""

    salt: str
    blocks: tuple[int, ...]
    tokens: int
    most: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send, `at` seconds after the start (always 0 in a closed loop). Its prompt is drawn from `salt`
    and `seed`, or is what `shared` says."""

    at: float
    prompt_tokens: int
    output_tokens: int
    seed: int
    shared: Shared | None = None
    salt: str = ""


def plan(load: Closed | Poisson, prompt: Lengths, output: Lengths, count: int, seed: str) -> list[Planned]:
    """`count` requests. The same seed gives the same plan; every request has a prompt of its own."""
    source = random.Random(seed)
    times = arrivals(load.rate, source) if isinstance(load, Poisson) else iter(lambda: 0.0, None)
    return [
        Planned(at, prompt.draw(source), output.draw(source), source.getrandbits(63))
        for _, at in zip(range(count), times, strict=False)
    ]


def arrivals(rate: float, source: random.Random) -> Iterator[float]:
    """Moments of a Poisson process of `rate` a second, without end."""
    now = 0.0
    while True:
        now += source.expovariate(rate)
        yield now


def token_prompt(request: Planned, vocabulary: int) -> list[int]:
    """Random token ids. Low ids are left out: special tokens tend to live there. Raises ValueError for shared blocks
    that are too short to tell themselves apart."""
    ids = range(min(16, vocabulary // 2), vocabulary)
    if request.shared is None:
        return _source(request).choices(ids, k=request.prompt_tokens)
    shared = request.shared
    found = [token for block in shared.blocks for token in _block(shared.salt, block, shared.tokens, shared.most, ids)]
    return found[: request.prompt_tokens]


@functools.lru_cache(maxsize=8192)
def _block(salt: str, block: int, tokens: int, most: int, ids: range) -> tuple[int, ...]:
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


def _source(request: Planned) -> random.Random:
    return random.Random(f"{request.salt}/{request.seed}" if request.salt else request.seed)


def text_prompt(request: Planned) -> str:
    """Random words, about one token each, for a server that takes no token ids."""
    if request.shared is None:
        return " ".join(_source(request).choices(_WORDS, k=request.prompt_tokens))
    shared = request.shared
    words: list[str] = []
    for block in shared.blocks:
        noise = random.Random(f"{shared.salt}/{block}")
        words += [f"part-{block}", *noise.choices(_WORDS, k=shared.tokens - 1)]
    return " ".join(words[: request.prompt_tokens])

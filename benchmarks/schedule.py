"""What a load generator will send, and when: drawn before the run begins, from a seed. Pure."""

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


Load = Closed | Poisson


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send, `at` seconds after the start (always 0 in a closed loop)."""

    at: float
    prompt_tokens: int
    output_tokens: int
    seed: int  # of its prompt


def plan(load: Load, prompt: Lengths, output: Lengths, count: int, seed: str) -> list[Planned]:
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
    """Random token ids. Low ids are left out: special tokens tend to live there."""
    source = random.Random(request.seed)
    lowest = min(16, vocabulary // 2)
    return [source.randrange(lowest, vocabulary) for _ in range(request.prompt_tokens)]


def text_prompt(request: Planned) -> str:
    """Random words, about one token each, for a server that takes no token ids."""
    source = random.Random(request.seed)
    return " ".join(source.choice(_WORDS) for _ in range(request.prompt_tokens))

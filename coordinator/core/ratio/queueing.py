"""How long the next one waits for one of several equal places, also where work comes faster than it
can be done.

A wait longer than x, `seconds` after an empty start:

    P(W > x) = P(every place is taken) P(backlog > x)

    all taken   Erlang's C formula; certain where the load is above 1
    backlog     a reflected Brownian motion with drift `load - 1` and variance `service (ca2 + cs2) / places` a second
                (Harrison, "Brownian Motion and Stochastic Flow Systems", 1985): in closed form at any moment

For a load below 1 and long after the start this is the formula of Allen and Cunneen for G/G/m
queues (Bolch, Greiner, de Meer, Trivedi, "Queueing Networks and Markov Chains", 2006, 6.3.4). Above
1 it is the line that grows with time.
"""

import math

_TIME_POINTS = 6  # within the horizon, at which a wait is looked at
_NEGLIGIBLE = 1e-6
_MAX_ERLANG_SERVERS = 4096  # places; with more the formula gives no other answer


class MultiServerQueue:
    """`load` is work that comes over what all places can do; `service` in seconds of one place;
    `arrivals` and `services` are squared coefficients of variation (of arrivals: the variance of
    their number over its mean). Looked at are those who come within `horizon` seconds of an empty
    start."""

    def __init__(
        self,
        places: int,
        load: float,
        service: float,
        arrivals: float,
        services: float,
        horizon: float,
    ) -> None:
        self.load = load
        self._all_busy = erlang_c(places, load)
        self._drift, self._variance = load - 1.0, service * (arrivals + services) / places
        self._time_points = [
            horizon * (place + 0.5) / _TIME_POINTS for place in range(_TIME_POINTS)
        ]

    def wait_tail(self, seconds: float) -> float:
        """Probability."""
        if seconds < 0.0:
            return 1.0
        if self._all_busy < _NEGLIGIBLE:
            return 0.0
        tails = (
            backlog_tail(seconds, moment, self._drift, self._variance)
            for moment in self._time_points
        )
        return self._all_busy * math.fsum(tails) / _TIME_POINTS


def erlang_c(places: int, load: float) -> float:
    """The probability that all are taken, from Erlang's B by its recursion."""
    if load >= 1.0:
        return 1.0
    places = min(places, _MAX_ERLANG_SERVERS)
    offered, blocked = load * places, 1.0
    for number in range(1, places + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1.0 - load * (1.0 - blocked))


def backlog_tail(x: float, seconds: float, drift: float, variance: float) -> float:
    """The probability that a Brownian motion of that drift and variance, held at or above 0 and
    begun there, is above `x` after so many seconds."""
    spread = math.sqrt(variance * seconds)
    if spread == 0.0:
        return float(drift * seconds > x)
    direct = normal_tail((x - drift * seconds) / spread)
    far = (x + drift * seconds) / spread
    if far > 6.0:  # the product of a huge and a tiny factor: its limit
        exponent = -((x - drift * seconds) ** 2) / (2.0 * variance * seconds)
        reflected = math.exp(exponent) / (far * math.sqrt(2.0 * math.pi))
    else:
        reflected = math.exp(min(2.0 * drift * x / variance, 700.0)) * normal_tail(far)
    return min(1.0, direct + reflected)


def normal_tail(z: float) -> float:
    """Of the standard normal distribution."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))

"""Waiting times in a G/G/m queue that starts empty, also when it is overloaded.

The formulas behind `split_forecast`: rates and variances in, a distribution of waiting times out.
They know no single request; `split_replay` plays requests one by one.

The probability of a wait longer than x, some seconds after the start:

    P(W > x) = P(every server is busy) P(backlog > x)

    all busy    Erlang's C formula; certain above a load of 1
    backlog     a reflected Brownian motion with drift `load - 1` and variance
                `service (ca2 + cs2) / servers` a second, in closed form at any moment
                (Harrison, "Brownian Motion and Stochastic Flow Systems", 1985)

For a load below 1 and long after the start this is the formula of Allen and Cunneen for G/G/m
queues (Bolch, Greiner, de Meer, Trivedi, "Queueing Networks and Markov Chains", 2006, 6.3.4). Above
1 the backlog grows with time.
"""

import math

_TIME_POINTS = 6  # moments within the horizon at which the wait is evaluated
_NEGLIGIBLE = 1e-6
_MAX_ERLANG_SERVERS = 4096  # more servers do not change the result


class MultiServerQueue:
    """A queue with `places` servers.

    `load` is the work that arrives over what all servers can do; `service` is seconds on one
    server; `arrivals` and `services` are squared coefficients of variation (of arrivals: the
    variance of their number over its mean). Waits are averaged over arrivals within `horizon`
    seconds of the start.
    """

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
        """Return the probability of a longer wait."""
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
    """Return the probability that all servers are busy, by the recursion of Erlang's B formula."""
    if load >= 1.0:
        return 1.0
    places = min(places, _MAX_ERLANG_SERVERS)
    offered, blocked = load * places, 1.0
    for number in range(1, places + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1.0 - load * (1.0 - blocked))


def backlog_tail(x: float, seconds: float, drift: float, variance: float) -> float:
    """Return the probability that a reflected Brownian motion that starts at 0 is above `x`."""
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
    """Return the upper tail of the standard normal distribution."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))

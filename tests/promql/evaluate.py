"""The part of PromQL that our alerts and dashboards use, evaluated over a Store.

promql-parser reads the expressions; here they are computed as Prometheus does it
(`promql/functions.go` and `promql/engine.go` of version 2.45). What is not in that part raises
NotImplementedError, so that nothing is passed by.
"""

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import promql_parser as ast

from tests.promql.sample_store import LOOKBACK_SECONDS, Labels, Point, SampleStore, sorted_labels

Vector = dict[Labels, float]  # without the metric's name
Value = Vector | float

_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda one, other: (
        one / other if other else math.nan if not one or math.isnan(one) else math.inf
    ),
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


def evaluate(expression: str, store: SampleStore, at: float) -> Vector:
    """The instant vector of an expression, at a time in seconds."""
    value = _evaluate(ast.parse(expression), store, at)
    return value if isinstance(value, dict) else {(): value}


def _evaluate(node: Any, store: SampleStore, at: float) -> Value:
    match node:
        case ast.NumberLiteral():
            return float(node.val)
        case ast.ParenExpr():
            return _evaluate(node.expr, store, at)
        case ast.VectorSelector():
            return _instant(node, store, at)
        case ast.Call():
            return _call(node, store, at)
        case ast.AggregateExpr():
            return _aggregate(node, _vector(node.expr, store, at))
        case ast.BinaryExpr():
            return _binary(node, _evaluate(node.lhs, store, at), _evaluate(node.rhs, store, at))
    raise NotImplementedError(f"{type(node).__name__} is not evaluated here")


def _vector(node: Any, store: SampleStore, at: float) -> Vector:
    value = _evaluate(node, store, at)
    assert isinstance(value, dict), "a scalar stands where a vector is needed"
    return value


# selectors


def _selected(selector: Any, store: SampleStore) -> Iterable[tuple[Labels, list[Point]]]:
    for labels, points in store.iter_points(selector.name):
        if all(
            _matches(matcher, dict(labels).get(matcher.name, ""))
            for matcher in selector.matchers.matchers
        ):
            yield labels, points


def _matches(matcher: Any, value: str) -> bool:
    kind = str(matcher.op).rpartition(".")[2]
    if kind in ("Equal", "NotEqual"):
        return bool(value == matcher.value) == (kind == "Equal")
    return (re.fullmatch(matcher.value, value) is not None) == (kind == "Re")


def _instant(selector: Any, store: SampleStore, at: float) -> Vector:
    found: Vector = {}
    for labels, points in _selected(selector, store):
        last = [point for point in points if at - LOOKBACK_SECONDS < point[0] <= at][-1:]
        if last:
            found[labels] = last[0][1]
    return found


# functions


def _call(node: Any, store: SampleStore, at: float) -> Vector:
    arguments = node.args
    match node.func.name:
        case "rate" | "increase" as name:
            window = arguments[0].range.total_seconds()
            found: Vector = {}
            for labels, points in _selected(arguments[0].vector_selector, store):
                inside = [point for point in points if at - window <= point[0] <= at]
                if len(inside) >= 2:
                    grown = _extrapolated_increase(inside, at - window, at)
                    found[labels] = grown / window if name == "rate" else grown
            return found
        case "absent":
            known = {
                each.name: each.value
                for each in arguments[0].matchers.matchers
                if str(each.op).endswith(".Equal")
            }
            return {} if _vector(arguments[0], store, at) else {sorted_labels(known): 1.0}
        case "histogram_quantile":
            wanted = _evaluate(arguments[0], store, at)
            assert isinstance(wanted, float)
            return _histogram_quantile(wanted, _vector(arguments[1], store, at))
    raise NotImplementedError(f"{node.func.name} is not evaluated here")


def _extrapolated_increase(points: Sequence[Point], begin: float, end: float) -> float:
    """`extrapolatedRate`: resets of the counter are added back, and the ends of the window are
    reached by extrapolation, as far as the samples' usual distance and the counter's zero allow."""
    (first, first_value), (last, last_value) = points[0], points[-1]
    result = last_value - first_value
    result += sum(one[1] for one, other in pairwise(points) if other[1] < one[1])
    sampled = last - first
    distance = sampled / (len(points) - 1)
    before, after = first - begin, end - last
    if result > 0 and first_value >= 0:
        before = min(before, sampled * first_value / result)
    covered = sampled
    for gap in (before, after):
        covered += gap if gap < distance * 1.1 else distance / 2
    return result * covered / sampled


def _histogram_quantile(wanted: float, buckets: Vector) -> Vector:
    """`bucketQuantile`, of classic histograms."""
    series: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        bound = dict(labels)["le"]
        rest = tuple(pair for pair in labels if pair[0] != "le")
        series[rest].append((math.inf if bound == "+Inf" else float(bound), count))
    return {labels: _quantile(wanted, sorted(counts)) for labels, counts in series.items()}


def _quantile(wanted: float, counts: Sequence[tuple[float, float]]) -> float:
    total = counts[-1][1]
    if counts[-1][0] != math.inf or len(counts) < 2 or not total:
        return math.nan
    rank = wanted * total
    place = next(number for number, (_, count) in enumerate(counts) if count >= rank)
    if place == len(counts) - 1:
        return counts[-2][0]
    low, below = counts[place - 1] if place else (0.0, 0.0)
    high, upto = counts[place]
    return low + (high - low) * ((rank - below) / (upto - below) if upto > below else 0.0)


# operators


def _aggregate(node: Any, vector: Vector) -> Vector:
    if str(node.op) != "sum" or (node.modifier and node.modifier.type != ast.AggModifierType.By):
        raise NotImplementedError(f"{node.prettify()} is not evaluated here")
    kept = set(node.modifier.labels) if node.modifier else set()
    found: Vector = defaultdict(float)
    for labels, value in vector.items():
        found[tuple(pair for pair in labels if pair[0] in kept)] += value
    return dict(found)


def _binary(node: Any, left: Value, right: Value) -> Value:
    kind = str(node.op)
    if kind not in _ARITHMETIC and kind not in _COMPARISONS:
        raise NotImplementedError(f"{kind} is not evaluated here")
    if isinstance(left, float):
        raise NotImplementedError(f"a scalar on the left is not evaluated here: {node.prettify()}")
    others = (lambda _: right) if isinstance(right, float) else _matching(node, left, right)
    found: Vector = {}
    for labels, value in left.items():
        other = others(labels)
        if other is None:
            continue
        if kind in _ARITHMETIC:
            found[labels] = _ARITHMETIC[kind](value, other)
        elif _COMPARISONS[kind](value, other):
            found[labels] = value
    return found


def _matching(node: Any, left: Vector, right: Vector) -> Callable[[Labels], float | None]:
    """The value on the right that belongs to labels on the left: one to one, or many to one with
    `group_left`."""
    modifier = node.modifier
    rule = modifier.matching if modifier else None
    including = rule is not None and rule.type == ast.LabelModifierType.Include
    named = set(rule.labels) if rule else set()

    def key(labels: Labels) -> Labels:
        return tuple(pair for pair in labels if (pair[0] in named) == including)

    sides = {key(labels): value for labels, value in right.items()}
    assert len(sides) == len(right), f"many on the right match one on the left: {node.prettify()}"
    grouped = modifier is not None and modifier.card == ast.VectorMatchCardinality.ManyToOne
    assert grouped or len({key(labels) for labels in left}) == len(left), (
        f"group_left lacks: {node.prettify()}"
    )
    return lambda labels: sides.get(key(labels))

"""What a placement costs, in a form that is small enough to be no figure."""

from benchmarks.routing import DECISION_LIMIT, measure_routing


def test_every_figure_is_measured_on_a_small_cluster() -> None:
    rows = {
        row.name: row
        for row in measure_routing(nodes=2, blocks=5120, depth=4, decisions=4, command="here")
    }
    assert list(rows) == [
        "routing/decision",
        "routing/auto",
        "routing/request",
        "routing/event",
        "routing/growth_16x_blocks",
        "routing/growth_16x_nodes",
    ]
    assert all(row.value > 0 for row in rows.values())
    assert rows["routing/decision"].limit == rows["routing/auto"].limit == DECISION_LIMIT

"""What nodes, paths and errors are called is shown as it is, and never read as markup."""

import io

import pytest
from rich.console import Console, RenderableType

from baton.cli import audit, status
from baton.cli.views import explanation as waterfall
from baton.cli.views import top_table as top_view
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2

NAME, PATH = "n[/b]", "[/dev/shm/x]"


def render_to_text(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def answer(*, ready: bool) -> pb.StatusResponse:
    ratio = pb.Ratio(
        prefill=1, decode=1, has_target=True, switches=[pb.RoleSwitch(node=NAME, phase="draining")]
    )
    stats = pb.NodeStats(device=pb.DeviceReport(device="cuda:0", name=PATH))
    nodes = [pb.NodeStatus(name=NAME, role="decode", stats=stats)]
    return pb.StatusResponse(
        ready=ready,
        reason=f"cannot open {PATH}",
        model=PATH,
        nodes=nodes,
        ratio=ratio,
        notices=[PATH],
    )


@pytest.mark.parametrize("ready", [True, False])
def test_status_and_top(ready: bool, capsys: pytest.CaptureFixture[str]) -> None:
    status._print_table(answer(ready=ready))
    for shown in (
        capsys.readouterr().out,
        render_to_text(top_view.render_top(answer(ready=ready), top_view.ClusterRates())),
    ):
        assert NAME in shown
        assert PATH in shown


def test_audit(capsys: pytest.CaptureFixture[str]) -> None:
    owner = common_pb2.LedgerOwner(owner=PATH, state="in_use", blocks=1)
    audit._print_table(
        pb.LedgerResponse(ledgers=[common_pb2.Ledger(node=NAME, owners=[owner])]),
        [f"{NAME}: {PATH}"],
    )
    shown = capsys.readouterr().out
    assert shown.count(NAME) == 3
    assert shown.count(PATH) == 2


def test_explain() -> None:
    attempt = pb.AttemptReport(
        number=1,
        prefill_node=NAME,
        decode_node=NAME,
        considered=[pb.Candidate(node=NAME, role="decode")],
    )
    answer = pb.ExplainResponse(
        request_id="r",
        state="finished",
        attempts=[attempt],
        others=[pb.ExplainResponse(request_id="s")],
    )
    answer.timeline.prefill_node = NAME
    assert render_to_text(waterfall.render_explanation(answer)).count(NAME) == 4

"""The documentation names what there is: every reference resolves, and every state, message, frame,
error, setting, metric, failpoint and dependency has its place."""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from baton.cli.common.unavailable import UNAVAILABLE_COMMANDS as UNBUILT
from baton.cli.main import app
from baton.cluster_link.messages import PROTOCOL_VERSION
from baton.config.settings import FIELD_NAMES, Config
from baton.errors import ERRORS_BY_CODE, HandoffFailed, NodeFailed
from baton.pb import cluster_pb2
from baton.process.failpoints import KNOWN_FAILPOINTS
from benchmarks.__main__ import BENCHMARK_MODULES as BENCHMARKS
from benchmarks.__main__ import UNAVAILABLE_BENCHMARKS as UNBUILT_BENCHMARKS
from benchmarks.__main__ import make_parser
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.admin_app import UNBUILT_ROUTES as UNBUILT_ROUTES
from coordinator.operators.metrics import CoordinatorMetrics
from coordinator.operators.port_connections import PortConnections
from coordinator.structured_output.grammar_checker import GrammarChecker
from kv_transfer.core import events, frames
from offline.batch import __main__ as batch_command
from tests.unit.package_layout import ALLOWED_IMPORTS, list_sources
from tools import request_trace
from tools.build_backend.baton_build import COMPILER_PACKAGE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ]
)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()

# Options of docker, of pytest, and of vLLM's benchmark (glossary.md).
FOREIGN_OPTIONS = {"--build", "--wait", "--every-fault"} | {
    "--goodput",
    "--max-concurrency",
    "--request-rate",
}

_REFERENCE = re.compile(r"`([\w./]+\.py):([A-Za-z_][\w.]*)`")
_FILE = re.compile(r"`((?:[\w-]+/)+[\w.-]*)`")
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
_HEADING = re.compile(r"^(#+) +(.*)$", re.MULTILINE)
_DOCUMENT = re.compile(r"\b(docs/[\w./-]*\w|kernels/[\w./-]*\.\w+)")


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# references


def list_names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Dotted names that a module or class body defines."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from list_names(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def find_unresolved(text: str) -> list[str]:
    missing = []
    for file, name in _REFERENCE.findall(text):
        path = ROOT / file
        if not path.is_file() or name not in set(list_names(ast.parse(path.read_text()).body)):
            missing.append(f"{file}:{name}")
    return missing


def heading_anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for _, title in _HEADING.findall(text))
    return {title.strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_references_to_code_resolve(page: Path) -> None:
    assert find_unresolved(page.read_text()) == []


def test_unresolved_reference_is_detected() -> None:
    good, bad = "baton/errors.py:BatonError.__init__", "baton/errors.py:BatonError.gone"
    assert find_unresolved(f"`{good}` `{bad}` `baton/gone.py:x`") == [bad, "baton/gone.py:x"]


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_files_and_links_resolve(page: Path) -> None:
    text = page.read_text()
    for name in _FILE.findall(text):
        if name.split("/")[0] in {path.name for path in ROOT.iterdir()}:
            assert (ROOT / name).exists(), f"{page.name}: {name}"
    for target, anchor in _LINK.findall(text):
        if "://" in target:
            continue
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor[1:] in heading_anchors(other.read_text()), (
            f"{page.name}: {target}{anchor}"
        )


def test_tour_counts_the_files_on_the_way_to_forward() -> None:
    text = section((ROOT / "docs" / "tour.md").read_text(), "The files on the way")
    files = [row[1].strip("`") for row in table_rows(text)]
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert len(files) == len(set(files))
    assert f"one request runs through {len(files)} files" in " ".join(text.split())


def test_documents_named_in_code_exist() -> None:
    for package in ALLOWED_IMPORTS:
        for path in list_sources(package):
            for name in _DOCUMENT.findall(path.read_text()):
                assert list((ROOT / name).parent.glob(f"{(ROOT / name).name}*")), f"{path}: {name}"


# architecture.md


def section(text: str, title: str) -> str:
    """From the heading that contains `title` to the next one of its level or above."""
    headings = list(_HEADING.finditer(text))
    for place, heading in enumerate(headings):
        if title in heading[2]:
            ends = (
                after.start() for after in headings[place + 1 :] if len(after[1]) <= len(heading[1])
            )
            return text[heading.end() : next(ends, len(text))]
    raise AssertionError(f"no heading contains {title!r}")


def table_rows(text: str) -> list[list[str]]:
    """The cells of a page's tables, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [place for place, row in enumerate(cells) if set("".join(row)) == {"-"}]
    return [row for place, row in enumerate(cells) if place not in rules and place + 1 not in rules]


def test_every_arrow_of_the_figure_names_existing_functions() -> None:
    text = section(ARCHITECTURE, "One request")
    figure = text.split("```")[1]
    in_figure = {int(number) for number in re.findall(r"(?<![\w(])(\d+)(?![\w)])", figure)}
    told = {int(row[0]): row[1] + row[2] for row in table_rows(text)}
    assert in_figure == set(told) == set(range(1, len(told) + 1))
    without = [step for step, where in told.items() if not _REFERENCE.search(where)]
    assert without == []


def test_the_import_table_is_the_enforced_one() -> None:
    named = {
        row[0].strip("`/").split("/")[-1]: row[2]
        for row in table_rows(section(ARCHITECTURE, "Folders"))
    }
    assert named.keys() == ALLOWED_IMPORTS.keys()
    for folder, text in named.items():
        if text != "everything above":
            assert set(re.findall(r"`(\w+)`", text)) == ALLOWED_IMPORTS[folder], folder
        else:
            assert ALLOWED_IMPORTS[folder] == ALLOWED_IMPORTS.keys() - {folder}


def test_owners_are_named_once_and_exist() -> None:
    owned = [row for row in table_rows(section(ARCHITECTURE, "Who owns"))]
    assert len({row[0] for row in owned}) == len(owned) > 20
    assert all(_REFERENCE.search(row[1]) for row in owned)


def test_settings_are_documented() -> None:
    text = section(ARCHITECTURE, "Configuration")
    named = [name for row in table_rows(text) for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(named) == sorted(FIELD_NAMES)


async def test_metrics_are_documented() -> None:
    metrics = CoordinatorMetrics(Dispatcher(Config()))
    metrics.add_port_connections(PortConnections(Config(), 1024))
    metrics.registry.register(GrammarChecker(None, timeout_seconds=1.0, max_entries=1))
    exposed = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
    }
    text = section(ARCHITECTURE, "Metrics")
    told = {row[0].strip("`") for row in table_rows(text) if "*" not in row[0]}
    assert told == exposed


def test_errors_are_documented() -> None:
    between = {
        row[0].strip("`"): row[1].strip("`")
        for row in table_rows(section(PROTOCOL, "Errors between nodes"))
    }
    replaceable = {
        code: kind.__name__
        for code, kind in ERRORS_BY_CODE.items()
        if issubclass(kind, HandoffFailed | NodeFailed)
    }
    assert between == replaceable
    told = {
        row[1].strip("`"): row
        for row in table_rows(section(ARCHITECTURE, "Errors"))
        if len(row) == 4
    }
    assert ERRORS_BY_CODE.keys() - replaceable.keys() <= told.keys()
    for code in ERRORS_BY_CODE.keys() - replaceable.keys():
        _, _, http, grpc = told[code]
        assert not http.isdigit() or int(http) == ERRORS_BY_CODE[code].http_status
        assert grpc in ("-", ERRORS_BY_CODE[code].grpc_code)


# protocol.md


def state_enums() -> Iterator[tuple[str, list[str]]]:
    """(name, members) of every enum of ours that is a state of something."""
    for package in ALLOWED_IMPORTS:
        for path in list_sources(package):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("State"):
                    if any(isinstance(base, ast.Name) and base.id == "Enum" for base in node.bases):
                        yield node.name, list(list_names(node.body))


STATES = dict(state_enums())


def test_state_enums_are_found() -> None:
    known = {"RequestState", "SequenceState", "BlockState", "InboundState", "OutboundState"}
    assert known <= STATES.keys()


@pytest.mark.parametrize("enum", sorted(STATES))
def test_states_are_documented(enum: str) -> None:
    text = section(PROTOCOL, enum)
    assert [row[0].strip("`") for row in table_rows(text)] == STATES[enum]
    figure = text.split("```")[1]
    assert [state for state in STATES[enum] if not re.search(rf"\b{state}\b", figure)] == []


@pytest.mark.parametrize("message", ["NodeMessage", "CoordinatorMessage"])
def test_messages_of_the_node_link_are_documented(message: str) -> None:
    kinds = cluster_pb2.DESCRIPTOR.message_types_by_name[message].oneofs_by_name["message"].fields
    told = {row[0] for row in table_rows(section(PROTOCOL, "The node link"))}
    names = {kind.message_type.name for kind in kinds if kind.message_type is not None}
    assert len(names) == len(kinds)
    assert {f"`{name}`" for name in names} <= told


def test_the_protocols_versions_are_documented() -> None:
    (link,) = re.findall(r"The node link speaks version (\d+) ", PROTOCOL)
    (plane,) = re.findall(r"the transfer\s+plane\s+version (\d+) ", PROTOCOL)
    assert (int(link), int(plane)) == (PROTOCOL_VERSION, frames.PROTOCOL_VERSION)


def frame_word(kind: type[frames.Frame]) -> str:
    """The protocol's word for a frame: its tag on the wire, capitalised."""
    return kind.__name__.removesuffix("Frame")


def test_frames_and_events_are_documented() -> None:
    text = section(PROTOCOL, "The transfer plane")
    told = {row[0].strip("`"): row[1] for row in table_rows(text)}
    sent = {frame_word(kind): "to decode" for kind in frames.FrameToDecode.__args__}
    sent |= {frame_word(kind): "to prefill" for kind in frames.FrameToWriter.__args__}
    assert len(sent) == len(frames.Frame.__subclasses__())
    assert {name: told.get(name) for name in sent} == sent
    heard = {kind.__name__: "decode" for kind in events.InboundEvent.__args__}
    heard |= {kind.__name__: "prefill" for kind in events.OutboundEvent.__args__}
    assert {name: told.get(name) for name in heard} == heard
    assert all(dataclasses.is_dataclass(getattr(events, name)) for name in heard)


def test_failpoints_are_documented() -> None:
    told: dict[str, set[str]] = {}
    for row in table_rows(section(PROTOCOL, "Failpoints")):
        actions = set(re.findall(r"[a-z]+", row[1].split(":")[0]))
        told |= {name: actions for name in re.findall(r"`([a-z_.]+)`", row[0])}
    assert told == {
        name: {action.value for action in actions} for name, actions in KNOWN_FAILPOINTS.items()
    }


# the others


def test_dependencies_are_documented() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = described["project"], described["build-system"]["requires"]
    groups = [project["dependencies"], *project["optional-dependencies"].values(), build]
    groups.append([COMPILER_PACKAGE])  # which the build requires where there is no compiler
    wanted = {re.split(r"[^\w.-]", line)[0] for group in groups for line in group}
    text = (ROOT / "docs" / "dependencies.md").read_text()
    told = {name for row in table_rows(text) for name in re.findall(r"`([\w.-]+)`", row[0])}
    assert told == wanted


def test_documented_commands_exist() -> None:
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/operating.md"))
    commands = {command.name for command in app.registered_commands}
    built = (commands | {group.name for group in app.registered_groups}) - UNBUILT.keys()
    used = set(
        re.findall(
            r"(?:^(?:\$ )?(?:\.venv/bin/|BATON_\w+=\S+ )?|; )baton ([\w-]+)", text, re.MULTILINE
        )
    )
    table = {row[0] for row in table_rows(section(text, "Commands"))}
    listed = {match[1] for cell in table if (match := re.match(r"`baton ([\w-]+)", cell))}
    assert listed == built
    assert used <= built
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert (
            set(re.findall(r"(?:^|`)make ([a-z-]+)\b", page.read_text(), re.MULTILINE)) <= targets
        ), page
    modules = {
        name for page in PAGES for name in re.findall(r"python -m ([\w.]+)", page.read_text())
    }
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_unimplemented_features_are_documented() -> None:
    text = section((ROOT / "README.md").read_text(), "What is not available yet")
    told = set(re.findall(r"`([^`]+)`", text))
    commands = {f"baton {name}" for name in UNBUILT} | {
        f"baton bench {name}" for name in UNBUILT_BENCHMARKS
    }
    routes = {path if path != "/" else f"{method} /" for path, method in UNBUILT_ROUTES}
    assert commands | routes <= told


def test_documented_options_exist() -> None:
    """Of any command or process of ours, or of a tool that the page is about."""
    known = {"--" + field.replace("_", "-") for field in FIELD_NAMES}
    commands = list(get_command(app).commands.values())  # type: ignore[attr-defined]
    commands += [
        inner for command in commands for inner in getattr(command, "commands", {}).values()
    ]
    known |= {option for command in commands for each in command.params for option in each.opts}
    parsers = [
        make_parser({name: importlib.import_module(module)}) for name, module in BENCHMARKS.items()
    ] + [request_trace.make_parser()]
    known |= {option for parser in parsers for option in list_options(parser)}
    known |= set(list_options(batch_command.make_parser()))
    for page in PAGES:
        if page.name == "coming-from.md":  # has options of others, and a test of its own
            continue
        named = set(re.findall(r"`(--[a-z][a-z-]+)", page.read_text())) - FOREIGN_OPTIONS
        assert named <= known, page


def list_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from list_options(inner)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_prose_fits_into_120_columns(page: Path) -> None:
    """Rows of tables, sample output and the generated api.md may have longer lines."""
    if page.name == "api.md":
        return
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []

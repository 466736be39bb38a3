"""Starting and ending vLLM, with a program that stands in for it."""

import os
import stat
import sys
from pathlib import Path

import pytest

from benchmarks.device.served_systems import (
    MODEL_NAME,
    ServerSettings,
    find_vllm,
    list_vllm_arguments,
    start_vllm,
)
from benchmarks.load import http_stream
from benchmarks.load.http_stream import parse_url
from tests.unit.benchmarks.device.tiny_run import make_tiny_run

# Answers every GET with status 200, and writes its process id to the file in its environment.
_SERVER = """
import http.server, os, sys
class ModelsHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
        self.wfile.write(b"{}")
open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), ModelsHandler).serve_forever()
"""


def write_program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(make_tiny_run(tmp_path).model, "cuda", 1 << 30, 4096, 64, {})


def test_command_line(settings: ServerSettings) -> None:
    words = list_vllm_arguments(settings, 8123, device_memory=44 << 30)
    options = dict(zip(words[::2], words[1::2], strict=False))
    assert options["-m"] == "vllm.entrypoints.cli.main"
    text = " ".join(words)
    assert f"serve {settings.model.folder}" in text
    assert "--max-model-len 4096" in text
    assert "--max-num-seqs 64" in text
    assert "--load-format dummy" in text
    assert f"--served-model-name {MODEL_NAME}" in text
    assert "--gpu-memory-utilization 0.250" in text
    assert "--no-enable-prefix-caching" in words


def test_interpreter_is_the_given_one_or_one_with_vllm() -> None:
    assert find_vllm("/opt/vllm/bin/python") == "/opt/vllm/bin/python"
    assert find_vllm("") == ""  # not installed here


async def test_server_is_awaited_and_ended(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    program = write_program(tmp_path / "python", _SERVER)
    async with start_vllm(program, settings, 80 << 30, start_timeout=30.0) as url:
        target = parse_url(url)
        async with http_stream.open_request(target, "GET", "/v1/models", {}) as answer:
            assert answer.status == 200
        pid = int(pid_file.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_log_of_a_server_that_ends_is_shown(settings: ServerSettings, tmp_path: Path) -> None:
    program = write_program(tmp_path / "python", "raise SystemExit('no such device')")
    with pytest.raises(ValueError, match="no such device"):
        async with start_vllm(program, settings, 80 << 30, start_timeout=30.0):
            pass

"""`pdq worker`: its environment file, and what it becomes; when a worker counts as idle; what its start took."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pdq.cli import worker
from pdq.errors import Misconfigured
from pdq.settings import HttpSettings, load
from pdq.stage.idle import Idle
from pdq.telemetry.start import Start, process_began_ns


def written(directory: Path, text: str) -> Path:
    path = directory / "worker.env"
    path.write_text(text, "utf-8")
    return path


def test_an_environment_file_is_lines_of_names_and_values(tmp_path: Path) -> None:
    text = "# of this site\n\n PDQ_NATS_URL=nats://hub:4222 \nPDQ_ENGINE_CPUS=\"0-3\"\nOTEL_X='a=b'\nPDQ_WORKER_ID=\n"
    assert worker.read(written(tmp_path, text)) == {
        "PDQ_NATS_URL": "nats://hub:4222",
        "PDQ_ENGINE_CPUS": "0-3",
        "OTEL_X": "a=b",
        "PDQ_WORKER_ID": "",
    }


@pytest.mark.parametrize(
    "line", ["export PDQ_NATS_URL=x", "PDQ_NATS_URL = x", "PDQ_NATS_PASSWORD hunter2", "=hunter2", "9A=hunter2"]
)
def test_another_line_is_refused_by_its_number_and_not_repeated(line: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"worker\.env, line 2: expected NAME=VALUE") as refused:
        worker.read(written(tmp_path, f"A=1\n{line}\n"))
    assert "hunter2" not in str(refused.value)


def test_a_file_of_another_system_is_read_alike(tmp_path: Path) -> None:
    assert worker.read(written(tmp_path, "\ufeffA=b\r\n\r\n# c\r\nD='e'\r\n")) == {"A": "b", "D": "e"}


@pytest.mark.parametrize("content", [b"A=\xff\xfe\n", b"A=b\0c\n", "A=b\n".encode("utf-16")])
def test_what_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "worker.env"
    path.write_bytes(content)
    with pytest.raises(Misconfigured, match="not a text file"):
        worker.read(path)


def test_a_file_that_cannot_be_read_is_a_setting_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"cannot read .*nowhere: No such file"):
        worker.read(tmp_path / "nowhere")
    with pytest.raises(Misconfigured, match="Is a directory"):
        worker.read(tmp_path)


def command(directory: Path, text: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    file = written(directory, text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
    arguments = [sys.executable, "-P", "-m", "pdq", "worker", "--role", "decode", "--env-file", str(file), *options]
    return subprocess.run(
        arguments, env=kept | environ, cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("where", ["file", "environment"])
def test_an_unknown_setting_is_refused_before_anything_starts(where: str, tmp_path: Path) -> None:
    line, environ = ("PDQ_NATS_ULR=x\n", {}) if where == "file" else ("", {"PDQ_NATS_ULR": "x"})
    done = command(tmp_path, line, **environ)
    assert (done.returncode, done.stderr) == (2, "pdq: misconfigured: unknown setting PDQ_NATS_ULR\n")


def test_options_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """The service is not let far: its models file lacks what it is asked for. It logs the settings in force before."""
    (tmp_path / "models.toml").write_text('[models.a]\nid = "a/a"\nmax_model_len = 64\nvocab_size = 64\n')
    # Would be imported in place of the library's, were the working directory on its path.
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the working directory')\n")
    file = "PDQ_MODELS=models.toml\nPDQ_WORKER_SLOTS=3\nPDQ_WORKER_DRAIN_S=7\nPDQ_WORKER_MODEL=x\n"
    file += "PDQ_WORKER_IDLE_EXIT_S=9\n"
    options = ("--model", "missing", "--idle-exit", "0.5")
    done = command(tmp_path, file, *options, PDQ_WORKER_SLOTS="4", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 2
    assert "model 'missing' is not in models.toml" in done.stderr.splitlines()[-1]
    for shown in ("PDQ_WORKER_SLOTS=4", "PDQ_WORKER_DRAIN_S=7.0", "PDQ_WORKER_IDLE_EXIT_S=0.5"):
        assert f" {shown}" in done.stderr


def test_the_health_server_can_be_off() -> None:
    assert load(HttpSettings, {"PDQ_HTTP_PORT": "off"}).port == "off"
    assert load(HttpSettings, {"PDQ_HTTP_PORT": "0"}).port == 0


async def test_idle_is_over_only_while_nothing_is_held() -> None:
    busy = 1
    idle = Idle(0.05, lambda: busy)
    waiting = asyncio.create_task(idle.over())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    busy = 0
    idle.changed()
    ended = time.monotonic()
    await waiting
    assert time.monotonic() - ended >= 0.05


def test_a_process_knows_when_it_was_made() -> None:
    """To 10 ms, and a clock that is set while it runs moves it."""
    code = "import time; from pdq.telemetry.start import process_began_ns as p; print(p(), time.time_ns(), p())"
    before = time.time_ns()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    began, now, again = map(int, done.stdout.split())
    assert before - 50_000_000 <= began < now
    assert abs(began - again) < 20_000_000
    assert process_began_ns() < before


def test_a_start_has_parts_and_a_total() -> None:
    start = Start()
    with start.part("broker"):
        pass
    start.ready({"kv_tier": 1.5})
    assert list(start.parts_s) == ["import", "broker", "kv_tier", "total"]
    assert start.parts_s["total"] == (start.ready_ns - start.began_ns) / 1e9 >= start.parts_s["import"]

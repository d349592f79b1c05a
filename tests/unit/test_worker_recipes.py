"""infra/worker: the environment file, the units and the batch script are what their tools take."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pdq import settings
from pdq.cli import worker

RECIPES = Path(__file__).parents[2] / "infra/worker"
UNITS = ("pdq-worker@.service", "pdq-kv.service")
INSTALLED = "/opt/pdq/.venv/bin"
MOST_EXPOSURE = 35
"""Of systemd's 0 to 100, the less the better; 50 and more it calls "medium". Devices and the network stay open."""


def unit(name: str) -> str:
    return (RECIPES / name).read_text("utf-8")


def test_the_environment_file_has_settings_that_there_are_and_no_secret() -> None:
    found = worker.read(RECIPES / "worker.env")
    assert settings.unknown_variables(found) == []
    assert found.keys() & {"PDQ_NATS_URL", "PDQ_MODELS", "PDQ_KV_MODE", "PDQ_WORKER_IDLE_EXIT_S"}
    for group in settings.GROUPS:
        loaded = settings.load(group, found)
        assert [name for name in group.secret if getattr(loaded, name)] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    here = str(Path(sys.executable).parent)
    for name in UNITS:
        (tmp_path / name).write_text(unit(name).replace(INSTALLED, here))
    paths = [str(tmp_path / name.replace("@.", "@decode.")) for name in UNITS]
    shutil.copy(tmp_path / UNITS[0], paths[0])
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_the_units_are_hardened(name: str) -> None:
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true", f"--threshold={MOST_EXPOSURE}"]
    done = subprocess.run([*command, str(RECIPES / name)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-500:]


def test_an_idle_worker_stays_down_and_a_failed_one_does_not() -> None:
    text = unit(UNITS[0])
    assert re.search(r"^Restart=on-failure$", text, re.MULTILINE)
    assert re.search(r"^RestartPreventExitStatus=2$", text, re.MULTILINE)
    # The engine's core must not get the signal before its front has drained.
    assert re.search(r"^KillMode=mixed$", text, re.MULTILINE)
    stop_s = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop_s and int(stop_s[1]) > settings.WorkerSettings().drain_s + 10


def test_the_batch_script_asks_slurm_for_what_it_relies_on() -> None:
    asked = re.findall(r"^#SBATCH (.*)$", unit("pdq-worker.sbatch"), re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@90", "--open-mode=append"} <= set(asked)

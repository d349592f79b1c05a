"""Write infra/locks/cpu.lock, gpu.lock and router.lock from pyproject.toml, and verify.lock: `make lock`.

Pins that still fit are kept; `make lock UPGRADE=--upgrade` takes the newest of everything.
The lock of an engine set holds everything that `make test` needs: the engine set, the router, the gateway, the local
broker, the developers' tools and what builds pdq. Images leave out what tools.txt names. router.lock, with the pins of
cpu.lock, is what images without an engine install. verify.lock holds the stores that the tests of every KV mode run.
All are resolved for Python 3.11 on x86-64 Linux; the hashes are those of every file of a release, so that other
Pythons and machines of the same set can use it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "infra" / "locks"
EXTRAS = ("router", "gateway", "local", "bench", "dev")
BUILD = "infra/locks/build.in"

HEADER = """\
# The {name} set, whole. Written by `make lock`; do not edit.
# Installed with --no-deps and --require-hashes, from whatever index pip or uv is configured for.
"""
TORCH_NOTE = """\
#
# torch: the hashes are those of its CPU builds (infra/locks/torch-cpu.sha256) and of no other, so that the CUDA
# build, which a plain index offers under the same version, is refused rather than installed.
# `make setup` finds the CPU build; TORCH_INDEX=<directory or index> tells it where.
"""
TOOLS = """\
# Packages of cpu.lock and gpu.lock that images leave out: developers' tools, the local broker, what builds pdq.
# Written by `make lock`; do not edit.
"""


def compiled(name: str, extras: Sequence[str], flags: Sequence[str], source: str = "pyproject.toml") -> str:
    """The resolver's output: pins and hashes, no addresses. `name`: of the lock whose pins are kept."""
    command = [sys.executable, "-m", "uv", "pip", "compile", source, *flags]
    command += [flag for extra in extras for flag in ("--extra", extra)]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-config", "--quiet"]
    overrides = LOCKS / f"{name}-overrides.txt"
    if overrides.exists():
        command += ["--override", str(overrides)]
    with TemporaryDirectory() as folder:
        output = Path(folder, f"{name}.lock")
        if (LOCKS / output.name).exists():
            shutil.copy(LOCKS / output.name, output)  # the resolver prefers the pins it finds there
        subprocess.run([*command, "--output-file", str(output)], cwd=ROOT, check=True, timeout=600)
        return output.read_text("utf-8")


def with_cpu_torch(lock: str) -> str:
    """The lock with torch's hashes replaced by those of the CPU builds of the same version."""
    found = re.search(r"^torch==(\S+) \\\n(?:    --hash=\S+(?: \\)?\n)+", lock, re.MULTILINE)
    if not found:
        raise SystemExit("the resolver gave no torch")
    version = found.group(1)
    listing = (LOCKS / "torch-cpu.sha256").read_text("utf-8").split("\n")
    hashes = sorted(line.split()[0] for line in listing if f" torch-{version}+cpu-" in line)
    if not hashes:
        raise SystemExit(f"infra/locks/torch-cpu.sha256 has no CPU build of torch {version}: add them (sha256sum)")
    lines = [f"torch=={version}", *(f"    --hash=sha256:{digest}" for digest in hashes)]
    return lock[: found.start()] + " \\\n".join(lines) + "\n" + lock[found.end() :]


def without_engine(flags: list[str]) -> str:
    """What the router, the gateway and the command line need, with the pins of cpu.lock: images agree."""
    return compiled(
        "router", ("router", "gateway"), ["infra/locks/router.in", "--constraint", "infra/locks/cpu.lock", *flags]
    )


def stores(flags: list[str]) -> str:
    """Servers that tests start: their binaries alone, not what their Python parts would need."""
    return compiled("verify", (), ["--no-deps", *flags], "infra/locks/verify.in")


def tools() -> str:
    """Names that cpu.lock has beyond what its services need."""
    needed = names(compiled("cpu", ("cpu", "router", "gateway"), ["--constraint", "infra/locks/cpu.lock"]))
    whole = names((LOCKS / "cpu.lock").read_text("utf-8"))
    return TOOLS + "".join(f"{name}\n" for name in sorted(whole - needed))


def names(lock: str) -> set[str]:
    return set(re.findall("^([^ #\n]+)==", lock, re.MULTILINE))


def main(flags: list[str]) -> None:
    write("cpu.lock", HEADER.format(name="cpu") + TORCH_NOTE + with_cpu_torch(engine_set("cpu", flags)))
    write("gpu.lock", HEADER.format(name="gpu") + engine_set("gpu", flags))
    write("router.lock", HEADER.format(name="router") + without_engine(flags))
    write("tools.txt", tools())
    write("verify.lock", HEADER.format(name="verify") + stores(flags))


def engine_set(engine: str, flags: list[str]) -> str:
    return compiled(engine, (engine, *EXTRAS), [BUILD, *flags])


def write(name: str, text: str) -> None:
    (LOCKS / name).write_text(text, "utf-8")
    print(f"infra/locks/{name}: {sum(line[:1].isalnum() for line in text.splitlines())} packages")


if __name__ == "__main__":
    main(sys.argv[1:])

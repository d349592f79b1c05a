"""Write infra/locks/cpu.lock and gpu.lock from pyproject.toml: `make lock`.

Pins that still fit are kept; `make lock UPGRADE=--upgrade` takes the newest of everything.
A lock holds everything that `make test` needs: the engine set, the router, the local broker, the
developers' tools and what builds pdq. It is resolved for Python 3.11 on x86-64 Linux; the hashes are those
of every file of a release, so that other Pythons and machines of the same set can use it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "infra" / "locks"
EXTRAS = ("router", "local", "dev")

HEADER = """\
# The {engine} set, whole. Written by `make lock`; do not edit.
# Installed with --no-deps and --require-hashes, from whatever index pip or uv is configured for.
"""
TORCH_NOTE = """\
#
# torch: the hashes are those of its CPU builds (infra/locks/torch-cpu.sha256) and of no other, so that the CUDA
# build, which a plain index offers under the same version, is refused rather than installed.
# `make setup` finds the CPU build; TORCH_INDEX=<directory or index> tells it where.
"""


def compiled(engine: str, flags: list[str]) -> str:
    """The resolver's output: pins and hashes, no addresses."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "infra/locks/build.in", *flags]
    command += [flag for extra in (engine, *EXTRAS) for flag in ("--extra", extra)]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-config", "--quiet"]
    overrides = LOCKS / f"{engine}-overrides.txt"
    if overrides.exists():
        command += ["--override", str(overrides)]
    with TemporaryDirectory() as folder:
        output = Path(folder, f"{engine}.lock")
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


def main(flags: list[str]) -> None:
    locks = {
        "cpu": HEADER.format(engine="cpu") + TORCH_NOTE + with_cpu_torch(compiled("cpu", flags)),
        "gpu": HEADER.format(engine="gpu") + compiled("gpu", flags),
    }
    for engine, text in locks.items():
        (LOCKS / f"{engine}.lock").write_text(text, "utf-8")
        print(f"infra/locks/{engine}.lock: {len(re.findall('^[^ #]+==', text, re.MULTILINE))} packages")


if __name__ == "__main__":
    main(sys.argv[1:])

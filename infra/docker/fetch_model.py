"""Puts the model on the volume that all services read, and writes the models.toml that names it. Runs once, first.

`fetch_model.py cpu|gpu [MODEL]`: a name of models.toml, or ORG/NAME; without one, models.toml's only one. A model whose
files are mounted at /model is used from there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from pdq import model, settings
from pdq.errors import Misconfigured
from pdq.model_files import is_model
from pdq.settings import Models, ModelSpec
from pdq.up.model import find, write

MOUNTED = Path("/model")
LISTED = Path("/opt/pdq/share/models.toml")


def resolve(wanted: str, engine: str, models: Models, home: Path) -> ModelSpec:
    """The spec, its files there and its `path` set. Raises Misconfigured."""
    mounted = is_model(MOUNTED)
    spec = find(models, wanted) if wanted else models.one("")
    if spec is None:
        spec = model.describe(str(MOUNTED) if mounted else wanted, home, say)
        if engine == "cpu":
            # Far faster than bfloat16 on most CPUs, which have no instructions for it.
            spec = msgspec.structs.replace(spec, dtype="float32")
    if mounted:
        spec = msgspec.structs.replace(spec, path=str(MOUNTED))
    return msgspec.structs.replace(spec, path=str(model.fetch(spec, home, say)))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(engine: str, wanted: str = "") -> int:
    home = settings.home()
    try:
        spec = resolve(wanted, engine, settings.load_models(LISTED), home)
    except Misconfigured as exc:
        say(f"pdq: {exc}")
        return 2
    fresh = home / "models.toml.new"
    write(spec, fresh)
    os.replace(fresh, home / "models.toml")
    say(f"{spec.slug} is in {spec.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What a directory must hold to be a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdq.errors import Misconfigured


def is_model(path: Path) -> bool:
    """Whether a directory holds a whole model: a part of one may lie in the hub's cache."""
    tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return (path / "config.json").is_file() and tokenizer and has_weights(path)


def has_weights(path: Path) -> bool:
    """Whether all safetensors are there: those that the index names, or any where there is no index."""
    shards = set(read_json(path / "model.safetensors.index.json").get("weight_map", {}).values())
    return all((path / name).is_file() for name in shards) if shards else any(path.glob("*.safetensors"))


def is_cached(target: Path, model_id: str) -> bool:
    """Whether `target` is this model. Raises Misconfigured when something else stands in its place."""
    if not target.exists():
        return False
    if is_model(target) and read_json(target / "config.json").get("_name_or_path") == model_id:
        return True
    raise Misconfigured(f"{target} is not {model_id}: remove it, or set `path` in models.toml to use it as it is")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} when there is none: the caller asks for fields."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}

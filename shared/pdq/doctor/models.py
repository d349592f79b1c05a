"""models.toml and the files of the models that are on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from pdq.doctor.facts import Facts, ModelFiles
from pdq.doctor.finding import Finding, fail, ok, warn

SHOWN_DIGITS = 12


def file(facts: Facts) -> Iterator[Finding]:
    if facts.models_error:
        yield fail(
            "model.file",
            facts.models_error,
            trap="router, workers and `pdq init` do not start",
            cure="mend it, or set PDQ_MODELS to another file",
        )
    elif facts.models is None:
        yield warn(
            "model.file",
            "there is no models.toml here: models and their consumers are not examined",
            trap="`pdq init` and the router need it",
            cure="set PDQ_MODELS to it",
        )
    else:
        names = ", ".join(sorted(facts.models.by_slug))
        yield ok("model.file", f"models.toml has {names}", value=names)


def directories(facts: Facts) -> Iterator[Finding]:
    """Whether a model's directory is whole."""
    for slug, files in facts.files.items():
        if files.error:
            yield fail(
                "model.path",
                files.error,
                subject=slug,
                value=files.path,
                trap="a worker or router on this machine does not start",
                cure=f"`pdq model fetch {slug}` tells where its files are: set `path` in models.toml to that",
            )
        else:
            yield ok(
                "model.path", f"{files.path} (weights {files.weights[:SHOWN_DIGITS]})", subject=slug, value=files.path
            )


def digests(facts: Facts) -> Iterator[Finding]:
    """The files here against those that the live workers have loaded."""
    for worker in facts.workers:
        files = facts.files.get(worker.beat.model)
        if files is None or files.error:
            continue
        for name, here in (("weights", files.weights), ("tokenizer", files.tokenizer)):
            has = worker.contract.get(name, here)
            if here and has != here:
                yield fail(
                    "model.digest",
                    f"{worker.name} has {name} {has[:SHOWN_DIGITS]}, the files here are {here[:SHOWN_DIGITS]}",
                    subject=worker.beat.model,
                    value=has,
                    limit=here,
                    trap="the model was replaced under the same name, here or there: after a restart contracts differ, "
                    "and a router with another tokenizer gives prompts another meaning",
                    cure="the same files everywhere, or a slug of its own for the new model; then `pdq drain WORKER`",
                )


def context(facts: Facts) -> Iterator[Finding]:
    """models.toml's context against what the model was made for."""
    for slug, spec in (facts.models.by_slug if facts.models else {}).items():
        files = facts.files.get(slug, ModelFiles(path=""))
        if 0 < files.context < spec.max_model_len:
            yield fail(
                "model.context",
                f"max_model_len is {spec.max_model_len}, the model was made for {files.context}",
                subject=slug,
                value=spec.max_model_len,
                limit=files.context,
                trap="vLLM refuses to start, or answers to long prompts are nonsense",
                cure=f"max_model_len = {files.context} in models.toml",
            )

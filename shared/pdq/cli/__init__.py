"""The `pdq` command. What a command does is in plain functions; what is here parses and reports.

Heavy modules are imported by the commands that need them, so that `pdq --help` and errors come at once.
"""

from __future__ import annotations

import logging
import sys

import typer

from pdq.cli import (
    accounts,
    backup,
    batch,
    bench,
    doctor,
    exits,
    explain,
    kv,
    operators,
    output,
    purge,
    requests,
    setup,
    stack,
    tenant,
    verify,
    worker,
)

HELP = f"""Serve language models as two durable work queues, prefill and decode, over NATS JetStream.

\b
  pdq up --detach                            start everything on this machine
  pdq submit "What is the capital of France?"
  pdq status                                 what runs, and what waits
  pdq down                                   end it

\b
{exits.HELP}
"""


def build() -> typer.Typer:
    """The command line."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    for command in (
        stack.up,
        stack.down,
        stack.status,
        requests.submit,
        requests.attach,
        requests.cancel,
        purge.purge,
        batch.batch,
        requests.trace,
        explain.explain,
        kv.kv,
        worker.worker,
        operators.workers,
        operators.drain,
        verify.verify,
        setup.init,
        backup.rearm,
        doctor.doctor,
        setup.version,
    ):
        app.command()(command)
    app.add_typer(bench.bench_commands, name="bench")
    app.add_typer(operators.dead_commands, name="dead")
    app.add_typer(tenant.tenant_commands, name="tenant")
    app.add_typer(setup.model_commands, name="model")
    app.add_typer(accounts.nats_commands, name="nats")
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (`sys.argv`'s by default) and return its exit code."""
    logging.basicConfig(format="pdq: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        code = build()(arguments, prog_name="pdq", standalone_mode=False)
    except OSError as exc:
        # Help that cannot be written: commands report their own.
        output.error("output_failed", f"cannot write to stdout: {exc.strerror}")
        output.abandon_stdout()
        return exits.FAILED
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except Exception as exc:
        return _usage(exc)
    return code if isinstance(code, int) else exits.OK


def _usage(exc: Exception) -> int:
    """A wrong command line, as one line. Anything else is a fault of ours, and shows where it comes from."""
    explain = getattr(exc, "format_message", None)
    if explain is None:
        raise exc
    context = getattr(exc, "ctx", None)
    command = context.command_path if context is not None else "pdq"
    output.error("usage", f"{explain()} (see {command} --help)")
    return exits.USAGE

"""The command line: `pagestream …`. Reads arguments and settings; the work is done elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagestream import chat as chat_
from pagestream import doctor as doctor_
from pagestream import embedded, inspect, instance, probe, progress, tail
from pagestream import top as top_
from pagestream import up as stack
from pagestream.plan import MODULES, python_module
from wire import model_store
from wire.api_keys import DEFAULT_TENANT, KeysFileError, add_key
from wire.bus import BusError
from wire.config import SettingsError, check_shown, load
from wire.progress import size

app = typer.Typer(
    help="Serve language models on machines that come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(models_app, name="models")
keys_app = typer.Typer(help="API keys.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")

_FAILURES = (
    BusError,
    chat_.ChatError,
    embedded.NoServerError,
    KeysFileError,
    model_store.ModelMissing,
)
"""What may go wrong though every setting is fine."""

Assignments = Annotated[
    list[str], typer.Option("--set", metavar="NAME=VALUE", help="A setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DataDir = Annotated[Path | None, typer.Option(help="Redis data, sockets and the pid file.")]


class Device(StrEnum):
    """What a worker computes on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Role(StrEnum):
    """A kind of service."""

    gateway = "gateway"
    scheduler = "scheduler"
    worker = "worker"


def main() -> None:
    """Entry point of the command."""
    app(prog_name="pagestream")


@app.command()
def up(  # noqa: PLR0917 - one parameter an option, as typer has it
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face id, folder, .gguf file, or demo (the default)."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1)] = 1,
    gateways: Annotated[int, typer.Option(min=1, help="They share the port.")] = 1,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [8000].")] = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="A Redis of yours; else one is started.")
    ] = None,
    data_dir: DataDir = None,
    device: Annotated[Device | None, typer.Option()] = None,
    assignments: Assignments = [],  # noqa: B006 - typer only reads it
    make_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the whole stack on this machine, in the foreground."""
    with _sentences():
        check_shown(redis or "")
        settings = load(
            assignments,
            model=model,
            host=host,
            port=port,
            redis_url=redis,
            data_dir=data_dir,
            device=device.value if device else None,
        )
        code = stack.up(settings, workers, gateways, make_pid)
    raise typer.Exit(code)


@app.command()
def down(data_dir: DataDir = None, assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Stop the stack of this data folder, and wait until it has stopped."""
    with _sentences():
        folder = load(assignments, data_dir=data_dir).data_dir.absolute()
    pid = instance.stop(folder)
    _say(f"nothing runs on {folder}" if pid is None else f"stopped (process {pid})")


@app.command()
def gateway(assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Run one gateway."""
    _become("gateway", assignments)


@app.command()
def scheduler(assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Run one scheduler."""
    _become("scheduler", assignments)


@app.command()
def worker(assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Run one worker."""
    _become("worker", assignments)


@app.command()
def ps(as_json: AsJson = False, assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Show processes and queues, as Redis knows them."""
    with _sentences():
        seen = asyncio.run(inspect.overview(embedded.reach(load(assignments))))
    if as_json:
        _say(json.dumps(seen.as_json()))
    else:
        inspect.show(seen, _console())


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between pictures.")] = 1.0,
    assignments: Assignments = [],  # noqa: B006 - see above
) -> None:
    """Show the pool live: processes, queues, figures and blocks; Ctrl-C ends it."""
    with _sentences():
        settings, console = embedded.reach(load(assignments)), _console()
        if once or not sys.stdout.isatty():
            top_.once(settings, console)
        else:
            top_.live(settings, console, interval)


@app.command()
def chat(  # noqa: PLR0917 - one parameter an option, as typer has it
    url: Annotated[
        str | None, typer.Option(help="Address of the server [http://HOST:PORT].")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model [the served one].")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the API key [the variable {chat_.KEY_VARIABLE}]."),
    ] = None,
    assignments: Assignments = [],  # noqa: B006 - see above
) -> None:
    """Talk to a running server. /help says how; Ctrl-C stops an answer, Ctrl-D leaves."""
    with _sentences():
        settings = load(assignments)
        key = chat_.api_key(api_key_file)
        is_tls = settings.tls_cert_file is not None
        there = chat_.base_url(url or probe.url(settings.host, settings.port, is_tls=is_tls))
        model = model or asyncio.run(chat_.served_model(there, key))
        given = {"temperature": temperature, "max_tokens": max_tokens}
        options = {name: value for name, value in given.items() if value is not None}
        talk = chat_.Conversation(there, model, key, options)
        if system is not None:
            talk.messages.append({"role": "system", "content": system})
        is_all_well = chat_.run(talk)
    raise typer.Exit(0 if is_all_well else 1)


@app.command("tail")
def tail_(
    key: Annotated[str, typer.Argument(help="A stream: requests, log, steps, steps:<process>, …")],
    assignments: Assignments = [],  # noqa: B006 - see above
) -> None:
    """Follow a stream, decoded."""

    async def follow() -> None:
        async for line in tail.follow(embedded.reach(load(assignments)), key):
            _say(line)

    with _sentences():
        try:
            asyncio.run(follow())
        except (KeyboardInterrupt, BrokenPipeError):
            sys.stdout = None  # nothing more to flush into a closed pipe


@app.command()
def health(role: Role, assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Exit with 0 if a service of this role does its work on this host (for health checks)."""
    with _sentences():
        is_healthy = asyncio.run(inspect.is_healthy(embedded.reach(load(assignments)), role))
    _say("healthy" if is_healthy else "not healthy")
    raise typer.Exit(0 if is_healthy else 1)


@app.command()
def doctor(assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Say what this machine can do, and what is missing."""
    with _sentences():
        findings = doctor_.examine(load(assignments))
    doctor_.show(findings, _console())
    raise typer.Exit(0 if all(one.is_fine or one.is_optional for one in findings) else 1)


@models_app.command("list")
def models_list(as_json: AsJson = False, assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """List the models that are ready on this machine."""
    with _sentences():
        found = model_store.list_models(load(assignments))
    if as_json:
        _say(json.dumps([{**asdict(one), "path": str(one.path)} for one in found]))
        return
    table = Table("model", "size", "folder", box=None, header_style="dim")
    for one in found:
        table.add_row(one.model, size(one.num_bytes), str(one.path))
    _console().print(table)


@models_app.command("pull")
def models_pull(name: str, assignments: Assignments = []) -> None:  # noqa: B006 - see above
    """Make a model ready: fetch it, convert it."""
    with _sentences(), progress.showing_stages() as show:
        folder = model_store.ensure(load(assignments, model=name), show)
    _say(str(folder))


@keys_app.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(help="What to call the key.")],
    admin: Annotated[
        bool, typer.Option("--admin", help="It may change how the pool runs.")
    ] = False,
    tenant: Annotated[str, typer.Option(help="Whose requests it sends.")] = DEFAULT_TENANT,
    days: Annotated[int | None, typer.Option(min=1, help="Days until it expires.")] = None,
    assignments: Assignments = [],  # noqa: B006 - typer only reads it
) -> None:
    """Print a new key, this once, and add its digest to API_KEYS_FILE."""
    with _sentences():
        path = load(assignments).api_keys_file
        if path is None:
            raise SettingsError("API_KEYS_FILE is not set: name the file that gets the key")
        expires = None if days is None else datetime.now(UTC).date() + timedelta(days=days)
        key = add_key(path, name, is_admin=admin, tenant=tenant, expires=expires)
    _say(key)


def _become(role: str, assignments: list[str]) -> None:
    """Turn this process into a service, as `python -m` would start it."""
    flags = [part for one in assignments for part in ("--set", one)]
    command = python_module(MODULES[role], *flags)
    os.execv(command[0], command)


@contextmanager
def _sentences() -> Iterator[None]:
    """Say what is wrong in a sentence and end: 2 for a bad setting, 1 for anything else."""
    try:
        yield
    except SettingsError as error:
        _tell(f"pagestream: {error}")
        raise typer.Exit(2) from None
    except _FAILURES as error:
        _tell(f"pagestream: {error}")
        raise typer.Exit(1) from None


def _console() -> Console:
    """Standard output, for tables; where it is no terminal nothing is cut to fit."""
    return Console(width=None if sys.stdout.isatty() else 200)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()

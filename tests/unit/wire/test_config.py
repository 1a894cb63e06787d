"""Settings: where they come from, and what is said of those that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.config import Settings, SettingsError, load, process_id, without_password


@pytest.fixture
def dotenv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The `.env` file that is read."""
    monkeypatch.setitem(Settings.model_config, "env_file", ".env")
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".env"


def test_without_anything_every_setting_has_a_default():
    settings = load()
    assert settings.model == "demo"
    assert settings.model_name == "demo"
    assert settings.port == 8000


def test_set_wins_over_the_environment_and_that_over_the_file(
    dotenv: Path, monkeypatch: pytest.MonkeyPatch
):
    dotenv.write_text("PAGESTREAM_PORT=1001\nPAGESTREAM_HOST=file\nPAGESTREAM_POOL=file\n")
    monkeypatch.setenv("PAGESTREAM_PORT", "1002")
    monkeypatch.setenv("PAGESTREAM_HOST", "environment")
    settings = load(["PORT=1003"])
    assert (settings.port, settings.host, settings.pool) == (1003, "environment", "file")


def test_lines_of_others_in_the_file_are_ignored(dotenv: Path):
    dotenv.write_text(
        "COMPOSE_PROJECT_NAME=x\n# PAGESTREAM_NONSENSE=1\nexport PAGESTREAM_POOL='a'\n"
    )
    assert load().pool == "a"


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGESTREAM_PORT", "")
    assert load().port == 8000


@pytest.mark.parametrize("assignment", ["PORT=9000", "port=9000", "PAGESTREAM_PORT=9000"])
def test_a_name_may_be_written_as_people_write_it(assignment: str):
    assert load([assignment]).port == 9000


def test_a_value_may_hold_anything_behind_the_first_equals_sign():
    assert load(["MODEL=a=b c"]).model == "a=b c"


def test_nothing_given_for_a_keyword_leaves_the_setting_alone():
    assert load(port=None, model="x").port == 8000
    assert load(["PORT=9000"], port=9001).port == 9000


# ---------------------------------------------------------------- unknown names


def test_an_unknown_name_is_refused_wherever_it_stands(
    dotenv: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = "MAX_NUM_SEQ: no such setting; the nearest is MAX_NUM_SEQS"
    with pytest.raises(SettingsError, match=expected):
        load(["MAX_NUM_SEQ=1"])
    monkeypatch.setenv("PAGESTREAM_MAX_NUM_SEQ", "1")
    with pytest.raises(SettingsError, match=expected):
        load()
    monkeypatch.delenv("PAGESTREAM_MAX_NUM_SEQ")
    monkeypatch.setenv("pagestream_max_num_seq", "1")
    with pytest.raises(SettingsError, match=expected):
        load()
    monkeypatch.delenv("pagestream_max_num_seq")
    load()
    dotenv.write_text("PAGESTREAM_MAX_NUM_SEQ=1\n")
    with pytest.raises(SettingsError, match=expected):
        load()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PROT", "PORT"),
        ("REDIS", "REDIS_URL"),
        ("WORKER", "WORKER_ID"),
        ("BLOCKSIZE", "BLOCK_SIZE"),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant(name: str, nearest: str):
    with pytest.raises(SettingsError, match=f"the nearest is {nearest}$"):
        load([f"{name}=1"])


@pytest.mark.parametrize("assignment", ["PORT", "", "=1", "PORT 9000"])
def test_what_is_no_assignment_is_refused(assignment: str):
    with pytest.raises(SettingsError, match="expected NAME=VALUE"):
        load([assignment])


# ---------------------------------------------------------------- bad values


BAD = [
    ("PORT", "0", "greater than or equal to 1"),
    ("PORT", "65536", "less than or equal to 65535"),
    ("PORT", "http", "valid integer"),
    ("PORT", "1.5", "valid integer"),
    ("PORT", "", "valid integer"),
    ("BLOCK_SIZE", "17", "16, 32, 64 or 128"),
    ("DEVICE", "tpu", "'auto', 'cpu' or 'cuda'"),
    ("DTYPE", "int4", "'auto', 'float32', 'bfloat16' or 'float16'"),
    ("SCHEDULING_POLICY", "lifo", "'fcfs'"),
    ("ATTENTION_BACKEND", "flash", "'auto', 'triton', 'cpu' or 'torch'"),
    ("LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
    ("LOG_FORMAT", "xml", "'console' or 'json'"),
    ("MAX_NUM_SEQS", "-1", "greater than or equal to 1"),
    ("NUM_GPU_BLOCKS", "0", "greater than or equal to 1"),
    ("LONG_PREFILL_TOKEN_THRESHOLD", "-1", "greater than or equal to 0"),
    ("STEPS_IN_FLIGHT", "9", "less than or equal to 8"),
    ("GPU_MEMORY_UTILIZATION", "1.1", "less than or equal to 1"),
    ("GPU_MEMORY_UTILIZATION", "0", "greater than 0"),
    ("GPU_MEMORY_UTILIZATION", "nan", ""),
    ("RETENTION_S", "inf", ""),
    ("RETENTION_S", "nan", ""),
    ("RETENTION_S", "1e300", "less than or equal to"),
    ("LEADER_LEASE_S", "0", "greater than or equal to 0.01"),
    ("LEADER_LEASE_S", "0.0001", "greater than or equal to 0.01"),
    ("WORKER_TIMEOUT_S", "-1", "greater than or equal to"),
    ("WORKER_TIMEOUT_S", "soon", "valid number"),
    ("LOG_PROMPTS", "perhaps", "valid boolean"),
    ("SEED", str(2**63), "less than or equal to"),
    ("SEED", "-1", "greater than or equal to 0"),
    ("POOL", "a b", "match pattern"),
    ("POOL", "{a}", "match pattern"),
    ("POOL", "a:b", "match pattern"),
    ("WORKER_ID", "", "match pattern"),
    ("WORKER_ID", "x" * 65, "match pattern"),
    ("MODEL", "", "at least 1 character"),
    ("HOST", "", "at least 1 character"),
    ("REDIS_URL", "127.0.0.1:6379", "must start with redis://"),
    ("REDIS_URL", "http://a", "must start with redis://"),
    ("REDIS_URL", "redis://a:port", "Port could not be cast"),
    ("REDIS_URL", "redis://a:99999", "Port out of range"),
    ("REDIS_URL", "redis://a/zero", "number of a database"),
    ("REDIS_URL", "unix://", "must name the socket"),
    ("REDIS_URL", "redis://a?protocol=3", "option protocol"),
    ("REDIS_URL", "redis://a?socket_timeout=1", "option socket_timeout"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(
    name: str, value: str, allowed: str
):
    with pytest.raises(SettingsError) as refused:
        load([f"{name}={value}"])
    text = str(refused.value)
    assert text.startswith(f"{name}={value}: ")
    assert allowed in text
    assert "\n" not in text


def test_a_bad_value_in_the_environment_reads_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGESTREAM_PORT", "http")
    with pytest.raises(SettingsError, match=r"^PORT=http: .*valid integer"):
        load()


def test_every_bad_value_is_named_at_once():
    with pytest.raises(SettingsError, match=r"PORT=0: .*; BLOCK_SIZE=1: "):
        load(["PORT=0", "BLOCK_SIZE=1"])


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(SettingsError, match=r"MAX_NUM_SEQS \(65\).*MAX_NUM_BATCHED_TOKENS \(64\)"):
        load(["MAX_NUM_SEQS=65", "MAX_NUM_BATCHED_TOKENS=64"])
    assert load(["MAX_NUM_SEQS=64", "MAX_NUM_BATCHED_TOKENS=64"])


def test_a_file_that_cannot_be_read_is_named(dotenv: Path):
    dotenv.write_bytes(b"PAGESTREAM_PORT=\xff\xfe\n")
    with pytest.raises(SettingsError, match=r"^\.env: "):
        load()


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        load().port = 1


# ---------------------------------------------------------------- addresses and names


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://redis",
        "redis://user:secret@[::1]:7000/3",
        "rediss://redis/0?ssl_ca_certs=/ca.pem",
        "unix:///run/redis.sock",
        "unix://user:secret@/run/redis.sock?db=2",
        "redis+sentinel://a,b:7000,[::1]:7001/main",
        "redis+sentinel://user:secret@a/main/3",
    ],
)
def test_addresses_of_redis_are_taken(url: str):
    assert load(redis_url=url).redis_url == url


@pytest.mark.parametrize("address", ["redis://user:secret@host", "unix://:secret@/run/redis.sock"])
def test_a_password_on_a_command_line_is_refused(address: str):
    with pytest.raises(SettingsError, match="REDIS_PASSWORD_FILE") as refused:
        load([f"REDIS_URL={address}"])
    assert "secret" not in str(refused.value)


def test_a_certificate_and_its_key_go_together():
    with pytest.raises(SettingsError, match="TLS_CERT_FILE and TLS_KEY_FILE go together"):
        load(["TLS_CERT_FILE=/c.pem"])
    assert load(["TLS_CERT_FILE=/c.pem", "TLS_KEY_FILE=/k.pem"]).tls_key_file is not None


def test_a_password_is_never_shown():
    with pytest.raises(SettingsError) as refused:
        load(redis_url="redis://user:secret@host:port")
    assert "secret" not in str(refused.value)
    assert "host:port" in str(refused.value)
    assert without_password("unix://:secret@/a.sock") == "unix://***@/a.sock"
    assert without_password("redis://host/0") == "redis://host/0"


def test_a_process_is_named_after_its_role_and_unlike_any_other():
    names = {process_id("worker") for _ in range(100)}
    assert len(names) == 100
    for name in names:
        assert name.startswith("worker-")
        load([f"WORKER_ID={name}"])


def test_every_setting_says_what_it_is_for():
    for name, field in Settings.model_fields.items():
        assert field.description, name

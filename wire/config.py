"""Every setting of every service, in one class; each service takes what it needs.

A setting NAME comes from `--set NAME=VALUE`, else from PAGESTREAM_NAME in the environment, else
from a `.env` file. A name that does not exist or a value that is not allowed is a SettingsError,
whose text says which and what is allowed. `docs/configuration.md` is generated from here.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from dotenv import dotenv_values
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from wire import address

PREFIX = "PAGESTREAM_"

_ID_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.01, le=1e8, allow_inf_nan=False)]


class SettingsError(Exception):
    """A setting that cannot be used; the text names it and what is allowed. Exit code 2."""


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagestream"


def _data_home() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "pagestream"


class Settings(BaseSettings):
    """All settings. The description of each is what `docs/configuration.md` prints."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_file=".env", extra="ignore", frozen=True, env_ignore_empty=True
    )

    # -- model
    model: str = Field(
        "demo", min_length=1, description="Hugging Face id, folder, `.gguf` file, or `demo`."
    )
    served_model_name: str | None = Field(
        None, description="Name of the model in the API; MODEL by default."
    )
    model_cache_dir: Path = Field(
        default_factory=lambda: _cache_home() / "models",
        description="Where converted and fetched models are kept.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` takes the GPU where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="What weights and cache are kept in; `auto`: the checkpoint's where this "
        "worker is fast at it, else float32.",
    )
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="`int8`: weights as integers with a scale for each output, on the CPU.",
    )
    batch_invariant: bool = Field(
        False,
        description="Make an answer independent of what else is computed with it; costs speed.",
    )
    max_model_len: PositiveInt | None = Field(
        None, description="Longest prompt plus output, in tokens; the model's own by default."
    )
    trust_remote_code: bool = Field(False, description="Run code that a model folder brings.")
    allow_pickle_weights: bool = Field(
        False, description="Accept weights that are not safetensors; they can run code."
    )

    # -- processes
    data_dir: Path = Field(
        default_factory=_data_home, description="Redis data, sockets and the pid file of `up`."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address the gateway listens on.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        8000, description="Port the gateway listens on."
    )
    pool: str = Field(
        "default",
        pattern=_ID_PATTERN,
        description="One model with its scheduler and workers; part of every Redis key.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="`redis://`, `rediss://`, `unix://` or "
        "`redis+sentinel://host,host/service` address.",
    )
    redis_password_file: Path | None = Field(None, description="File that holds the password.")
    api_keys_file: Path | None = Field(
        None,
        description="API keys, written by `pagestream keys new`. Without one everybody is an "
        "administrator if HOST is a loopback address, and a user otherwise.",
    )
    tls_cert_file: Path | None = Field(
        None, description="PEM file with the gateway's certificate and its chain; HTTPS with it."
    )
    tls_key_file: Path | None = Field(None, description="PEM file with that certificate's key.")
    worker_id: str | None = Field(
        None, pattern=_ID_PATTERN, description="Name of this worker; made from the host by default."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least urgent events that are logged."
    )
    log_format: Literal["console", "json"] = Field("console", description="Form of the log lines.")
    log_prompts: bool = Field(
        False, description="Write the bodies of requests, prompts and all, into the log."
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP collector that gets traces, as `http://host:4318`; needs the extra "
        "`otel`.",
    )
    record_file: Path | None = Field(
        None,
        description="Where the scheduler writes all it hears and decides, for "
        "`python -m scheduler_svc.replay`; the epoch is appended to the name. Prompts are in it.",
    )

    # -- memory of the worker
    block_size: Literal[16, 32, 64, 128] = Field(16, description="Tokens in a KV-cache block.")
    num_gpu_blocks: PositiveInt | None = Field(
        None, description="Blocks of the main pool, on the CPU too; measured by default."
    )
    num_cpu_blocks: NonNegativeInt = Field(
        0, description="Blocks of the CPU pool that preempted requests are swapped to."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of the GPU's memory for weights, activations and blocks."
    )
    kv_cache_memory_bytes: PositiveInt | None = Field(
        None,
        description="Memory for blocks; on the CPU a quarter of what is free at start, 4 GiB at "
        "most, by default.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Numbers of the KV cache; `auto`: those of the model, `fp8`: one byte each, "
        "which only the Triton kernels of a GPU read.",
    )
    attention_backend: Literal["auto", "triton", "cpu", "torch"] = Field(
        "auto", description="Which attention the worker uses."
    )

    # -- scheduling
    max_num_batched_tokens: PositiveInt = Field(2048, description="Token budget of one step.")
    max_num_seqs: PositiveInt = Field(256, description="Most requests that run on one worker.")
    long_prefill_token_threshold: NonNegativeInt = Field(
        0,
        description="Most prompt tokens of one request in a step, while others wait; 0: half of "
        "what the step has left.",
    )
    enable_chunked_prefill: bool = Field(True, description="Split long prompts over steps.")
    enable_prefix_caching: bool = Field(True, description="Reuse blocks of equal prefixes.")
    reserve_full_prompt: bool = Field(
        True, description="Admit a request only when blocks for its whole prompt are free."
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the blocks that an admission leaves free for growth."
    )
    reserved_blocks: NonNegativeInt = Field(
        0, description="Blocks to which only requests of the system class are admitted."
    )
    scheduling_policy: Literal["fcfs", "priority", "sjf", "deadline"] = Field(
        "fcfs",
        description="Order of waiting requests of a tenant: arrival, priority, least expected "
        "work, or earliest deadline.",
    )
    priority_ageing_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0,
        description="Waiting time that makes up for one level of priority; 0: none ever does.",
    )
    queue_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="Longest wait for a first step, after which 503 is the answer; 0: none."
    )
    deadline_action: Literal["refuse", "end", "ignore"] = Field(
        "end",
        description="What happens to a request that misses its deadline: it ends when the time "
        "has come; `refuse`: as soon as it is clear that even its prompt takes too long.",
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = Field(
        "auto",
        description="What becomes of a preempted request's blocks; `auto` takes what costs less.",
    )
    preemption_victim: Literal["newest", "cheapest"] = Field(
        "newest", description="Which of the less urgent requests yields when memory runs out."
    )
    batch_wait_ms: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.0, description="How long an idle worker waits for more arrivals before it starts."
    )
    steps_in_flight: Annotated[int, Field(ge=1, le=8)] = Field(
        2, description="Steps that the scheduler is ahead of the results."
    )
    max_queued_requests: PositiveInt = Field(
        1024, description="Requests that may wait; more are refused with 429."
    )

    # -- what a model says
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"] = (
        Field("auto", description="How the model writes calls of tools; `auto` asks its template.")
    )
    reasoning_parser: Literal["none", "think"] = Field(
        "none", description="How the model marks its reasoning; `think`: <think>…</think>."
    )

    # -- limits and times
    max_body_bytes: PositiveInt = Field(16 * 1024 * 1024, description="Largest HTTP request body.")
    client_timeout_s: Seconds = Field(
        75, description="How long a client may take to send a request, or keep a connection idle."
    )
    orphan_grace_s: Seconds = Field(
        30, description="How long a resumable request runs on without any gateway."
    )
    max_worker_losses: PositiveInt = Field(
        3, description="Workers lost to one request alone before it is ended with an error."
    )
    retention_s: Seconds = Field(600, description="How long an ended request can be looked up.")
    leader_lease_s: Seconds = Field(1.5, description="How long a silent scheduler stays leader.")
    worker_timeout_s: Seconds = Field(1.5, description="Silence after which a worker is lost.")
    step_timeout_s: Seconds = Field(
        300, description="Time of one step after which a worker is lost though its heart beats."
    )
    drain_timeout_s: Seconds = Field(
        30, description="How long an orderly stop waits for running requests."
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        None, description="Makes the seeds repeatable that are drawn for requests without one."
    )

    @field_validator("redis_url")
    @classmethod
    def _usable_address(cls, value: str) -> str:
        return address.check(value)

    @field_validator("otlp_endpoint")
    @classmethod
    def _usable_collector(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "http://host")
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
            raise ValueError("must be like http://host:4318 or https://host/path")
        return value

    @model_validator(mode="after")
    def _budget_fits(self) -> Settings:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"MAX_NUM_SEQS ({self.max_num_seqs}) must not be above MAX_NUM_BATCHED_TOKENS "
                f"({self.max_num_batched_tokens}): every running request needs a token a step"
            )
        return self

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Settings:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("TLS_CERT_FILE and TLS_KEY_FILE go together: one of them is missing")
        return self

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model


def changed(settings: Settings, assignments: Mapping[str, str]) -> Settings:
    """Settings with some of them changed. SettingsError as for `load`."""
    given = dict(settings.model_dump())
    for name, value in assignments.items():
        _check_name(name)
        given[name.lower()] = value
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None


def setting_name(field: str) -> str:
    """Turn the name of a field into the name that people write."""
    return field.upper()


def load(assignments: Iterable[str] = (), **overrides: Any) -> Settings:
    """Read the settings; `assignments` are the NAME=VALUE of `--set`, which win over the rest.

    Raises:
        SettingsError: an unknown name or a value that is not allowed.

    """
    given: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise SettingsError(f"--set {assignment}: expected NAME=VALUE")
        name = name.strip().upper().removeprefix(PREFIX)
        _check_name(name)
        if name == "REDIS_URL":
            check_shown(value)
        given[name.lower()] = value
    _check_names(os.environ)
    _check_names(_dotenv())
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None


def check_shown(redis_url: str) -> None:
    """Refuse an address with a password on a command line, where everybody can read it.

    Raises SettingsError.
    """
    if re.search(r"//[^/@]*:[^/@]+@", redis_url):
        raise SettingsError(
            f"REDIS_URL={without_password(redis_url)}: everybody on this machine can read a "
            "password on a command line; put it into REDIS_PASSWORD_FILE, or the whole address "
            "into the environment"
        )


def _check_name(name: str) -> None:
    known = [setting_name(field) for field in Settings.model_fields]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise SettingsError(f"{name}: no such setting; the nearest is {near[0]}")


def _check_names(variables: Iterable[str]) -> None:
    """Refuse an unknown name of ours; the names of others are none of our business."""
    for variable in variables:
        if variable.upper().startswith(PREFIX):
            _check_name(variable.upper().removeprefix(PREFIX))


def _dotenv() -> Iterable[str]:
    path = Settings.model_config["env_file"]
    if path is None:
        return ()
    try:
        return dotenv_values(str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None


def _sentence(error: ValidationError) -> str:
    sentences = []
    for one in error.errors(include_url=False):
        message = one["msg"].removeprefix("Value error, ")
        if one["loc"]:
            name = setting_name(str(one["loc"][0]))
            value = without_password(str(one["input"]))
            sentences.append(f"{name}={value}: {message}")
        else:
            sentences.append(message)
    return "; ".join(sentences)


def without_password(url: str) -> str:
    """Make an address fit to be shown."""
    return re.sub(r"(?<=//)[^/@]*@", "***@", url)


def process_id(role: str) -> str:
    """Name a process after its host, short and unlikely to clash."""
    host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())[:24]
    return f"{role}-{host}-{secrets.token_hex(3)}"


def new_incarnation() -> str:
    """Random id of one life of a process."""
    return secrets.token_hex(4)

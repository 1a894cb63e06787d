"""Whether this gateway can serve, and with what: the model folder, Redis, a leader, a worker.

Owns the wait for the model folder, which others make; the gateway only reads it. Looks at the pool
every heartbeat, so that whoever asks gets an answer at once.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import structlog

from gateway.errors import RETRY_LATER_S, unavailable
from gateway.grammar_checker import GrammarChecker
from gateway.metrics import Metrics
from gateway.model_facts import ModelFacts, ModelFolderError, read_facts
from gateway.tokenizer import Tokenizer
from wire import model_store
from wire.bus import Bus, BusError
from wire.codec import WIRE_VERSION
from wire.config import Settings, SettingsError
from wire.service import HEARTBEAT_S

log = structlog.get_logger()

MODEL_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class ServedModel:
    """All that a request needs of the model."""

    name: str
    model_hash: str
    facts: ModelFacts
    tokenizer: Tokenizer
    grammars: GrammarChecker
    metrics: Metrics


class Readiness:
    """What stands between this gateway and serving, as far as is known."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self._settings = settings
        self._bus = bus
        self._is_draining = False
        self._is_understood = True  # by the scheduler that leads
        self._missing = "the model is being looked for"
        self._problem: str | None = "the pool has not been looked at yet"
        self.model: ServedModel | None = None
        self.started_at = int(time.time())

    @property
    def state(self) -> str:
        """In one word, for the heartbeat: loading, ready or draining."""
        if self._is_draining:
            return "draining"
        return "loading" if self.model is None else "ready"

    @property
    def problem(self) -> str | None:
        """Why a request would not be served now; None if it would."""
        if self._is_draining:
            return "the gateway is stopping"
        return self._missing if self.model is None else self._problem

    def served_model(self) -> ServedModel:
        """Give what a request needs of the model. Raises ApiError if none can be answered now."""
        if self.model is None or self._is_draining or not self._is_understood:
            message = f"this gateway cannot serve now: {self.problem}"
            raise unavailable(message, RETRY_LATER_S)
        return self.model

    def drain(self) -> None:
        """Turn new requests away from now on."""
        self._is_draining = True

    async def load_model(self) -> None:
        """Wait until the model folder is there, then read it. Raises SettingsError if it is bad."""
        folder = await self._wait_for_folder()
        try:
            self.model = await asyncio.to_thread(_load, folder, self._settings)
        except (ModelFolderError, OSError) as error:
            raise SettingsError(f"MODEL={self._settings.model}: {error}") from error
        gc.freeze()  # as at the start: it came with thousands of modules
        log.info(
            "model_loaded",
            model=self.model.name,
            model_hash=self.model.model_hash,
            max_model_len=self.model.facts.max_model_len,
        )

    async def watch(self) -> NoReturn:
        """Look at the pool again and again, until cancelled."""
        while True:
            try:
                self._problem = await self._look()
            except BusError as error:
                self._problem = str(error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _wait_for_folder(self) -> Path:
        while True:
            try:
                return await asyncio.to_thread(model_store.resolve, self._settings)
            except model_store.ModelMissing as error:
                self._missing = str(error)
            await asyncio.sleep(MODEL_POLL_S)

    async def _look(self) -> str | None:
        """Find a leader, and a worker that is ready for our model."""
        schedulers = (await self._bus.processes("scheduler")).values()
        leaders = [one for one in schedulers if one.get("state") == "leader"]
        if not leaders:
            return "no scheduler leads"
        spoken = {leader.get("wire", "1") for leader in leaders}
        self._is_understood = str(WIRE_VERSION) in spoken
        if not self._is_understood:
            return (
                f"the scheduler speaks version {min(spoken)} of the messages, and this gateway "
                f"{WIRE_VERSION}"
            )
        workers = (await self._bus.processes("worker")).values()
        hashes = {worker.get("model_hash") for worker in workers if worker.get("state") == "ready"}
        if not hashes:
            return "no worker is ready"
        if self.model is not None and self.model.model_hash not in hashes:
            return "the workers that are ready have another model"
        return None


def _load(folder: Path, settings: Settings) -> ServedModel:
    tokenizer = Tokenizer.load(folder)
    facts = read_facts(folder, settings.max_model_len, tokenizer.eos_token_id)
    return ServedModel(
        name=settings.model_name,
        model_hash=model_store.folder_hash(folder),
        facts=facts,
        tokenizer=tokenizer,
        grammars=GrammarChecker(folder, facts.vocab_size, facts.eos_token_ids),
        metrics=Metrics(settings.model_name, facts.max_model_len),
    )

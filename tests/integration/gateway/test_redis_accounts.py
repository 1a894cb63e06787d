"""The accounts of deploy/acl: with them a pool works, and each may do nothing beyond its work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError

from pagestream.inspect import overview
from tests.fakes.gateway_pool import Pool, gateways
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.redis_server import RedisServer
from tests.fakes.scheduler_pool import scheduler
from wire.api_keys import add_key
from wire.config import Settings, load

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parents[3]
ACCOUNTS = ("gateway", "scheduler", "worker:w1", "worker:w2", "viewer")
NAMES = tuple(account.replace(":", "-") for account in ACCOUNTS)

NOBODY_MAY = [
    "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET requirepass", "CONFIG SET maxmemory 1", "SHUTDOWN",
    "ACL LIST", "ACL SETUSER x on", "ACL WHOAMI", "SAVE", "BGSAVE", "BGREWRITEAOF",
    "REPLICAOF NO ONE", "MODULE LIST", "MONITOR", "SCRIPT FLUSH", "FUNCTION FLUSH", "CLIENT LIST",
    "CLIENT KILL TYPE normal", "MIGRATE h 1 k 0 1", "SWAPDB 0 1", "COMMAND", "LATENCY RESET",
    "SUBSCRIBE c", "PUBLISH c m", "RANDOMKEY", "DBSIZE", "SLOWLOG GET", "GET other", "SET other 1",
    "HGETALL ps:{other}:stats", "HSET ps:{other}:stats a 1",
]  # fmt: skip

NOT_EVEN = {
    "gateway": [
        "HSET blocks:w1 r 1", "DEL blocks:w1", "XADD steps:w1.1 * a 1",
        "XREAD STREAMS steps:w1.1 0",
        "XADD results:w1.1 * a 1", "XADD log * a 1", "XREAD STREAMS log 0", "SET tok:r 1",
        "DEL req:r", "DEL requests", "XDEL requests 1-1", "XTRIM requests MAXLEN 0",
        "XADD out:g.1 * a 1",
        "SET epoch 9", "SET leader me", "DEL leader", "HSET worker:w1 a 1", "HSET workers w1 1",
        "HSET config A 1", "HSET tenants a 1", "ZREM waiting r",
    ],
    "worker-w1": [
        "XREAD STREAMS steps:w2.1 0", "XADD steps:w2.1 * a 1", "XREAD STREAMS results:w2.1 0",
        "XADD results:w2.1 * a 1", "HSET worker:w2 a 1", "DEL worker:w2", "XDEL results:w2.1 1-1",
        "XREAD STREAMS requests 0", "XADD requests * a 1", "XRANGE requests - +", "HGETALL req:r",
        "GET tok:r", "SET tok:r 1", "XRANGE log - +", "XADD log * a 1", "XADD out:g.1 * a 1",
        "XRANGE out:g.1 - +", "SET epoch 9", "GET leader", "HSET config A 1", "XRANGE dead - +",
        "HGETALL quota:t", "GET idem:t:x", "DEL workers", "SCAN 0",
    ],
    "worker-w2": ["XADD results:w1.1 * a 1", "XREAD STREAMS steps:w1.1 0", "HSET worker:w1 a 1"],
    "scheduler": ["XREVRANGE log + -", "LPUSH list 1", "RENAME log log2"],
    "viewer": [
        "HSET stats a 1", "DEL log", "XADD requests * a 1", "XDEL requests 1-1", "SET tok:r 1",
        "EXPIRE log 1", "EVAL return(1) 0", "HDEL workers w1", "ZREM waiting r",
    ],
}  # fmt: skip
"""By account; keys of the pool by their short names."""


BY_A_SCRIPT = ("NOPERM", "ACL failure", "can't run this command", "can't access at least one")
"""What servers say, each in its way, where a script did what its caller may not do."""


@dataclass
class Guarded:
    """A server with accounts."""

    server: RedisServer
    folder: Path

    def client(self, name: str) -> redis.Redis:
        password = (self.folder / name).read_text()
        return redis.Redis(
            unix_socket_path=str(self.server.socket), username=name, password=password
        )

    def settings(self, name: str, **more: object) -> Settings:
        url = f"unix://{name}@{self.server.socket}"
        return load(redis_url=url, redis_password_file=self.folder / name, **more)


@pytest.fixture
def guarded(redis_kind: str, tmp_path: Path) -> Iterator[Guarded]:
    for name in NAMES:
        (tmp_path / name).write_text(f"the password of {name}")
    given = [f"{account}={tmp_path / name}" for account, name in zip(ACCOUNTS, NAMES, strict=True)]
    made = subprocess.run(
        [sys.executable, ROOT / "deploy" / "redis-acl", *given], check=True, capture_output=True
    )
    (tmp_path / "users.acl").write_bytes(made.stdout)
    assert b"the password" not in made.stdout
    server = RedisServer(redis_kind, options={"aclfile": str(tmp_path / "users.acl")})
    yield Guarded(server, tmp_path)
    server.close()


def refused(client: redis.Redis, *words: str) -> bool:
    try:
        client.execute_command(*words)
    except NoPermissionError:
        return True
    except redis.ResponseError as error:
        return any(words in str(error) for words in BY_A_SCRIPT)
    return False


def pool_key(word: str) -> str:
    """The whole key for a short name, where a word is one."""
    name = word.partition(":")[0]
    names = "blocks steps results log tok req requests out epoch leader worker workers config"
    names += " tenants waiting dead quota idem stats"
    return f"ps:{{default}}:{word}" if name in names.split() else word


@pytest.mark.every_redis
@pytest.mark.parametrize("name", NAMES)
def test_an_account_may_do_nothing_that_is_not_its_work(guarded: Guarded, name: str) -> None:
    client = guarded.client(name)
    assert client.ping()
    for line in NOBODY_MAY:
        assert refused(client, *line.split()), line
    for line in NOT_EVEN[name]:
        words = [pool_key(word) for word in line.split()]
        assert refused(client, *words), line
        if name != "viewer":  # nor by a script, though it names no key
            given = ", ".join(f"'{word}'" for word in words)
            assert refused(client, "EVAL", f"return redis.call({given})", "0"), line


def test_whoever_has_no_account_is_shut_out(guarded: Guarded) -> None:
    with redis.Redis(unix_socket_path=str(guarded.server.socket)) as client:
        for words in (["PING"], ["INFO"], ["GET", "x"]):
            with pytest.raises(redis.AuthenticationError):
                client.execute_command(*words)


@pytest.mark.every_redis
async def test_a_pool_works_with_an_account_for_each(guarded: Guarded, oracle_folder: Path) -> None:
    keys = guarded.folder / "keys.toml"
    key = add_key(keys, "k", is_admin=True, tenant="t", expires=None)
    keys.write_text(keys.read_text() + "tokens_per_minute = 1000\n")
    bearer = {"Authorization": f"Bearer {key}"}
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 5, "ignore_eos": True}
    gateway = guarded.settings("gateway", model=str(oracle_folder), api_keys_file=keys)
    worker = OracleWorker(guarded.settings("worker-w1"), "w1")
    async with (
        scheduler(guarded.settings("scheduler")),
        worker.running(),
        gateways(gateway, gateway) as pool,
    ):
        again = {**bearer, "Idempotency-Key": "k"}
        answers = [(await pool.post(body, at=at, **again)) for at in (0, 1)]
        assert [status for status, _ in answers] == [200, 200]
        assert answers[0] == answers[1]
        await works(pool, bearer)
        for name in ("scheduler", "viewer"):  # whoever looks from a container, and people
            seen = await overview(guarded.settings(name))
            assert {one.role for one in seen.processes} >= {"gateway", "scheduler", "worker"}


async def works(pool: Pool, bearer: dict[str, str]) -> None:
    url = pool.urls[0]
    async with pool.http.patch(
        url + "/admin/config", json={"MAX_NUM_SEQS": 9}, headers=bearer
    ) as r:
        assert r.status == 200
    assert (await pool.get("/v1/requests", **bearer))[0] == 200
    async with pool.http.get(url + "/metrics", headers=bearer) as r:
        assert r.status == 200
    async with pool.http.get(url + "/console/feed", headers=bearer) as r:
        await r.content.readuntil(b"event: all\n")
        assert b'"problem"' not in await r.content.readuntil(b"\n\n")


@pytest.mark.parametrize(
    ("role", "module", "missing"),
    [("scheduler", "scheduler_svc", "+scan"), ("gateway", "gateway", "+hset")],
    ids=lambda value: value,
)
async def test_an_account_that_may_too_little_is_named_in_a_sentence(
    guarded: Guarded, role: str, module: str, missing: str
) -> None:
    acl = guarded.folder / "users.acl"
    acl.write_text(acl.read_text().replace(f"{missing} ", "", 1 if role == "gateway" else -1))
    guarded.server.restart()
    flags = [f"--set=REDIS_URL=unix://{role}@{guarded.server.socket}"]
    flags += [f"--set=REDIS_PASSWORD_FILE={guarded.folder / role}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", module, *flags, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(30):
        _, said = await process.communicate()
    text = said.decode()
    assert process.returncode == 1, text
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    assert f"'{missing.removeprefix('+')}'" in last or "script: beat.lua" in last, last

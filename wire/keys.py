"""Every Redis key and stream name of a pool, as functions. A key is spelled here and nowhere else.

All keys of a pool share the hash tag `{pool}`, so that a pool can live on one node of a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

_SEQ_BITS = 21


def request_number(entry_id: str) -> int:
    """Turn the entry id `<ms>-<seq>` of a request into one integer that keeps the order.

    42 bits of milliseconds (until the year 2109) and 21 bits of sequence: two million entries
    while the server's clock stands still. ValueError if an id has more than fits, or is none.
    """
    ms, _, seq = entry_id.partition("-")
    number = int(ms) << _SEQ_BITS | int(seq)
    if int(seq) >> _SEQ_BITS or number >> 63:
        raise ValueError(f"{entry_id} does not fit a request number")
    return number


def entry_id(req: int) -> str:
    """Inverse of `request_number`."""
    return f"{req >> _SEQ_BITS}-{req & (1 << _SEQ_BITS) - 1}"


def arrival_ms(req: int) -> int:
    """When the request was accepted, in milliseconds of the Redis server's clock."""
    return req >> _SEQ_BITS


def step_entry_id(epoch: int, number: int) -> str:
    """Entry id of a step, a result or a commit: the fence that refuses late and double writes."""
    return f"{epoch}-{number}"


def id_before(epoch: int, number: int) -> str:
    """Cursor from which a reader sees the entry of this step, and none before it."""
    return f"{epoch}-{number - 1}" if number else f"{epoch - 1}-{2**64 - 1}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool."""

    pool: str

    def _key(self, *parts: str) -> str:
        return ":".join((f"ps:{{{self.pool}}}", *parts))

    def named(self, name: str) -> str:
        """Key that people call `name`: "requests", "steps:<process>", or the key itself."""
        return name if name.startswith("ps:{") else self._key(name)

    # -- requests and their tokens

    def requests(self) -> str:
        """Stream: submissions and controls; an entry lives until its request has ended."""
        return self._key("requests")

    def request(self, req_id: str) -> str:
        """Hash: one request, for people and for recovery."""
        return self._key("req", req_id)

    def tokens(self, req_id: str) -> str:
        """String: checkpoint of a request's output, four bytes a token, little endian."""
        return self._key("tok", req_id)

    def idempotency(self, tenant: str, digest: str) -> str:
        """String: the answer that a client's Idempotency-Key led to, and the digest of the body."""
        return self._key("idem", tenant, digest)

    def log(self) -> str:
        """Stream: committed tokens; an entry here is what makes a token exist."""
        return self._key("log")

    def dead(self) -> str:
        """Stream: entries that could not be understood or applied, with their reason."""
        return self._key("dead")

    # -- queues and block tables, a mirror for people

    def waiting(self) -> str:
        """Sorted set: requests that wait, in order."""
        return self._key("waiting")

    def running(self, worker: str) -> str:
        """Sorted set: requests that run on a worker, in order."""
        return self._key("running", worker)

    def swapped(self, worker: str) -> str:
        """Sorted set: requests whose blocks are in a worker's CPU pool, in order."""
        return self._key("swapped", worker)

    def blocks(self, worker: str) -> str:
        """Hash: block table of each request that runs on a worker, as "3 7 12"."""
        return self._key("blocks", worker)

    def cpu_blocks(self, worker: str) -> str:
        """Hash: blocks of a worker's CPU pool that each swapped request holds, as "3 7 12"."""
        return self._key("cpu_blocks", worker)

    def cached(self, worker: str) -> str:
        """Bitmap: bit n is 1 if nobody holds block n of a worker and its content may be hit."""
        return self._key("cached", worker)

    def life(self) -> str:
        """Hash: what each request that has not ended went through, as `wire.life` writes it."""
        return self._key("life")

    def ended(self) -> str:
        """Stream: the lives of the requests that ended last."""
        return self._key("ended")

    def events(self) -> str:
        """Stream: what happened lately that people want to hear of."""
        return self._key("events")

    def limits(self) -> str:
        """Hash: those settings in force that can be changed while running."""
        return self._key("limits")

    # -- steps and outputs; `process` is "<id>.<incarnation>"

    def steps(self, process: str) -> str:
        """Stream: SchedulerOutput for one incarnation of a worker."""
        return self._key("steps", process)

    def results(self, process: str) -> str:
        """Stream: ModelRunnerOutput of one incarnation of a worker."""
        return self._key("results", process)

    def out(self, process: str) -> str:
        """Stream: EngineCoreOutputs for one incarnation of a gateway."""
        return self._key("out", process)

    # -- processes

    def roster(self, role: str) -> str:
        """Hash: id -> incarnation of every process of a role; rewritten with each heartbeat."""
        return self._key(f"{role}s")

    def process(self, role: str, name: str) -> str:
        """Hash with a TTL: heartbeat and capacity of one gateway, worker or scheduler."""
        return self._key(role, name)

    def leader(self) -> str:
        """String with a TTL: the scheduler that leads."""
        return self._key("leader")

    def epoch(self) -> str:
        """Number: fencing token of the leader."""
        return self._key("epoch")

    def last_write(self) -> str:
        """String: epoch and number of the leader's last write of those that no entry id guards."""
        return self._key("last_write")

    def starts(self) -> str:
        """Hash: starts of leaders that did not get through, and the entry they may have died on."""
        return self._key("starts")

    # -- figures

    def tenants(self) -> str:
        """Hash: tokens served by tenant, divided by its weight; saved with each checkpoint."""
        return self._key("tenants")

    def quota(self, tenant: str) -> str:
        """Hash with a TTL: what is left of a tenant's minute, in requests and in tokens."""
        return self._key("quota", tenant)

    def config(self) -> str:
        """Hash: settings that were changed while running, with a version."""
        return self._key("config")

    def stats(self) -> str:
        """Hash: counters and gauges of the pool."""
        return self._key("stats")

"""Blocks: who holds them, what they hold, which go next.

Owns reference counts, the free queue and the map from content to block. Never sees a request.

A block is in exactly one of three states:

    free          nobody holds it, and its content has no name
    held          refcount ≥ 1: that many block tables contain it
    cached-idle   nobody holds it, but its content is known and may be hit

Free and cached-idle blocks stand in one queue. It is drawn from the left: free blocks first, then
the cached-idle block that was given up longest ago.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice


@lru_cache(maxsize=1024)
def root_hash(salt: str | None, model_revision: str = "") -> bytes:
    """First parent of a chain of block hashes: only equal salts and models can share blocks."""
    digest = hashlib.sha256()
    for tag, value in ((b"model", model_revision), (b"salt", salt)):
        if value is not None:
            data = value.encode()
            digest.update(tag + len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Name the content of a full block: SHA-256 over the 32 bytes of its parent and its tokens.

    Tokens are four bytes each, so no two sequences look alike. That different content never has
    equal names rests on the collision resistance of SHA-256.
    """
    return hashlib.sha256(parent + tokens).digest()


class BlockPool:
    """All blocks of one worker. Every operation costs constant time per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks  # free and cached-idle
        self.num_released = 0  # times that a block came back to the queue, ever
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_with: dict[bytes, int] = {}
        # The queue is a ring of links through all blocks, closed by the sentinel `num_blocks`.
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._prev = array("i", [num_blocks, *range(num_blocks)])

    def find(self, content: bytes) -> int | None:
        """Look up a block that holds this content, or will once the steps before have run."""
        return self._block_with.get(content)

    def find_prefix(self, contents: Sequence[bytes], limit: int) -> list[int]:
        """Look up the first `limit` contents, up to the first that nobody holds."""
        blocks: list[int] = []
        if limit == 0 or contents[0] not in self._block_with:
            return blocks
        for content in islice(contents, limit):
            if (block := self._block_with.get(content)) is None:
                break
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[int]:
        """Hand out blocks for new content; what they cached is forgotten.

        The caller has made sure that `num_free` suffices.
        """
        taken, block = [], self._next[self.num_blocks]
        for _ in range(count):
            if self._hashes[block] is not None:
                self._forget(block)
            self._ref_counts[block] = 1
            taken.append(block)
            block = self._next[block]
        self._next[self.num_blocks], self._prev[block] = block, self.num_blocks
        self.num_free -= count
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found; after this nobody can take them."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._unlink(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give a block table up. Its tail goes first, so that prefixes live longest."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._link_after(self.num_blocks, block)
                else:
                    self._link_after(self._prev[self.num_blocks], block)

    def publish(self, block: int, content: bytes) -> None:
        """Let others find a block by its content. The first block with a content keeps the name."""
        if content not in self._block_with and self._hashes[block] is None:
            self._block_with[content] = block
            self._hashes[block] = content

    def keep(self, block: int, content: bytes) -> None:
        """Cache a free block that holds this content from an earlier time."""
        if self._ref_counts[block] or self._hashes[block] is not None:
            return
        self.publish(block, content)
        if self._hashes[block] is not None:
            self._unlink(block)
            self._link_after(self._prev[self.num_blocks], block)

    def content_of(self, block: int) -> bytes | None:
        """Name of a block's content, if it can be found by it."""
        return self._hashes[block]

    def num_holders(self, block: int) -> int:
        """How many block tables contain it."""
        return self._ref_counts[block]

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these stand in the queue now and would leave it when shared."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def withdraw(self, contents: Iterable[bytes]) -> None:
        """Let nobody find these contents any more."""
        for content in contents:
            if (block := self._block_with.get(content)) is not None:
                self._forget(block)

    def forget_all(self) -> None:
        """Empty the prefix cache; held blocks stay held but cannot be found."""
        for block in self._block_with.values():
            self._hashes[block] = None
        self._block_with.clear()

    def idle_bits(self, start: int, stop: int) -> bytes:
        """Which of the blocks [start, stop) are cached-idle, as bits, the first one the highest.

        For people who look. `start` is a multiple of 8; the last byte is filled up with zeros.
        """
        states = zip(self._hashes[start:stop], self._ref_counts[start:stop], strict=True)
        bits = "".join("1" if name is not None and not held else "0" for name, held in states)
        size = -(-len(bits) // 8)
        return int(bits.ljust(8 * size, "0") or "0", 2).to_bytes(size, "big")

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content."""
        return len(self._block_with)

    # ------------------------------------------------------------ inside

    def _forget(self, block: int) -> None:
        if (content := self._hashes[block]) is not None:
            del self._block_with[content]
            self._hashes[block] = None

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
        self.num_released += 1

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is in exactly one state and agrees with `tables`.

        `tables` are all the block tables there are.
        """
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a block stands twice in one table"
            for block in table:
                held[block] += 1
        assert held == list(self._ref_counts), "refcounts differ from the tables that hold blocks"
        queue, block = [], self._next[self.num_blocks]
        while block != self.num_blocks:
            queue.append(block)
            assert len(queue) <= self.num_blocks, "the free queue is no ring"
            block = self._next[block]
        assert len(queue) == self.num_free, "num_free differs from the queue"
        assert sorted(queue) == [b for b in range(self.num_blocks) if held[b] == 0], (
            "the queue is not exactly the blocks that nobody holds"
        )
        for content, block in self._block_with.items():
            assert self._hashes[block] == content, "a name points to a block with another content"
        named = sum(content is not None for content in self._hashes)
        assert named == len(self._block_with), "a block has a name that finds another block"

"""Block tables: what a request holds of one worker's pool.

Owns the growth of block tables and the publishing of full blocks. Decides nothing: it says whether
there is room.

A request's tokens over its block table, with `block_size` 4:

    tokens       [0 1 2 3][4 5 6 7][8 9 . .]
    block_ids        7        2        5
                 published published  partial: its content has no name yet
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_svc.core.block_pool import BlockPool, block_hash, root_hash
from scheduler_svc.core.request import Request


class KVCacheManager:
    """The blocks of one worker, as the requests on it see them."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._caching = enable_prefix_caching

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Find the longest cached prefix: blocks of tokens [0, len · block_size).

        Never all known tokens: the last one must run to give logits, in a block of its own. None if
        all of the prompt must, for its log-probabilities, or if others' blocks went wrong with it.
        """
        if not self._caching or request.sampling.prompt_logprobs is not None:
            return []
        if request.has_started_over:
            return []
        limit = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, limit)
        return self.pool.find_prefix(request.block_hashes, limit)

    def num_needed(self, num_tokens: int, hits: list[int]) -> int:
        """Blocks that leave the queue if a request without any gets all for `num_tokens`."""
        return self.blocks_for(num_tokens) - len(hits) + self.pool.count_idle(hits)

    def allocate_slots(
        self, request: Request, num_tokens: int, hits: list[int] | None = None
    ) -> list[int] | None:
        """Make room for tokens [0, num_tokens) of a request; all of it or nothing.

        Hits are held before new blocks are taken, so that no request takes its own hits away.
        Returns the blocks that its table grew by, or None if there is no room.
        """
        hits = hits or []
        needed = self.blocks_for(num_tokens) - len(request.block_ids) - len(hits)
        if needed + self.pool.count_idle(hits) > self.pool.num_free:
            return None
        self.pool.share(hits)
        added = hits + self.pool.take(needed)
        request.block_ids += added
        request.num_published_blocks += len(hits)
        request.has_hits |= bool(hits)
        return added

    def grow(self, requests: list[Request]) -> list[int]:
        """Append one block to each. The caller has made sure that there are enough."""
        blocks = self.pool.take(len(requests))
        for request, block in zip(requests, blocks, strict=True):
            request.block_ids.append(block)
        return blocks

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Let others hit the full blocks among tokens [0, num_computed_tokens).

        Those of a prompt may be scheduled and not yet run: whoever hits them runs in the same step
        or a later one of the same stream, and a step writes all that is new of prompts before it
        reads any. Those of a request that decodes have been run.
        """
        if not self._caching:
            return
        full = min(num_computed_tokens, request.num_tokens) // self.block_size
        published = request.num_published_blocks
        if full <= published:
            return
        self._extend_hashes(request, full)
        for i in range(published, full):
            self.pool.publish(request.block_ids[i], request.block_hashes[i])
        request.num_published_blocks = full

    def publish_full(self, requests: Iterable[Request]) -> None:
        """Let others hit all full blocks of requests that decode, the last known token aside."""
        for request in requests:
            if request.block_ids:
                self.publish(request, request.num_tokens - 1)

    def keep(self, request: Request, block_ids: Sequence[int], num_tokens: int) -> int:
        """Let the request hit blocks that hold its tokens [0, num_tokens) from an earlier time.

        Nobody holds any of them. Returns the number of tokens in full blocks.
        """
        full = min(max(0, num_tokens) // self.block_size, len(block_ids))
        if not self._caching or not all(0 <= b < self.pool.num_blocks for b in block_ids[:full]):
            return 0
        self._extend_hashes(request, full)
        for i in reversed(range(full)):
            self.pool.keep(block_ids[i], request.block_hashes[i])
        return full * self.block_size

    def free(self, request: Request) -> None:
        """Give all blocks of a request up."""
        self.pool.release(request.block_ids)
        request.block_ids.clear()
        request.num_published_blocks = 0

    def first_miss(self, request: Request, num_hits: int) -> bytes | None:
        """Name of the full block that it would have hit next; None if it hit all it could."""
        if not self._caching or num_hits >= (request.num_tokens - 1) // self.block_size:
            return None
        self._extend_hashes(request, num_hits + 1)
        return request.block_hashes[num_hits]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def _extend_hashes(self, request: Request, count: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        known = len(hashes)
        if known >= count:
            return
        parent = hashes[-1] if hashes else root_hash(request.cache_salt)
        tokens = request.token_ids[known * size : count * size].tobytes()
        width = len(tokens) // (count - known)  # bytes of one block's tokens
        for start in range(0, len(tokens), width):
            parent = block_hash(parent, tokens[start : start + width])
            hashes.append(parent)

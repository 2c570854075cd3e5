"""A paged cache, for programs that have none, for tests, and as the pattern to copy.

It keeps the block tables of requests over fragmented pools: windows with sinks, local attention,
latents, indexers and states; reused prefixes; blocks in host memory. It is bookkeeping only: bytes
are the business of whoever owns the tensors of the layout.

What a cache manager must do for the engine is three calls on either side. Prefill:

    cache.append(request, chunk)                        # blocks to compute a step's tokens into
    async with engine.send(request, cache.facts(request, prompt)) as tx:
        tx.advance(cache.tokens(request))               # computed: extracted, and pinned
    cache.free(request)                                 # any time: what is pinned follows

Decode:

    need = cache.need(request, prompt, prefix=prefix)   # or OutOfBlocks, and nothing
    async with engine.receive(key, need=need, on_released=cache.on_released, ...) as rx:
        got = await rx
    cache.filled(request, got.tokens)                   # done; else `free` it, at once

A receive that raised on entering took nothing: try it again, or `withdraw` the need.

Two rules carry all of it. A slot is lent again only when no table, no send and no receive holds
it, so what a host forgets or does too early costs blocks, never another request's bytes; only
`withdraw` takes the host's word. And a block's position is its ordinal in the table, evicted or
not, never its place in a list.
"""

from .cache import PagedCache
from .facts import PagedFacts
from .slots import Counts, OutOfBlocks

__all__ = ["Counts", "OutOfBlocks", "PagedCache", "PagedFacts"]

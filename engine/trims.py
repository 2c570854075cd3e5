"""Trims: which blocks of a group a prompt needs, in one place where units are converted.

Owns the arithmetic of windows, chunked local attention, prefix reuse, chunks of a streamed
prefill, context parallelism and beam tails. Pure. Two rules: whoever calls states tokens and gets
ordinals (extents `[first, stop)`, for `Span.select`), never lengths of lists; policy is the
target's, so nothing here is applied by a source to what it holds.

`tokens` is how many the prompt has: the next token sits at position `tokens` and decides what is
still attended. The last block may be partly filled, and is needed whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .blocks import EMPTY, check_at_least, check_rank, check_units, read_integers
from .errors import UsageError
from .spans import Span, blocks_for

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from .layout import GroupKind

    Int64Array = NDArray[np.int64]
    Extent = tuple[int, int]


# ---------------------------------------------------------------- what a target needs


def needed(
    kind: GroupKind,
    tokens: int,
    tokens_per_block: int,
    *,
    window: int = 0,
    cached_tokens: int = 0,
    sink_tokens: int = 0,
) -> tuple[Extent, ...]:
    """The ordinals that a target needs of one group, as sorted disjoint extents; () for none.

    window: as in the group's layout: tokens of the window or of the attention chunk.
    cached_tokens: the prefix that the target has already. Only its whole blocks count, but a
    `state` is a point: ordinal 0, until the very tokens of the prompt are cached.
    sink_tokens: the first tokens, attended for ever beside a window.

    Raises: UsageError for an unknown kind, negative numbers, a cached prefix longer than the
    prompt, and a window or sinks where the kind has none.
    """
    stop, sinks = blocks_for(tokens, tokens_per_block), blocks_for(sink_tokens, tokens_per_block)
    if not 0 <= cached_tokens <= tokens:
        raise UsageError(f"cached_tokens is {cached_tokens}, must be 0 to the prompt's {tokens}")
    if sinks and kind != "window":
        raise UsageError(f"sink_tokens is {sink_tokens}, must be 0 for kind {kind!r}")
    if window and kind not in ("window", "chunk"):
        raise UsageError(f"window is {window}, must be 0 for kind {kind!r}")
    match kind:
        case "full" | "latent" | "indexer":
            live = 0
        case "window":
            live = stale_window(tokens, window, tokens_per_block)
        case "chunk":
            live = stale_chunk(tokens, window, tokens_per_block)
        case "state":
            return ((0, 1),) if cached_tokens < tokens else ()
        case _:
            raise UsageError(f"kind is {kind!r}, which no group has")
    extents = ((0, sinks), (live, stop)) if sinks < live else ((0, stop),)
    cached = cached_blocks(cached_tokens, tokens_per_block)
    return tuple((max(low, cached), high) for low, high in extents if max(low, cached) < high)


def stale_window(tokens: int, window: int, tokens_per_block: int) -> int:
    """The blocks that have left a sliding window: the first live ordinal.

    The next token attends positions `tokens + 1 - window` to `tokens`, itself included.
    Raises: UsageError for negative tokens, a window or a block of less than one token.
    """
    check_at_least("window", window, 1)
    check_units(tokens, tokens_per_block)
    return max(0, tokens + 1 - window) // tokens_per_block


def stale_chunk(tokens: int, chunk: int, tokens_per_block: int) -> int:
    """The same for chunked local attention: the next token attends from its own chunk's start."""
    check_at_least("attention chunk", chunk, 1)
    check_units(tokens, tokens_per_block)
    return tokens // chunk * chunk // tokens_per_block


def cached_blocks(cached_tokens: int, tokens_per_block: int) -> int:
    """The blocks of a reused prefix: whole ones only, the rest of it is needed again."""
    check_units(cached_tokens, tokens_per_block)
    return cached_tokens // tokens_per_block


# ---------------------------------------------------------------- streamed prefill


def chunk_blocks(
    start: int, stop: int, tokens_per_block: int, *, first: bool, last: bool
) -> Extent:
    """The ordinals that become ready with the prefill chunk of tokens `[start, stop)`.

    A block that a bound cuts belongs to the later chunk, so bounds round down and chunks tile the
    prompt; the last chunk's stop rounds up. The first chunk reaches down to ordinal 0: it brings
    the prefix that the source itself had cached. Empty (`first == stop`) when no block is complete.

    Raises: UsageError for negative tokens, `stop < start`, a block of less than one token.
    """
    check_at_least("chunk start", start, 0)
    check_at_least("chunk stop", stop, start)
    whole_up = blocks_for(stop, tokens_per_block)
    return (
        0 if first else start // tokens_per_block,
        whole_up if last else stop // tokens_per_block,
    )


# ---------------------------------------------------------------- context parallelism


def local_blocks(blocks: int, rank: int, size: int) -> int:
    """How many of the ordinals `[0, blocks)` rank `rank` of `size` holds: rank, rank + size, ...

    It converts a global count (cached, stale, of a prompt) to this rank's own.
    Raises: UsageError for negative blocks, or no such rank.
    """
    check_at_least("blocks", blocks, 0)
    check_rank(rank, size)
    return -(-(blocks - rank) // size)  # not below 0, since rank is below size


def to_global(local: Span, rank: int, size: int) -> Span:
    """What a rank holds, by global ordinals: its block i is the prompt's block `i * size + rank`.

    Raises: UsageError for no such rank, or ordinals above int32.
    """
    check_rank(rank, size)
    return Span.from_blocks(local.ordinals() * size + rank, local.slots())


def to_local(span: Span, rank: int, size: int) -> Span:
    """The inverse of `to_global`.

    Raises: UsageError for no such rank, or naming an ordinal that another rank holds.
    """
    check_rank(rank, size)
    ordinals = span.ordinals()
    foreign = ordinals[ordinals % size != rank]
    if foreign.size:
        holder = int(foreign[0]) % size
        raise UsageError(f"ordinal {int(foreign[0])} is held by rank {holder}, not {rank}")
    return Span.from_blocks(ordinals // size, span.slots())


def check_interleave(interleave_tokens: int, tokens_per_block: int) -> None:
    """Raise UsageError unless context-parallel ranks take turns block by block.

    With another interleave a rank's block holds scattered tokens of the prompt: it has no ordinal.
    """
    if interleave_tokens != tokens_per_block:
        raise UsageError(
            f"context parallelism interleaves ranks every {interleave_tokens} tokens, "
            f"must be one block of {tokens_per_block}"
        )


# ---------------------------------------------------------------- beam tails


def check_beams(
    beams: int, *, ranks: int = 1, chunked: bool = False, evicted_blocks: int = 0
) -> None:
    """Raise UsageError for beams together with what they can't be moved with.

    A packed list says which beam a tail belongs to only while it is beam 0's whole chain, on one
    rank, in one piece.
    """
    check_at_least("beams", beams, 1)
    limits = {
        f"context parallelism over {ranks} ranks": ranks > 1,
        "a prefill streamed in chunks": chunked,
        f"{evicted_blocks} evicted blocks": evicted_blocks > 0,
    }
    for what, met in limits.items():
        if met and beams > 1:
            raise UsageError(f"{beams} beams can't be moved with {what}")


def split_tails(slots: ArrayLike, length: int, beams: int) -> tuple[Int64Array, Int64Array]:
    """Part a packed list: (beam 0's slots, the last slots of the beams that differ from it).

    length: beam 0's blocks, exactly: tails are often fewer than `beams - 1`, so counting from the
    end would take beam 0's own blocks for tails. One beam has none.
    Shapes: slots int[n]; two int64 arrays, n in all.
    Raises: UsageError for more tails than other beams, or less than one beam.
    """
    check_at_least("beams", beams, 1)
    check_at_least("length of beam 0", length, 0)
    packed = read_integers("slot", slots)
    if beams == 1:
        return packed, EMPTY
    chain, tails = packed[:length], packed[length:]
    if tails.size >= beams:
        raise UsageError(
            f"{packed.size} slots are {length} of beam 0 and {tails.size} tails, "
            f"but {beams} beams have at most {beams - 1}"
        )
    return chain, tails


def pair_tails(
    source: Int64Array, target: Int64Array, ordinals: Int64Array, length: int
) -> tuple[Int64Array, Int64Array]:
    """The tails that move, paired: (source slots, target slots), int64[k] each.

    Tails stand beside beam 0's last block, and move when it does: when `length - 1` is among the
    paired `ordinals` (ascending).
    Raises: UsageError when they move, and the sides do not list as many.
    """
    if not ordinals.size or ordinals[-1] != length - 1:
        return EMPTY, EMPTY
    if source.size != target.size:
        raise UsageError(f"the source lists {source.size} beam tails, the target {target.size}")
    return source, target

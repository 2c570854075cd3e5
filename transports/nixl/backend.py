"""NIXL behind the `Backend` port: registers pools, posts writes, says how far they are.

Runs in its worker's thread alone. Rules: an error counts as an end only when the endpoint itself
raised it (releasing a handle, removing an agent or deregistering memory stops nothing), and
memory on which something may still move is never let go, whatever that costs.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...engine.ports import BackendError, NotPosted, Post, Progress, ProgressKind, Region
from ..runner import keep_for_ever
from . import agent as nixl_agent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.ports import Int64Array, MemoryKind


class _Metadata(msgspec.Struct, frozen=True):
    """What a peer is told. `checksum` is of `nixl`, see `NixlBackend.connect`."""

    agent: str
    checksum: int
    nixl: bytes


class NixlBackend:
    """Implements `ports.Backend` over one NIXL agent. Handles are NIXL's own integers."""

    def __init__(self, name: str, regions: Sequence[Region], *, progress_delay_us: int) -> None:
        self._name = name
        self._regions = regions
        self._progress_delay_us = progress_delay_us
        self._nixl: Any = None
        self._agent: Any = None
        self._ucx: list[int] = []
        self._registered: list[Any] = []
        self._peers: dict[str, str] = {}  # peer -> name of its agent

    def open(self) -> bytes:
        """Create the agent, register every region in one piece; return metadata for peers.

        Raises ImportError without NIXL, BackendError when NIXL refuses.
        """
        self._nixl = nixl_agent.bindings()
        try:
            self._agent, ucx = nixl_agent.create_agent(self._name, self._progress_delay_us)
            self._ucx = [ucx]
            for region in self._regions:
                self._register(region)
            metadata = self._agent.getLocalMD()
        except Exception as error:
            self._agent = None
            raise BackendError(
                f"NIXL can't open an agent for {len(self._regions)} regions: {error}; "
                "NIXL_LOG_LEVEL=ERROR shows NIXL's own words, and UCX_TLS, where set, must "
                "include tcp or an RDMA transport"
            ) from error
        return msgspec.msgpack.encode(_Metadata(self._name, zlib.crc32(metadata), metadata))

    def connect(self, peer: str, metadata: bytes) -> None:
        """Load a peer's metadata: 5 to 100 ms. Raises BackendError.

        NIXL drops what it knew of an agent when it fails to load metadata of the same name, so
        damaged metadata and known names are refused before NIXL sees them.
        """
        try:
            told = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise BackendError(f"metadata of {peer} can't be read: {error}") from None
        if zlib.crc32(told.nixl) != told.checksum:
            raise BackendError(f"metadata of {peer} is damaged: its checksum differs")
        if told.agent in self._peers.values() or told.agent == self._name:
            raise BackendError(f"metadata of {peer} names {told.agent}, which is known already")
        try:
            loaded = self._agent.loadRemoteMD(told.nixl).decode()
        except Exception as error:
            raise BackendError(f"NIXL refuses the metadata of {peer}: {error}") from error
        if loaded != told.agent:
            raise BackendError(f"metadata of {peer} names {told.agent}, but holds {loaded}")
        self._peers[peer] = loaded

    def disconnect(self, peer: str) -> None:
        """Forget a peer to which nothing is posted. Raises BackendError."""
        name = self._peers.pop(peer)
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception as error:
            raise BackendError(f"NIXL can't forget {name}: {error}") from error

    def post(self, post: Post) -> tuple[object, ProgressKind, str]:
        """Post one write; may block for as long as the bytes take (cma copies in here).

        Not by prepared lists: those pay only where descriptors repeat or need merging, and the
        planner has merged already. Raises NotPosted.
        """
        try:
            local = self._descriptors(
                post.source_memory, post.source, post.lengths, post.source_device
            )
            remote = self._descriptors(
                post.target_memory, post.target, post.lengths, post.target_device
            )
            handle = self._agent.createXferReq(
                self._nixl.NIXL_WRITE, local, remote, self._peers[post.peer], b"", self._ucx
            )
        except Exception as error:
            raise NotPosted(f"NIXL can't prepare a write to {post.peer}: {error}") from error
        progress, text = self._progress(self._agent.postXferReq, handle, b"")
        return handle, progress, text

    def poll(self, handle: object) -> tuple[ProgressKind, str]:
        """Where a posted write stands."""
        return self._progress(self._agent.getXferStatus, handle)

    def release(self, handle: object) -> None:
        """Free a settled write's handle. Raises BackendError."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception as error:
            raise BackendError(f"NIXL can't release a handle: {error}") from error

    def revoke(self, peer: str) -> tuple[bool, str]:
        """Never proven yet: on same-host cma nothing at this end can stop a peer's copy."""
        return False, f"this release has no means that proves that {peer} can't write any more"

    def close(self, unsettled: Sequence[object]) -> None:
        """Deregister and destroy the agent, or keep it for ever when writes may still move.

        Dropping an agent does not stop its writes, and freeing the memory under them would send
        whatever comes to lie there next: agent and regions stay until the process ends.
        """
        if unsettled:
            keep_for_ever((self._agent, self._regions))
            self._agent = None
            return
        try:
            for name in self._peers.values():
                self._agent.invalidateRemoteMD(name)
            for descriptors in self._registered:
                self._agent.deregisterMem(descriptors, self._ucx)
        finally:
            self._agent = None  # the only reference: the C++ agent, its sockets and threads end

    # ------------------------------------------------------------ NIXL's terms

    def _register(self, region: Region) -> None:
        where = [(region.address, region.size, region.device, "")]
        descriptors = self._nixl.nixlRegDList(self._segment(region.memory), where)
        self._agent.registerMem(descriptors, self._ucx)
        self._registered.append(descriptors)

    def _progress(self, call: Any, *arguments: object) -> tuple[ProgressKind, str]:
        """Translate a state. Errors are raised by the bindings, never returned."""
        try:
            status = call(*arguments)
        except self._nixl.nixlRemoteDisconnectError as error:
            return Progress.FAILED, f"the endpoint is disconnected: {error}"
        except Exception as error:  # noqa: BLE001 - NOT_FOUND and the like: it may still move
            return Progress.DOUBT, f"{type(error).__name__}: {error}"
        if status == self._nixl.NIXL_SUCCESS:
            return Progress.DONE, ""
        return Progress.PENDING, ""

    def _segment(self, memory: MemoryKind) -> Any:
        return self._nixl.VRAM_SEG if memory == "vram" else self._nixl.DRAM_SEG

    def _descriptors(
        self, memory: MemoryKind, addresses: Int64Array, lengths: Int64Array, device: int
    ) -> Any:
        """Shapes: addresses, lengths int64[n]. NIXL copies rows of (address, bytes, device)."""
        rows = np.empty((len(addresses), 3), dtype=np.int64)
        rows[:, 0] = addresses
        rows[:, 1] = lengths
        rows[:, 2] = device
        return self._nixl.nixlXferDList(self._segment(memory), rows)

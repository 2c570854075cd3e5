"""What an operator chooses. Frozen, units in the names, unknown fields refused."""

from __future__ import annotations

import ipaddress

import msgspec

from . import limits
from .errors import UsageError


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine.

    name: the engine's name, which its peers check; 1 to 128 bytes.
    listen: "host:port" to accept targets on (port 0: any free one); None for a pure target.
    allow_unauthenticated: needed to listen beyond loopback, while there is no authentication.
    match_s, stall_s, total_s: default deadlines of transfers.
    permit_ttl_s: how long a source may post after it asked last.
    dial_s: how long one attempt to reach a peer may take.
    close_s: how long closing waits for running writes to settle.
    peer_posted_bytes_max, peer_posted_writes_max: the window of one peer. A write that is alone,
      or no larger than an equal share of the window, may exceed its bytes.
    sends_max, receives_max: transfers that may exist at once; more get `Busy`.
    """

    name: str
    listen: str | None = None
    allow_unauthenticated: bool = False
    match_s: float = limits.MATCH_S
    stall_s: float = limits.STALL_S
    total_s: float = limits.TOTAL_S
    permit_ttl_s: float = limits.PERMIT_TTL_S
    dial_s: float = limits.DIAL_S
    close_s: float = limits.CLOSE_S
    peer_posted_bytes_max: int = limits.PEER_POSTED_BYTES_MAX
    peer_posted_writes_max: int = limits.PEER_POSTED_WRITES_MAX
    sends_max: int = limits.SENDS_MAX
    receives_max: int = limits.RECEIVES_MAX
    offers_waiting_max: int = limits.OFFERS_WAITING_MAX

    def __post_init__(self) -> None:
        """Raises UsageError that names the field out of bounds."""
        if not 1 <= len(self.name.encode()) <= limits.PEER_NAME_BYTES_MAX:
            raise UsageError(
                f"config.name has {len(self.name.encode())} bytes, "
                f"must be 1 to {limits.PEER_NAME_BYTES_MAX}"
            )
        for field in ("match_s", "stall_s", "total_s", "permit_ttl_s", "dial_s"):
            value = getattr(self, field)
            if not 0 < value < 1e6:
                raise UsageError(f"config.{field} is {value}, must be over 0 and under 1e6")
        if not 0 <= self.close_s < 1e6:
            raise UsageError(f"config.close_s is {self.close_s}, must be 0 to 1e6")
        for field in (
            "peer_posted_bytes_max",
            "peer_posted_writes_max",
            "sends_max",
            "receives_max",
            "offers_waiting_max",
        ):
            value = getattr(self, field)
            if value < 1:
                raise UsageError(f"config.{field} is {value}, must be at least 1")
        if self.listen is not None and not self.allow_unauthenticated and not self._is_loopback():
            raise UsageError(
                f"config.listen is {self.listen!r}: without authentication only loopback may be "
                "listened on; set allow_unauthenticated=True on a network that you trust"
            )

    def _is_loopback(self) -> bool:
        host = (self.listen or "").rpartition(":")[0].strip("[]")
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"  # any other name may lead anywhere

"""Names of transfers and peers: compared whole, never parsed or matched in part."""

from __future__ import annotations

import msgspec

from .errors import UsageError
from .limits import REQUEST_ID_BYTES_MAX

_ATTEMPT_MAX = 2**32 - 1
_BRANCH_MAX = 2**16 - 1


class Key(msgspec.Struct, frozen=True, order=True):
    """Names one transfer: a request, which attempt at it, and which of its receivers.

    request: at most 128 bytes of UTF-8, not empty.
    attempt: 0 to 2**32 - 1; a higher attempt of a branch supersedes the lower ones.
    branch: 0 to 2**16 - 1; tells several receivers of one request apart.
    """

    request: str
    attempt: int = 0
    branch: int = 0

    def check(self) -> Key:
        """Return self. Raises UsageError that names the field out of bounds."""
        check_request(self.request)
        _check_number("attempt", self.attempt, _ATTEMPT_MAX)
        _check_number("branch", self.branch, _BRANCH_MAX)
        return self

    @property
    def is_valid(self) -> bool:
        """What `check` checks, without raising."""
        try:
            self.check()
        except UsageError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.request}#{self.attempt}.{self.branch}"


class Peer(msgspec.Struct, frozen=True):
    """Another engine: the name that its identity is checked against, and where it listens."""

    name: str
    address: str


def check_request(request: str) -> str:
    """Return `request`. Raises UsageError unless it is 1 to 128 bytes of UTF-8."""
    if not isinstance(request, str):
        raise UsageError(f"request id is {request!r}, must be a str")
    try:
        size = len(request.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"request id {request!r} is not valid UTF-8: {error}") from None
    if not 1 <= size <= REQUEST_ID_BYTES_MAX:
        raise UsageError(
            f"request id has {size} bytes of UTF-8, must be 1 to {REQUEST_ID_BYTES_MAX}"
        )
    return request


def _check_number(field: str, value: int, high: int) -> None:
    if type(value) is not int:  # what is no plain integer fails on its way to the peer
        raise UsageError(f"key.{field} is {value!r}, must be an int")
    if not 0 <= value <= high:
        raise UsageError(f"key.{field} is {value}, must be 0 to {high}")

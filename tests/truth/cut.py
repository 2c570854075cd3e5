"""Two network namespaces joined by a bridge in a third, so that the path between can be cut.

The bridge goes down, not an endpoint's link: both ends keep carrier, address and route and just
hear nothing, as behind a broken switch. Two rules: every address lies inside namespaces made
here; what an earlier, killed run left behind is removed before anything new is made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import count
from pathlib import Path

_PREFIX = "kvferry-truth"
_NAMESPACES = Path("/run/netns")
_numbers = count()


def missing_privilege() -> str:
    """Why namespaces can't be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "the `ip` command (iproute2) is not installed"
    name = _name("try")
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"`ip netns add` needs CAP_SYS_ADMIN and CAP_NET_ADMIN: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def remove_leftovers() -> None:
    """Delete the namespaces of runs whose process is gone."""
    if not _NAMESPACES.is_dir():
        return
    for entry in _NAMESPACES.iterdir():
        if not entry.name.startswith(_PREFIX):
            continue
        owner = entry.name.split("-")[2]
        if not Path(f"/proc/{owner}").exists():
            _ip("netns", "del", entry.name, check=False)


class CutNetwork:
    """Namespaces for a source and a target, at 10.78.0.1 and 10.78.0.2, device `data0`."""

    device = "data0"

    def __init__(self) -> None:
        self._switch, self._names = _name("switch"), (_name("source"), _name("target"))
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        for number, name in enumerate(self._names, 1):
            port = f"port{number}"
            _ip("netns", "add", name)
            veth = ("type", "veth", "peer", "name", self.device, "netns", name)
            _ip("-n", self._switch, "link", "add", port, *veth)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", self.device)
            _ip("-n", name, "link", "set", self.device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self.heal()

    def prefix(self, role: str) -> tuple[str, ...]:
        """The words that run a command as `role` ("source" or "target")."""
        return ("ip", "netns", "exec", self._names[role == "target"])

    def cut(self) -> None:
        _ip("-n", self._switch, "link", "set", "bridge0", "down")

    def heal(self) -> None:
        _ip("-n", self._switch, "link", "set", "bridge0", "up")

    def close(self) -> None:
        for name in (self._switch, *self._names):
            _ip("netns", "del", name, check=False)


def _name(role: str) -> str:
    return f"{_PREFIX}-{os.getpid()}-{next(_numbers)}-{role}"


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)

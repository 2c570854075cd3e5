"""What NIXL and UCX say of themselves, asked in a process of their own.

Two rules: whatever those libraries do (print, crash, abort), the asking process gets a `Probed`;
and the lanes are those that UCX itself has chosen, not a guess from its settings.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from ..transports.nixl import agent

ANSWER_S: Final = 60.0  # NIXL imports torch, which takes seconds where nothing is cached
CHOOSING: Final = ("UCX_TLS", "UCX_NET_DEVICES")  # what UCX reads anew for each context
_AM_RMA: Final = 1 << 0 | 1 << 1 | 1 << 6  # Source: ucp_feature of ucp/api/ucp.h: TAG, RMA, AM
_FIELD_FEATURES: Final = 1 << 0  # Source: ucp_params_field of ucp/api/ucp.h


class Probed(msgspec.Struct, frozen=True):
    """Empty fields are those that could not be found out.

    trouble: why NIXL can't be imported. package: whose bindings are loaded. installed: versions of
    NIXL's distributions. plugins: NIXL's backends by name. backend_trouble: why UCX can't be
    opened. lanes: "transport/device" that UCX takes with the settings in force; lanes_unset:
    without those of `CHOOSING`. modules_preset: UCX_MODULES, where kvferry chose it and not the
    user. said: UCX's own warnings and errors.
    """

    trouble: str = ""
    package: str = ""
    installed: dict[str, str] = {}
    plugins: list[str] = []
    backend_trouble: str = ""
    ucx_version: str = ""
    ucx_library: str = ""
    lanes: list[str] = []
    lanes_unset: list[str] = []
    modules_preset: str = ""
    said: list[str] = []


def probe() -> Probed:
    """Ask in a new process; takes about as long as importing torch. Never raises for its end."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probed(f"NIXL did not load within {ANSWER_S:g} s", installed=_installed())
    said = ucx_words(done.stderr)
    try:
        return msgspec.structs.replace(msgspec.json.decode(done.stdout, type=Probed), said=said)
    except msgspec.MsgspecError:
        how = f"the process that loaded NIXL ended {ending(done.returncode)}"
        return Probed(how + last_line(done.stderr), installed=_installed(), said=said)


def ending(code: int) -> str:
    """How a process ended, in words, from its return code."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def last_line(stderr: str) -> str:
    """The last line that a process wrote, behind a colon; nothing when it wrote none."""
    return "".join(f": {line}" for line in stderr.strip().splitlines()[-1:])


def ucx_words(stderr: str) -> list[str]:
    """UCX's warnings and errors in what a process wrote, each once, without time and source."""
    found = []
    for line in stderr.splitlines():
        for level in ("  WARN", "  ERROR"):
            _, cut, text = line.partition(f"UCX{level}")
            if cut:
                found.append(" ".join(text.split()))
    return list(dict.fromkeys(found))


def _installed() -> dict[str, str]:
    found = {}
    for name in ("nixl", "nixl-cu12", "nixl-cu13"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------- in the process of its own


def main() -> None:
    """Print a `Probed` as JSON, and leave before any library's exit handlers run."""
    pipe = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    told = msgspec.json.encode(_look())
    os.write(pipe, told)
    os._exit(0)


def _look() -> Probed:
    chosen = os.environ.get("UCX_MODULES")
    try:
        bindings = agent.bindings()
    except Exception as error:  # noqa: BLE001  a wheel may fail with anything: it is the answer
        return Probed(_words(error), installed=_installed())
    found: dict[str, Any] = {
        "package": bindings.__name__.partition(".")[0],
        "installed": _installed(),
        "modules_preset": "" if chosen is not None else os.environ.get("UCX_MODULES", ""),
    }
    try:
        bare = bindings.nixlAgent("kvferry-probe", bindings.nixlAgentConfig())
        found["plugins"] = sorted(bare.getAvailPlugins())
        agent.create_agent("kvferry-doctor", 1000)
    except Exception as error:  # noqa: BLE001  as above
        found["backend_trouble"] = _words(error)
    # The plugin has loaded UCX, wherever it lies, also when it could not be opened.
    if library := _loaded("libucp"):
        ucp = ctypes.CDLL(library)
        ucp.ucp_get_version_string.restype = ctypes.c_char_p
        found["ucx_library"] = library
        found["ucx_version"] = ucp.ucp_get_version_string().decode()
        found["lanes"] = _lanes(ucp)
        for name in CHOOSING:
            os.environ.pop(name, None)
        found["lanes_unset"] = _lanes(ucp)
    return Probed(**found)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _loaded(name: str) -> str:
    """The path of a library that this process has loaded; empty when it has not, or can't tell."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if os.path.basename(path).startswith(name):
            return path
    return ""


def _lanes(ucp: Any) -> list[str]:
    """The resources of a UCX context as NIXL makes one, under the settings of this moment."""
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, numbers))
    params = (ctypes.c_uint64 * 64)(_FIELD_FEATURES, _AM_RMA)  # the rest is not read
    context = ctypes.c_void_p()
    if ucp.ucp_init_version(*numbers[:2], params, None, ctypes.byref(context)):
        return []
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    memory = os.memfd_create("lanes")
    stream = ctypes.c_void_p(libc.fdopen(memory, b"w"))
    ucp.ucp_context_print_info(context, stream)
    libc.fflush(stream)
    text = os.pread(memory, 1 << 20, 0).decode()
    # "#      resource 1  :  md 1  dev 1  flags -- tcp/eth0"
    return [line.split()[-1] for line in text.splitlines() if line[1:].split()[:1] == ["resource"]]


if __name__ == "__main__":
    main()

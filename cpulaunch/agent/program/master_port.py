"""Reserve MASTER_PORT on rank 0 until torch's store listens there, so that no other user can take it.

The agent binds a socket to the port and passes it to the program.  The bootstrap keeps this socket open until
Python ends.  Torch's store shares the port through a second socket, which only the same user can bind
(`runtime.change.torch`).  If the program binds the port in another way, the bootstrap closes its own socket.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping

from cpulaunch import variables
from cpulaunch.errors import HostError
from cpulaunch.wording import PORT_IS_TAKEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

RELEASE_TIMEOUT = 5.0
"""Seconds to wait until the launcher, which also reserves the port, has closed its socket."""


def keep_port(env: Mapping[str, str], host: str) -> socket.socket | None:
    """Bind a socket that reserves MASTER_PORT for the program, which has the environment ``env``.

    None if torch isn't patched, or if MASTER_PORT is not a number.  ``host`` is this host's name.  Raises
    HostError if another process has the port.
    """
    if env.get(variables.AS_WRITTEN) == "1" or env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return None
    text = env.get("MASTER_PORT", "")
    if not text.isascii() or not text.isdigit():
        return None
    from cpulaunch.discovery.host import master_port

    try:
        return master_port.keep(int(text), os.environ.get(variables.KEPT_PORT))
    except OSError as e:
        raise HostError(f"MASTER_PORT {text} of {host}: {e.strerror or e}", hint=PORT_IS_TAKEN) from None


class KeptPort:
    """The program's end of the reservation."""

    def __init__(self, fd: int, port: int) -> None:
        self._fd, self._port = fd, port
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=self.release)  # a child may outlive the rank

    def release(self) -> bool:
        """Close the socket.  Return whether it was open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return fd >= 0

    def torch_is_loaded(self, _: object) -> None:
        """Close the socket if torch's store is not patched to share the port."""
        changes = sys.modules.get("cpulaunch.runtime.change.torch")
        if not getattr(changes, "listens_on_kept_port", False):
            self.release()

    def socket_is_loaded(self, module: Any) -> None:
        """Patch ``socket.bind`` to release the port if the program binds it."""
        original = module.socket.bind

        def bind(bound: Any, address: Any) -> None:
            try:
                original(bound, address)
            except OSError as e:
                wanted = isinstance(address, tuple) and address[1] == self._port
                if e.errno != errno.EADDRINUSE or not wanted or not self.release():
                    raise
                _bind_soon(original, bound, address)

        module.socket.bind = bind


def _bind_soon(bind: Callable[[Any, Any], object], unbound: Any, address: Any) -> None:
    deadline = time.monotonic() + RELEASE_TIMEOUT
    while True:
        try:
            bind(unbound, address)
            return
        except OSError as e:
            if e.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.01)

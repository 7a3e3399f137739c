"""Close this process's connections to its peers, so that a blocked gloo collective returns with an error.

gloo has no abort: in torch 2.11 to 2.13 ``ProcessGroup.abort()`` and ``shutdown()`` leave a waiting collective waiting.
Shutting its TCP connections down ends every collective that runs on them, here and on the peers, within milliseconds.
"""

import gc
import os
import socket


def cut_connections(spare_ports=()):
    """Shut down this process's TCP connections that no Python object owns; how many there were. Linux only.

    gloo's sockets belong to C++; a Python client's (a tracker, an HTTP pool) are left alone, and so is every connection
    with one of ``spare_ports`` (int) at either end: the store's. No file descriptor is closed: their owners do that.
    """
    owned = {s.fileno() for s in gc.get_objects() if issubclass(type(s), socket.socket)}
    return sum(_cut(fd, spare_ports) for fd in _socket_fds() if fd not in owned)


def _socket_fds():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:
            pass  # the listing's own descriptor, closed by now


def _cut(fd, spare_ports):
    try:
        with socket.socket(fileno=os.dup(fd)) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
                return False
            if {end.getsockname()[1], end.getpeername()[1]} & set(spare_ports):
                return False
            end.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # a listener, or gone already

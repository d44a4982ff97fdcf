"""A link between a connecting rank and a listening one on which bytes take their time."""

import contextlib
import socket
import threading
import time


class SlowLink:
    """Listens in another socket's place, and passes what comes on to it and back.

    Towards the listening rank bytes wait while ``held`` is set, and travel at ``bytes_per_s`` afterwards.
    """

    def __init__(self, target, bytes_per_s=float("inf")):
        self._door, self._target = socket.create_server(("127.0.0.1", 0)), target
        self.address = self._door.getsockname()[:2]
        self.held, self._bytes_per_s = threading.Event(), bytes_per_s
        self._sockets = [self._door]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                threading.Thread(target=self._carry, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source, target, is_slow):
        with contextlib.suppress(OSError):
            while data := source.recv(16 * 1024):
                if is_slow:
                    while self.held.is_set():
                        time.sleep(0.01)
                    time.sleep(len(data) / self._bytes_per_s)
                target.sendall(data)
            while is_slow and self.held.is_set():
                time.sleep(0.01)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        for each in self._sockets:
            each.close()

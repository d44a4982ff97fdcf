"""The program of a worker of ``tr.run``: read a function from a file, call it, and write down what it returns.

``functions`` starts it by its path, and not by its name: the worker has the import path of the process that called
``tr.run`` before it imports anything else.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import traceback
from pathlib import Path

__all__ = ["main"]


def main(folder: Path) -> int:
    """Call the function that lies in a folder; return the exit code.

    The file ``call`` has the import path, the source of interactive cells, and the pickled call: a function, its
    positional and its keyword arguments. The result is written to ``result<rank>``, or the traceback of an error, from
    the function on, to ``error<rank>``.
    """
    rank = os.environ["RANK"]
    path, sources, call = pickle.loads((folder / "call").read_bytes())  # noqa: S301  (written by this user's process)
    sys.path[:] = path
    linecache.cache.update(sources)
    import cloudpickle

    try:
        function, args, kwargs = pickle.loads(call)  # noqa: S301
        (folder / f"result{rank}").write_bytes(cloudpickle.dumps(function(*args, **kwargs)))
    except Exception as error:
        # The first frame is this one.
        trace = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(trace)))
        sys.stderr.write(text)
        (folder / f"error{rank}").write_text(text, encoding="utf-8", errors="backslashreplace")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

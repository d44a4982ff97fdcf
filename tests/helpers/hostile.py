"""What another user can put into the place of a file."""

import os


def put(path, kind):
    """Make something that is no file, or one of a terabyte; return whether ``kind`` is one of these."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a huge file":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        return False
    return True

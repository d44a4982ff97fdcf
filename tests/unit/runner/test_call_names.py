"""How messages call operations that have no name, and which threads share such operations."""

import _thread
import threading

import pytest

from totalreduce.foundation.call_names import call_name, in_words, track_and_number
from totalreduce.runner.callers import Callers


@pytest.mark.parametrize(
    ("name", "words", "track", "number"),
    [
        ("layer4.weight", "tensor 'layer4.weight'", "layer4.weight", ""),
        ("barrier#7", "tensor 'barrier#7'", "barrier", "7"),
        ("block #3 weight", "tensor 'block #3 weight'", "block #3 weight", ""),
        (call_name("all_reduce", 13, "of the default group"), None, "all_reduce of the default group", "13"),
        (
            call_name("all_gather", 2, "in a callback of all_reduce #7 of group 'mine' (ranks 0, 1)"),
            None,
            "all_gather in a callback of all_reduce of group 'mine' (ranks 0, 1)",
            "2",
        ),
        ("message from rank 0 to rank 1 with tag 5", None, "message from rank 0 to rank 1 with tag 5", ""),
    ],
)
def test_words_and_tracks(name: str, words: str | None, track: str, number: str) -> None:
    assert in_words(name) == (name if words is None else words)
    assert track_and_number(name) == (track, number)


def test_threads_share_operations_if_python_has_started_them() -> None:
    """Calls in threads of the autograd engine are ordered with those of the thread that waits for them."""
    callers, has_noted, is_over = Callers(), threading.Event(), threading.Event()

    def run_engine() -> None:
        callers.note(7)
        has_noted.set()
        is_over.wait(20)  # until then, no other thread has its number

    callers.note(7)
    _thread.start_new_thread(run_engine, ())
    assert has_noted.wait(20)
    assert callers.advice(7) == ""
    other = threading.Thread(target=callers.note, args=(7,), name="checkpoint")
    other.start()
    other.join()
    is_over.set()
    name = threading.current_thread().name
    assert callers.advice(7).startswith(f"The threads '{name}', 'checkpoint' of this process have called collectives")
    assert callers.advice(8) == ""

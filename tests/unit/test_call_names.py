"""How messages call operations that have no name."""

import pytest

from totalreduce.foundation.call_names import call_name, in_words, track_and_number


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

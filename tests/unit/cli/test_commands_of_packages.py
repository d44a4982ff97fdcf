"""Commands that other packages add below ``totalreduce bench``."""

import pytest
from commands import invoke

import totalreduce as tr
from totalreduce.cli import main


@pytest.fixture
def added():
    """A function that adds a command, which the end of the test removes."""
    names = []

    def add(name, command):
        main.COMMANDS.add(name, command)
        names.append(name)

    yield add
    for name in names:
        main.COMMANDS.remove(name)


def show(number: int = 3) -> None:
    """Print a number."""
    print(f"the number is {number}")


def test_a_dot_in_the_name_of_a_command_puts_it_below_another_one(added):
    added("bench.shown", show)
    assert "the number is 5" in invoke("bench", "shown", "--number", 5).output
    assert "Print a number." in invoke("bench", "--help").output


def test_nothing_can_be_added_below_a_command_that_does_something(added):
    added("doctor.shown", show)
    with pytest.raises(tr.ConfigurationError, match="below 'doctor', which is a command itself"):
        main.build(["doctor"])


def test_a_command_of_bench_is_imported_alone(monkeypatch):
    """``bench allreduce`` waits for no other benchmark, and not for one that is broken."""
    asked = []
    monkeypatch.setattr(main, "_add", lambda app, name, command: asked.append(name))
    main._build_for(["bench", "allreduce", "-n", "2"])
    assert asked == ["allreduce"]

"""Items by name, of this package and of others."""

from importlib.metadata import EntryPoint

import pytest

from totalreduce.foundation import extensions
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.extensions import Extensions
from totalreduce.schedules import SCHEDULES, ring


def check(name, item):
    if not isinstance(item, int):
        raise ConfigurationError(f"{name} is no number")
    return item


@pytest.fixture
def numbers(monkeypatch):
    declared = [
        EntryPoint("three", "builtins:abs", "some.group"),
        EntryPoint("missing", "no_such_module:x", "some.group"),
        EntryPoint("one", "no_such_module:x", "some.group"),
        EntryPoint("alpha", "calendar:MONDAY", "some.group"),
    ]
    asked = []

    def entry_points(group):
        asked.append(group)
        return declared

    monkeypatch.setattr(extensions, "entry_points", entry_points)
    made = Extensions("number", "some.group", {"one": 1, "two": 2}, check)
    assert asked == []  # the installed packages are looked at when somebody asks
    return made


def test_the_own_items_come_first_and_cannot_be_replaced(numbers):
    assert list(numbers) == ["one", "two", "alpha", "missing", "three"]
    assert len(numbers) == 5
    assert numbers["one"] == 1
    with pytest.raises(ConfigurationError, match="there is a number called 'one' already"):
        numbers.add("one", 5)


def test_an_item_of_another_package_is_imported_when_it_is_asked_for(numbers):
    assert "alpha" in numbers
    assert numbers["alpha"] == 0
    assert numbers.added() == ["alpha", "missing", "three"]


def test_errors_name_the_item_and_where_it_comes_from(numbers):
    with pytest.raises(ConfigurationError, match="number 'four' is not known; there are 'one', 'two', 'alpha'"):
        numbers["four"]
    with pytest.raises(ConfigurationError, match="number 'missing' of an installed package cannot be imported"):
        numbers["missing"]
    with pytest.raises(ConfigurationError, match="three is no number"):
        numbers["three"]


def test_a_program_adds_and_removes(numbers):
    numbers.add("ten", 10)
    assert (numbers["ten"], numbers.added()) == (10, ["alpha", "missing", "ten", "three"])
    numbers.remove("ten")
    assert "ten" not in numbers
    numbers.remove("one")
    assert numbers["one"] == 1
    with pytest.raises(ConfigurationError, match="word is no number"):
        numbers.add("word", "word")


def test_a_schedule_has_the_name_under_which_it_is_added():
    with pytest.raises(ConfigurationError, match="name='other'"):
        SCHEDULES.add("other", ring.SCHEDULES)
    assert "other" not in SCHEDULES

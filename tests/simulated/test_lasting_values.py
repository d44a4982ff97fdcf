"""What is in the store again after the process that served it was lost."""

from memberships import MemoryStore

from totalreduce.recovery.assembly import BEGUN, Assembly
from totalreduce.recovery.launcher_store import FIRST_EPOCH, LauncherStore
from totalreduce.recovery.membership import Policy


class Server:
    """A store in memory that can be lost, and begin anew."""

    def __init__(self) -> None:
        self.store = MemoryStore({FIRST_EPOCH: b"1"})

    def assembly(self, seat: int) -> Assembly:
        return Assembly(LauncherStore(lambda _timeout_s: self.store), Policy("replace", 3), seat, 0, lambda: 0.0)

    def begin_anew(self) -> None:
        self.store.is_lost = True
        self.store = MemoryStore({FIRST_EPOCH: b"1001"})


def test_a_job_that_has_begun_has_begun_in_the_next_store_too() -> None:
    server = Server()
    first, second = server.assembly(0), server.assembly(1)
    assert not second.has_begun()
    first.begin()
    assert second.has_begun()
    server.begin_anew()
    assert not second.has_begun()
    assert first.has_begun()
    assert second.has_begun()


def test_a_process_says_once_that_the_job_has_begun() -> None:
    server = Server()
    assembly = server.assembly(0)
    assembly.begin()
    del server.store.values[BEGUN]
    assembly.begin()
    assert BEGUN not in server.store.values


def test_a_value_outlives_the_process_that_has_set_it() -> None:
    server = Server()
    assert server.assembly(0).first_value("links", "measured") == "measured"
    reader = server.assembly(1)
    assert (reader.value("links"), reader.value("other")) == ("measured", "")
    server.begin_anew()
    assert reader.value("links") == "measured"
    assert server.assembly(2).first_value("links", "another one") == "measured"

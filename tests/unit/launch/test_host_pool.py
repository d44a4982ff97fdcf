"""Lists of hosts, and which seat runs on which host."""

import os
import random
from pathlib import Path

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.hosts import Host, HostPool, Place, Update, parse_host_file, parse_hosts
from totalreduce.launch.placement import (
    HostOptions,
    HostsFile,
    is_this_host,
    launcher_address,
    read_host_file,
    ssh_command,
)


def test_lists_of_hosts() -> None:
    assert parse_hosts("node0:4, user@node1:2,10.0.0.3") == (
        Host("node0", 4),
        Host("user@node1", 2),
        Host("10.0.0.3", 1),
    )
    assert Host("user@node1", 2).address == "node1"
    text = "# the cluster\nnode0:4\nnode1 slots=2  # small\n\nnode2\nnode1 slots = 1\n"
    assert parse_host_file(text, "hosts") == (Host("node0", 4), Host("node1", 3), Host("node2", 1))


@pytest.mark.parametrize(
    "text", ["", "node0:", "node0:-1", "-oProxyCommand=x:1", "a b", "node0:4,,", "[::1]:4", "a:999999"]
)
def test_a_word_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--hosts"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("node0:4\nnode1 slots=x\n", "hosts, line 2: 'node1 slots=x' is no host"),
        ("node0:4\n-v\n", "hosts, line 2: '-v' is no host"),
        ("# nobody\n", "hosts has no host"),
        ("node0:0", "hosts: host 'node0' has 0 slots"),
        ("node0:40000\nnode1:40000", "hosts has 80000 slots, and at most 65536"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_line(text: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        parse_host_file(text, "hosts")


def pool_of(text: str, seats: int = 0) -> HostPool:
    pool = HostPool(parse_hosts(text))
    for seat in range(seats):
        pool.place(seat)
    return pool


def hosts_of(pool: HostPool, seats: int) -> list[str]:
    places = [pool.place_of(seat) for seat in range(seats)]
    return ["" if place is None else place.host for place in places]


def test_hosts_are_filled_in_their_order() -> None:
    pool = pool_of("a:2,b:4", 5)
    assert hosts_of(pool, 6) == ["a", "a", "b", "b", "b", ""]
    assert [pool.place_of(seat) for seat in (1, 2, 4)] == [
        Place("a", 0, 1, 2),
        Place("b", 1, 0, 3),
        Place("b", 1, 2, 3),
    ]
    assert [pool.place(seat) for seat in (5, 6)] == ["b", None]


def test_a_seat_stays_on_its_host_unless_that_is_blacklisted() -> None:
    pool = pool_of("a:2,b:2", 3)
    assert pool.place(0) == "a"
    assert pool.failed("a", 0.0, after_s=0.1, is_reached=False) == 10.0
    assert pool.usable == ("b",)
    assert pool.place(0) == "b"
    assert pool.place(1) is None
    assert pool.returned(9.9) == ()
    assert pool.returned(10.0) == ("a",)
    assert pool.place(1) == "a"
    assert pool.place_of(1) == Place("a", 0, 1, 2), "its local rank is below the number of workers of the host"


def test_cool_downs_double_up_to_a_limit_and_begin_anew_after_a_worker_that_ran_for_long() -> None:
    pool, now, seen = pool_of("a:4,b:4"), 0.0, []
    for _ in range(6):
        seen.append(pool.failed("a", now, after_s=5.0, is_reached=False))
        assert pool.failed("a", now, after_s=5.0, is_reached=False) is None, "it is blacklisted already"
        now += seen[-1]
        assert pool.returned(now) == ("a",)
    assert seen == [10.0, 20.0, 40.0, 80.0, 100.0, 100.0]
    assert pool.failed("a", now, after_s=61.0, is_reached=True) is None
    assert pool.failed("a", now, after_s=5.0, is_reached=False) == 10.0
    assert pool.failed("nobody", now, after_s=0.0, is_reached=False) is None


def test_a_host_is_blacklisted_after_three_workers_that_failed_soon() -> None:
    pool = pool_of("a:4,b:4")
    failures = [5.0, 59.0, 60.0, 1.0, 1.0, 1.0]
    seen = [pool.failed("a", 0.0, after_s=after_s, is_reached=True) for after_s in failures]
    assert seen == [None, None, None, None, None, 10.0]
    assert pool.usable == ("b",)


def test_seats_of_a_host_that_leaves_are_displaced_and_move_to_free_slots() -> None:
    pool = pool_of("a:2,b:2", 4)
    assert pool.update(parse_hosts("b:3,c:1")) == Update((Host("b", 3), Host("c", 1)), ("a",), (0, 1))
    assert hosts_of(pool, 4) == ["", "", "b", "b"]
    assert [pool.place(seat) for seat in (0, 1, 4)] == ["b", "c", None]
    assert pool.place_of(1) == Place("c", 2, 0, 1)
    assert pool.update(parse_hosts("b:1,c:1,a:2")) == Update((Host("a", 2),), ("b",), (0, 3))
    assert pool.place_of(2) == Place("b", 1, 0, 1)
    assert pool.place(0) == "a"
    assert pool.place_of(0) == Place("a", 0, 0, 1), "a host keeps its number"


def test_spares_take_seats_on_other_hosts_first_in_free_slots() -> None:
    pool = pool_of("a:1,b:1,c:2,d:2", 4)
    assert hosts_of(pool, 4) == ["a", "b", "c", "c"]
    pool.failed("a", 0.0, after_s=0.0, is_reached=False)
    assert pool.place(0, {"b": 1, "d": 1}) == "d"
    pool.place(4)
    pool.failed("b", 0.0, after_s=0.0, is_reached=False)
    assert pool.place(1) is None
    assert pool.place(1, {"b": 1, "c": 1}) == "c", "a spare is a place beyond the slots of its host"
    assert pool.place_of(1) == Place("c", 2, 2, 3)
    assert pool.update(parse_hosts("a:1,b:1,c:1,d:2")).displaced == (3,), "and stays when the host has fewer slots"


def test_random_changes_keep_the_promises_of_a_pool() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        names = ["a", "b", "c", "d"]
        pool, now = HostPool([Host("a", 2)]), 0.0
        for _ in range(40):
            now += chance.uniform(0.0, 20.0)
            pool.returned(now)
            action = chance.random()
            if action < 0.2:
                listed = chance.sample(names, chance.randint(1, 4))
                pool.update([Host(name, chance.randint(1, 3)) for name in listed])
            elif action < 0.4:
                pool.failed(chance.choice(names), now, after_s=chance.uniform(0, 90), is_reached=chance.random() < 0.5)
            else:
                host = pool.place(seat := chance.randrange(8))
                place = pool.place_of(seat)
                assert (host is None) == (place is None or place.host not in pool.usable)
            places = [place for seat in range(8) if (place := pool.place_of(seat)) is not None]
            assert all(place.local_rank < place.local_world_size for place in places)
            assert len({(place.host, place.local_rank) for place in places}) == len(places)
            assert all(place.local_rank < pool.slots_of(place.host) for place in places)


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_change_of_the_file_counts_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\n")
    file = HostsFile(path, (Host("a", 2),))
    assert [file.changed(now) for now in (0.0, 1.0, 2.0)] == [None] * 3
    path.write_text("a:2\nb")
    assert file.changed(3.0) is None
    path.write_text("a:2\nb:4\n")
    assert (file.changed(4.0), file.changed(4.5)) == (None, None)
    assert file.changed(5.0) == (Host("a", 2), Host("b", 4))
    assert file.changed(6.0) is None
    path.write_text("a:2\nb:x\n")
    assert file.changed(7.0) is None
    with pytest.raises(ConfigurationError, match=r"hosts, line 2: 'b:x'"):
        file.changed(8.0)
    assert file.changed(9.0) is None
    path.unlink()
    assert [file.changed(now) for now in (10.0, 11.0, 12.0)] == [None] * 3
    path.write_text("c:1\n")
    os.utime(path, (1.0, 1.0))
    assert [file.changed(now) for now in (13.0, 14.0)] == [None, (Host("c", 1),)]


def test_a_change_between_the_first_reading_and_the_first_look_counts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\n")
    hosts = read_host_file(path)
    path.write_text("a:2\nb:4\n")
    file = HostsFile(path, hosts)
    assert [file.changed(now) for now in (0.0, 1.0)] == [(Host("a", 2), Host("b", 4)), None]
    path.write_text("# the same hosts\na:2\nb:4\n")
    assert [file.changed(now) for now in (2.0, 3.0, 4.0)] == [None] * 3


def test_the_address_of_the_launcher() -> None:
    assert is_this_host("localhost")
    assert not is_this_host("127.0.0.1")
    local, other = (Host("localhost", 2),), parse_hosts("localhost:2,127.0.0.3")
    assert launcher_address(HostOptions(hosts=local)) == ("127.0.0.1", "loopback")
    assert launcher_address(HostOptions(hosts=other)) == ("127.0.0.1", "route to 127.0.0.3")
    assert launcher_address(HostOptions(hosts=other, address="10.1.2.3")) == ("10.1.2.3", "--address")
    with pytest.raises(ConfigurationError, match=r"no route leads from here to 'nobody.invalid'.*--address"):
        launcher_address(HostOptions(hosts=parse_hosts("user@nobody.invalid:2")))


def test_the_command_of_ssh() -> None:
    assert ssh_command(port=2222, identity=Path("key"))[-4:] == ("-p", "2222", "-i", "key")
    assert "BatchMode=yes" in ssh_command()

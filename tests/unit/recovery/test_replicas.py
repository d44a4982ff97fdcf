"""Which rank gives the copy of a lost rank's state, and what becomes of the copies that nobody needs any more."""

import torch

from totalreduce.recovery.replicas import Replicas, first_holders


def test_the_first_rank_with_a_copy_gives_it() -> None:
    assert first_holders([[], [5, 2], [2, 0], [0]]) == {5: 1, 2: 1, 0: 2}


def test_copies_of_seats_without_a_rank_are_taken_by_one_rank_and_forgotten_by_all() -> None:
    replicas = Replicas(1)
    replicas.note(3, {seat: torch.tensor([seat]) for seat in (0, 4, 6)})
    assert replicas.seats(3) == []
    replicas.commit()
    assert replicas.seats(3) == [0, 4, 6]
    taken = replicas.take_orphans(replicas.seats(3), seats=[0, 1], mine=[0, 4])
    assert [each.item() for each in taken] == [4]
    assert replicas.seats(3) == [0]

"""Which operation has which stage of a board, and where the stages lie."""

from itertools import pairwise

import numpy as np
import pytest

from totalreduce.fastlane.board import STAGE_CLASSES, BoardLayout
from totalreduce.fastlane.stages import Stages
from totalreduce.kernels import exchange
from totalreduce.kernels.exchange import HEAD

BOARD = BoardLayout(4096)
SMALLEST, LARGEST = STAGE_CLASSES[0], STAGE_CLASSES[-1]


class User:
    def __init__(self, *, is_over=True):
        self.stage, self.is_over, self.asked = None, is_over, 0

    @property
    def is_over(self):
        self.asked += 1
        return self._is_over

    @is_over.setter
    def is_over(self, value):
        self._is_over = value


def give(stages, user, classes):
    number = stages.find(classes)
    if number is not None:
        stages.take(number, user)
    return number


def test_the_stages_follow_each_other_and_end_with_the_board() -> None:
    places = [BOARD.halves(number) for number in range(LARGEST.stop)]
    assert places[0][0] == BOARD.stages_at
    for (first, second), (following, _) in pairwise(places):
        assert following - second == second - first > 0
        assert first % 64 == second % 64 == 0
    first, second = places[-1]
    assert second + (second - first) == BOARD.end


@pytest.mark.parametrize(
    ("num_bytes", "stage_bytes"), [(0, 2048), (2048, 2048), (2049, 8192), (32768, 32768), (1 << 21, 1 << 21)]
)
def test_a_tensor_has_the_shortest_stage_that_is_long_enough(num_bytes: int, stage_bytes: int) -> None:
    assert BOARD.classes(num_bytes)[0].stage_bytes == stage_bytes
    assert BOARD.classes(num_bytes)[-1] is LARGEST


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 62])
def test_the_pieces_of_an_operation_fit_into_its_stage(ranks: int) -> None:
    block = np.zeros(exchange.block_words(ranks), np.int64)
    BOARD.fill(block, ranks)
    assert block[HEAD.stage_bytes] == 2 * (ranks + 1) * block[HEAD.piece_bytes] <= LARGEST.stage_bytes
    BOARD.fill(block, ranks, 10_000)
    assert block[HEAD.piece_bytes] == 10_048
    assert block[HEAD.results_at] == ranks * 10_048
    assert block[HEAD.stage_bytes] == (ranks + 1) * 10_048


def test_every_stage_is_given_once_and_a_longer_one_if_the_short_ones_are_in_use() -> None:
    stages, users = Stages(), [User(is_over=False) for _ in range(LARGEST.stop + 1)]
    numbers = [give(stages, user, STAGE_CLASSES) for user in users]
    assert sorted(numbers[:-1]) == list(range(LARGEST.stop))
    assert numbers[: SMALLEST.stop] == list(range(SMALLEST.stop))
    assert numbers[-1] is None
    assert all(user.stage is not None for user in users[:-1])
    assert users[-1].stage is None


def test_a_stage_whose_operation_is_over_serves_another_one() -> None:
    stages = Stages()
    users = [User(is_over=index == 3) for index in range(LARGEST.stop - LARGEST.first)]
    for user in users:
        give(stages, user, (LARGEST,))
    new = User(is_over=False)
    assert give(stages, new, (LARGEST,)) == new.stage == LARGEST.first + 3
    assert [user.stage is not None for user in users] == [index != 3 for index in range(len(users))]
    stages.release(users[3])  # which has none any more
    assert new.stage is not None
    stages.release(new)
    assert stages.find((LARGEST,)) == LARGEST.first + 3


def test_a_search_asks_few_users_and_goes_on_where_the_last_one_ended() -> None:
    stages, users = Stages(), [User(is_over=False) for _ in range(SMALLEST.stop)]
    for user in users:
        give(stages, user, (SMALLEST,))
    assert stages.find((SMALLEST,)) is None
    asked = [user.asked for user in users]
    assert 0 < sum(asked) <= 16
    assert stages.find((SMALLEST,)) is None
    assert max(user.asked for user in users) == 1

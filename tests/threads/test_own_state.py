"""What a rank has for itself, with ranks as threads: what a new process gets of it, and calls that are repeated."""

import contextlib
import logging
import threading

import pytest
import torch
from optimizer_cases import impatient, repeat_until_done

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.recovery.buffer_copies import Form, _Rows
from totalreduce.recovery.membership import Decision, Member
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.replicas import OwnState
from totalreduce.recovery.sharing import send_state, share_outline
from totalreduce.testing import run_ranks

#: A buffer with so many elements makes the buffers of three ranks too large for rows. They go to the next ranks.
MANY = 20_000


class Model(torch.nn.Module):
    """Its buffers: ``mine`` changes in the forward pass, differently on each rank, and ``average`` after the step."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
        for each in (self.first, self.second):
            torch.nn.init.ones_(each.weight)
        self.register_buffer("mine", torch.zeros(num_elements))
        self.register_buffer("average", torch.zeros(2, 3))


class Process:
    """A process of a job of ``tr.recoverable``, without the launcher."""

    def __init__(self, group, num_elements: int = 5, names=("first",), **options) -> None:
        self.group, self.model, self.num_repeated = group, Model(num_elements), 0
        parts = {name: self.model if options else getattr(self.model, name) for name in names}
        self.wrapped = {
            name: tr.DistributedOptimizer(
                torch.optim.SGD(part.parameters(), lr=0.1),
                part,
                group=group,
                name=name,
                overlap="step",
                buffers=None,
                initial=None,
                **options,
            )
            for name, part in parts.items()
        }
        self.state = tr.State(model=self.model, optimizer=self.wrapped)
        self.optimizers = Optimizers(self.wrapped)
        self.own = OwnState(self.state, self.optimizers, 1)
        self.optimizers.guard(lambda: True, lambda: None, self.optimizers.settle, self.before_step, self.before_commit)

    # What ``Job`` does in a block.

    def before_step(self) -> None:
        self.own.send(self.decision)
        self.own.vote.begin(0, 8)

    def before_commit(self) -> None:
        self.own.end_vote(self.decision)

    def enter(self, group, decision: Decision, *, has_state: bool) -> None:
        if group is not self.group:
            self.group.take_over(group)
            share_outline(self.state, self.group, decision.source)
            self.optimizers.form_again()
        self.decision = decision
        send_state(self.state, self.group, decision.source, decision.newcomers)
        self.own.restore(decision, has_state=has_state)

    def block(self, *, late: float = 0.0, change=None, change_late=None) -> None:
        """Run a block.

        ``late`` makes the buffer that is changed after the step differ from those of other ranks. ``change`` and
        ``change_late`` are called with this process before the vote, and after it.
        """
        self.state.keep()
        self.optimizers.begin_block()
        self.model.mine += 1 + self.group.rank
        if change is not None:
            change(self)
        inputs = torch.full((1, 3), 1.0 + self.group.rank)
        (self.model.first(inputs) + self.model.second(inputs)).sum().backward()
        self.num_repeated += repeat_until_done(self.wrapped["first"].step)
        self.model.average.lerp_(self.model.first.weight.detach() + late, 0.5)
        if change_late is not None:
            change_late(self)
        self.state.count(None)
        self.state.drop_gradients()
        self.optimizers.end_block()
        self.own.commit()


def members(*incarnations: int | None, version: int) -> Decision:
    """A decision: by seat the incarnation, and ``None`` for a seat without a process. New processes have no state."""
    found = enumerate(incarnations)
    made = [Member(seat, each, version > 0 and each == 0) for seat, each in found if each is not None]
    return Decision(1 + version, tuple(made), version)


def train(world_size: int, num_blocks: int, num_elements: int, late: float = 0.0) -> list[Process]:
    def body(group):
        process = Process(group, num_elements)
        process.enter(group, members(*[0] * world_size, version=0), has_state=False)
        for _ in range(num_blocks):
            process.block(late=late * group.rank)
        group.barrier()
        return process

    return run_ranks(world_size, body)


def go_on(processes, decision: Decision, num_elements: int, kind=Process, **options) -> list[Process]:
    """Form a group of processes, where ``None`` stands for a new one, of this kind."""
    found = [each or run_ranks(1, lambda group: kind(group, num_elements, **options))[0] for each in processes]

    def body(group):
        process = found[group.rank]
        process.enter(group, decision, has_state=processes[group.rank] is not None)
        group.barrier()
        return process

    return run_ranks(len(processes), body)


@pytest.mark.parametrize("num_elements", [5, MANY])
def test_a_buffer_that_is_changed_after_the_step_is_not_one_step_old(num_elements: int, caplog) -> None:
    """As the moving average of the parameters: it is equal on all ranks, and its copy was sent before the step."""
    first, second, third = train(3, 4, num_elements)
    average = second.model.average.clone()
    assert not torch.equal(average, torch.zeros(2, 3))
    _, new, _ = go_on([first, None, third], members(0, 1, 0, version=4), num_elements)
    assert torch.equal(new.model.average, average)
    assert new.model.mine.tolist() == [8.0] * num_elements  # what rank 1 had for itself, from its copy
    assert not caplog.records


@pytest.mark.parametrize("num_elements", [5, MANY])
def test_late_buffers_that_differ_between_ranks_are_named(num_elements: int, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="totalreduce")
    first, _, third = train(3, 2, num_elements, late=1.0)
    _, new, _ = go_on([first, None, third], members(0, 1, 0, version=2), num_elements)
    assert torch.equal(new.model.average, first.model.average)
    [record] = caplog.records
    assert (
        "the buffer average differs between ranks, and blocks change it after optimizer.step()" in record.getMessage()
    )
    assert "new ranks get that of rank 0" in record.getMessage()


def test_buffers_of_a_lost_rank_whose_copy_is_lost_too_are_those_of_rank_0(caplog) -> None:
    caplog.set_level(logging.WARNING, logger="totalreduce")
    first, _, _ = train(3, 4, MANY)
    after = go_on([first, None, None], members(0, 1, 1, version=4), MANY)
    words = [record.getMessage() for record in caplog.records]
    assert "its residuals begin at zero, and its buffers are those of rank 0" in words[0]
    assert words[0].startswith("nobody has the residuals and buffers of rank 1")
    assert after[1].model.mine.tolist() == first.model.mine.tolist() == [4.0] * MANY


@pytest.mark.parametrize(
    ("before", "after", "num_elements"),
    [
        ((0, 0, 0, 0), (0, 1, 0, None), 10_000),  # four rows are too large, and three are not
        ((0, 0, 0, None), (0, 1, 0, 1), 10_000),
    ],
)
def test_copies_are_read_in_the_form_in_which_they_were_sent(before, after, num_elements: int) -> None:
    """With ``shrink`` a lost rank is replaced in an epoch of another number of ranks."""
    found = train(sum(each is not None for each in before), 3, num_elements)
    assert (found[0].own._buffers.form is Form.PACKED) == (len(found) == 4)
    kept = [found[0], None, found[2]] + [None] * (after[3] is not None)
    new = go_on(kept, members(*after, version=3), num_elements)
    assert (new[0].own._buffers.form is Form.PACKED) == (len(new) == 4)
    assert new[1].model.mine[:3].tolist() == [6.0] * 3
    assert torch.equal(new[1].model.average, found[0].model.average)
    for process in new:  # the new copies are in the new form
        assert process.own._replicas.seats(3)


def alone(process: Process, decision: Decision, num_blocks: int) -> None:
    """Have a process go on without the others, and run blocks."""

    def body(group):
        process.enter(group, decision, has_state=True)
        for _ in range(num_blocks):
            process.block()

    run_ranks(1, body)


def test_buffers_of_the_forward_pass_are_not_late_on_a_rank_that_is_alone() -> None:
    """It sends nothing that the buffers could be compared with."""
    first, _ = train(2, 3, MANY)
    alone(first, members(0, None, version=3), 2)
    assert first.own._buffers.late == {"average"}


def test_copies_of_a_block_that_was_undone_never_count() -> None:
    """The copies of the third block have come, and a rank is lost before the vote."""
    first, _ = train(2, 2, 5)
    first.own._replicas.note(3, {1: torch.zeros(1, dtype=torch.uint8)})
    alone(first, members(0, None, version=2), 1)
    assert first.state.version == 3
    assert first.own._replicas.seats(3) == []


def test_after_a_begin_from_disk_there_are_copies_before_the_first_vote() -> None:
    def begin(group):
        process = Process(group)
        process.enter(group, members(0, 0, 0, version=0), has_state=False)
        process.state.version = 7
        process.model.mine.fill_(3.0 + group.rank)
        process.own.copy(process.decision)
        group.barrier()
        return process

    first, _, third = run_ranks(3, begin)
    _, new, _ = go_on([first, None, third], members(0, 1, 0, version=7), 5)
    assert new.model.mine.tolist() == [4.0] * 5


# --------------------------------------------------------------------------- buffers that get other shapes, come and go


def grow(process: Process, by: int = 3) -> None:
    process.model.mine = torch.cat([process.model.mine, torch.full((by,), 10.0 + process.group.rank)])


def grow_by_rank(process: Process) -> None:
    grow(process, 1 + process.group.rank)


def shrink_in_place(process: Process) -> None:
    process.model.mine.data = process.model.mine[:2]


def register(process: Process) -> None:
    process.model.first.register_buffer("cache", torch.arange(4.0) + process.group.rank, persistent=False)


def register_on_one(process: Process) -> None:
    if process.group.rank == 1:
        register(process)


def remove_on_one(process: Process) -> None:
    if process.group.rank == 1:
        process.model.scratch = None


def other_dtype(process: Process) -> None:
    process.model.mine = process.model.mine.to(torch.complex64) * (1 + 2j)


def buffers_of(process: Process) -> dict[str, object]:
    return {name: (each.dtype, each.tolist()) for name, each in process.model.named_buffers()}


CHANGES = [grow, grow_by_rank, shrink_in_place, register, register_on_one, remove_on_one, other_dtype]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("num_elements", [5, MANY])
def test_buffers_of_a_lost_rank_are_those_of_its_last_block_whatever_their_shapes(change, num_elements: int) -> None:
    """The rank is lost right after the block that changes them, or after another one."""

    def body(group, num_more):
        process = Process(group, num_elements)
        process.model.register_buffer("scratch", torch.zeros(3), persistent=False)
        process.enter(group, members(0, 0, 0, version=0), has_state=False)
        process.block(change=lambda each: each.model.scratch.add_(1 + each.group.rank))
        process.block(change=change)
        for _ in range(num_more):
            process.block()
        group.barrier()
        return process

    for num_more in (0, 1):
        first, second, third = run_ranks(3, lambda group, num=num_more: body(group, num))
        wanted = [buffers_of(each) for each in (first, second, third)]
        assert wanted[0] != wanted[1]
        after = go_on([first, None, third], members(0, 1, 0, version=2 + num_more), num_elements)
        assert [buffers_of(each) for each in after] == wanted
        assert "first.cache" not in after[1].model.state_dict()


def test_rows_are_used_again_when_all_ranks_have_one_layout_again() -> None:
    """A block whose buffers do not fit the rows is voted on twice, and the next one once."""

    def body(group):
        process = Process(group)
        process.enter(group, members(0, 0, 0, version=0), has_state=False)
        forms, rounds = [], []
        begin_second = process.own.vote.begin_second
        process.own.vote.begin_second = lambda: (rounds.append(process.state.version), begin_second())
        for change in (None, grow, None, grow_by_rank, None, lambda each: grow(each, 4 - each.group.rank), None):
            process.block(change=change)
            forms.append(process.own._buffers.form)
        return forms, rounds

    rows, packed = Form.ROWS, Form.PACKED
    for forms, rounds in run_ranks(3, body):
        assert forms == [rows, rows, rows, packed, packed, rows, rows]
        assert rounds == [1, 3]


def test_a_model_that_gets_its_first_buffer_while_the_job_runs_has_copies_of_it() -> None:
    class Bare(Process):
        def __init__(self, group, num_elements: int = 5) -> None:
            super().__init__(group, num_elements)
            for name in ("mine", "average"):
                delattr(self.model, name)
            self.own = OwnState(self.state, self.optimizers, 1)

        def block(self) -> None:
            self.model.mine = torch.empty(0)  # attributes, which are no buffers
            self.model.average = torch.zeros(2, 3)
            if self.state.version == 1:
                register(self)
            super().block()

    def body(group):
        process = Bare(group)
        process.enter(group, members(0, 0, 0, version=0), has_state=False)
        forms = []
        for _ in range(2):
            process.block()
            forms.append(process.own._buffers.form)
        assert process.own.current() is not None
        return process, forms

    ranks = run_ranks(3, body)
    assert [forms for _, forms in ranks] == [[Form.NOTHING, Form.ROWS]] * 3
    [(first, _), _, (third, _)] = ranks
    after = go_on([first, None, third], members(0, 1, 0, version=2), 5, kind=Bare)
    wanted = [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    assert [each.model.first.cache.tolist() for each in after] == wanted


def test_a_buffer_that_grows_after_the_vote_is_late() -> None:
    def body(group):
        process = Process(group)
        process.enter(group, members(0, 0, 0, version=0), has_state=False)
        process.block()
        process.block(change_late=grow_average)
        group.barrier()
        return process

    def grow_average(process: Process) -> None:
        process.model.average = torch.ones(3, 3)

    first, _, third = run_ranks(3, body)
    assert first.own._buffers.late == {"average"}
    _, new, _ = go_on([first, None, third], members(0, 1, 0, version=2), 5)
    assert new.model.average.tolist() == [[1.0] * 3] * 3
    assert new.model.mine.tolist() == [4.0] * 5


def test_a_block_that_runs_out_of_time_between_two_rounds_of_its_vote_may_be_repeated() -> None:
    """In the second block, whose buffers do not fit the rows, rank 1 is late to the exchange or the second round."""
    for place in ("_send_packed", "second"):
        out_of_time = [threading.Event() for _ in range(3)]

        def body(group, place=place, out_of_time=out_of_time):
            process = Process(group)
            process.enter(group, members(0, 0, 0, version=0), has_state=False)
            where = process.own if place == "_send_packed" else process.own.vote
            name = place if place == "_send_packed" else "begin_second"
            call, step = getattr(where, name), process.wrapped["first"].step

            def delayed(*arguments):
                assert all(out_of_time[rank].wait(20) for rank in (0, 2))
                return call(*arguments)

            def noted():
                try:
                    step()
                except DeadlineExceededError:
                    out_of_time[group.rank].set()
                    raise

            if group.rank == 1:
                setattr(where, name, delayed)
            else:
                process.wrapped["first"].step = noted
            with contextlib.nullcontext() if group.rank == 1 else impatient(group):
                process.own.vote.prepare()
                process.block()
                process.block(change=grow_by_rank)
                process.block()
            group.barrier()
            return process

        first, second, third = run_ranks(3, body)
        assert all(each.num_repeated for each in (first, third))
        wanted = [buffers_of(each) for each in (first, second, third)]
        after = go_on([first, None, third], members(0, 1, 0, version=3), 5)
        assert [buffers_of(each) for each in after] == wanted


@pytest.mark.parametrize("is_frozen", [False, True])
def test_sparse_sessions_go_on_only_with_the_buckets_that_they_had(is_frozen: bool) -> None:
    """After the last block, and before the next one, the program has frozen a layer and planned again.

    The residual of the frozen layer comes from the copy all the same.
    """
    options = {"sync": tr.OkTopk(density=0.2), "feedback": tr.ErrorFeedback(elements_min=1)}

    def begin(group):
        process = Process(group, **options)
        process.enter(group, members(0, 0, version=0), has_state=False)
        for _ in range(2):
            process.block()
        if is_frozen:
            process.model.second.requires_grad_(False)
            process.wrapped["first"].replan()
        group.barrier()
        return process

    def own_of(process):
        compressed = process.wrapped["first"].compressed
        names = {parameter: name for name, parameter in process.model.named_parameters()}
        kept = {names[parameter]: flat.clone() for parameter, flat in compressed.residuals.kept.items()}
        return kept, [state["steps"] for state in compressed.reducer.rounds.state()]

    first, second = run_ranks(2, begin)
    kept, _ = own_of(second)
    assert set(kept) == {"first.weight", "second.weight"}
    assert all(flat.any() for flat in kept.values())
    first, new = go_on([first, None], members(0, 1, version=2), 5, **options)
    for process in (first, new):
        assert own_of(process)[1] == [0 if is_frozen else 2]
    assert new.model.second.weight.requires_grad is not is_frozen
    again, _ = own_of(new)
    assert all(torch.equal(again[name], flat) for name, flat in kept.items())


PLACES = ["step", "send", "begin"]


@pytest.mark.parametrize("names", [("first",), ("first", "second")])
@pytest.mark.parametrize("num_elements", [5, MANY])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_has_run_out_of_time_may_be_repeated(place: str, num_elements: int, names) -> None:
    """In the second block of three, rank 1 is late: to the step, to the exchange of copies, or to the vote."""

    out_of_time = [threading.Event() for _ in range(3)]

    def body(group):
        process = Process(group, num_elements, names)
        process.enter(group, members(0, 0, 0, version=0), has_state=False)

        def delay(call):
            def delayed(*arguments):
                if process.state.version == 1:
                    assert all(out_of_time[rank].wait(20) for rank in (0, 2))
                return call(*arguments)

            return delayed

        def note(step):
            def noted():
                try:
                    step()
                except DeadlineExceededError:
                    out_of_time[group.rank].set()
                    raise

            return noted

        if group.rank == 1:
            where = {"step": process.wrapped["first"], "send": process.own, "begin": process.own.vote}[place]
            setattr(where, place, delay(getattr(where, place)))
        else:
            process.wrapped["first"].step = note(process.wrapped["first"].step)
        with contextlib.nullcontext() if group.rank == 1 else impatient(group):
            # Again: prepared operations keep the time-out of their preparation.
            process.own.vote.prepare()
            if process.own._buffers._rows is not None:
                process.own._buffers._rows = _Rows(process.own._buffers._row, group)
            for _ in range(3):
                process.block()
        group.barrier()
        copies = process.own._replicas
        return process.model.first.weight.tolist(), process.model.mine[0].item(), copies.seats(3), process.num_repeated

    ranks = run_ranks(3, body)
    for rank, (weight, mine, seats, _) in enumerate(ranks):
        assert weight == pytest.approx([pytest.approx([1.0 - 3 * 0.1 * 2.0] * 3)] * 2)
        assert mine == 3.0 * (1 + rank)
        assert seats == [each for each in range(3) if each != rank] if num_elements == 5 else [(rank - 1) % 3]
    assert ranks[0][3] >= 1
    assert ranks[2][3] >= 1


def test_ranks_that_step_different_optimizers_are_told_so_each_time() -> None:
    def body(group):
        process = Process(group, names=("first", "second"))
        process.optimizers.begin_block()
        words = []
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="the ranks step different optimizers in one block") as caught:
                process.optimizers.settle("first" if group.rank else "second")
            words.append(str(caught.value))
        return words

    for first, second in run_ranks(2, body):
        assert first == second

"""The waits of ``tensors/staging.py``; ``tests/processes/test_staging_mutants.py`` has them removed one at a time.

It says the waits first, each as its function and its text. A case is the number of a wait (-1: none is removed), and
returns the scenarios that fail without it, with which kind of late jobs. Two ranks are threads of this process.
"""

import ast
import functools
import inspect
import types

import torch
from fake_accelerator import asked

from totalreduce.tensors import staging
from totalreduce.testing import run_ranks

#: Methods that make a stream or the host wait, or memory wait for a stream. What asks whether to wait is ``query``.
METHODS = {"wait_event", "wait_stream", "synchronize", "record_stream", "query"}


# ------------------------------------------------------------------------------------------------------------ mutants


class Remover(ast.NodeTransformer):
    """Replaces the call with a number by what it would return if nobody had to wait."""

    def __init__(self, number):
        self.number, self.found = number, []
        self._functions = []

    def visit_FunctionDef(self, node):
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()
        return node

    visit_ClassDef = visit_FunctionDef  # noqa: N815

    def visit_Call(self, node):
        self.generic_visit(node)
        if (
            not isinstance(node.func, ast.Attribute)
            or node.func.attr not in METHODS
            or node.func.attr in self._functions
        ):
            return node
        self.found.append(f"{'.'.join(self._functions)}: {ast.unparse(node)}")
        if len(self.found) - 1 != self.number:
            return node
        return ast.copy_location(ast.Constant(node.func.attr == "query"), node)


def mutated(number):
    """The compiled module without one wait, and the waits."""
    remover = Remover(number)
    tree = remover.visit(ast.parse(inspect.getsource(staging)))
    return compile(ast.fix_missing_locations(tree), staging.__file__, "exec"), remover.found


def codes(code):
    """The code of each function of a module, by qualified name."""
    found = {}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= {constant.co_qualname: constant} | codes(constant)
    return found


def functions(holder):
    """The functions of a module or class."""
    for value in vars(holder).values():
        if isinstance(value, type) and value.__module__ == staging.__name__:
            yield from functions(value)
        value = getattr(value, "fget", value)
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.FunctionType) and value.__code__.co_filename == staging.__file__:
            yield value


def install(code):
    """Give the functions of the module, which others have imported, other code."""
    found = codes(code)
    for function in functions(staging):
        function.__code__ = found[function.__code__.co_qualname]


# ---------------------------------------------------------------------------------------------------------- scenarios


def kernel(group, value, count=1000):
    """A tensor of the rank's device, whose values a kernel makes."""
    return torch.full((count,), float(value), device=f"fake:{group.rank}") * 2


def other_stream(group):
    return torch.Stream(device=f"fake:{group.rank}")


def same(tensor, value):
    return bool((tensor.cpu() == value).all())


def results_and_reused_slots(group):
    """Each result is right on the stream that waits, and stays so while the slot has the next operation."""
    outcomes, kept = [], []
    for step in range(1, 4):
        tensor = kernel(group, step + group.rank)
        group.allreduce(tensor, name="again").wait()
        outcomes.append(same(tensor, 4 * step + 2))
        kept.append((tensor, 4 * step + 2))
    return all(outcomes) and all(same(*each) for each in kept)


def a_slot_whose_result_another_stream_awaits(group):
    side = other_stream(group)
    first, second = kernel(group, 1 + group.rank), kernel(group, 5 + group.rank)
    work = group.allreduce(first, name="slot")
    with side:
        work.wait()
    group.allreduce(second, name="slot").wait()
    with side:
        outcome = same(first, 6)
    return outcome and same(second, 22)


def operations_on_one_tensor(group):
    tensor = kernel(group, 1 + group.rank)
    works = [group.allreduce(tensor, name=f"one {number}") for number in range(3)]
    works[-1].wait()
    return same(tensor, 24)


def memory_of_a_result_that_is_dropped(group):
    """The copy of a result must not write memory that the program has got anew."""
    side = other_stream(group)
    results = kernel(group, 0, 2000)
    work = group.allgather(results, kernel(group, 1 + group.rank))
    with side:
        work.wait()
    del results, work
    others = [torch.full((2000,), 7.0, device=f"fake:{group.rank}") for _ in range(5)]
    side.synchronize()
    return all(same(other, 7) for other in others)


def an_operation_that_is_done(group):
    side = other_stream(group)
    tensor = kernel(group, 1 + group.rank)
    work = group.allreduce(tensor, name="done")
    while not work.done():
        pass
    with side:
        return same(tensor, 6)


def gathered(group):
    outputs = kernel(group, 9, 2000)
    group.allgather(outputs, kernel(group, 1 + group.rank), name="gathered").wait()
    return same(outputs[:1000], 2) and same(outputs[1000:], 4)


def a_slot_that_is_given_up(group):
    """Its memory is not unpinned while a result is copied out of it."""
    side = other_stream(group)
    outcomes = []
    for step in range(1, 4):
        first = kernel(group, step + group.rank, 500)
        work = group.allreduce(first, name="given up")
        with side:
            work.wait()
        for count in (3000, 6000):
            group.broadcast(kernel(group, step, count * step), root=0).wait()
        with side:
            outcomes.append(same(first, 4 * step + 2))
    return all(outcomes)


SCENARIOS = (
    a_slot_that_is_given_up,
    results_and_reused_slots,
    a_slot_whose_result_another_stream_awaits,
    operations_on_one_tensor,
    memory_of_a_result_that_is_dropped,
    an_operation_that_is_done,
    gathered,
)


def failures(late):
    """The scenarios with a wrong value on some rank."""

    def body(group):
        group.keep_order()
        group.barrier()
        return [scenario.__name__ for scenario in SCENARIOS if not scenario(group)]

    fake.lazy(late)
    found = {name for names in run_ranks(2, body, transport="shm", timeout_s=20.0) for name in names}
    fake.delays(0.0, 0.0)
    return sorted(f"{name}, late {late}" for name in found)


WHOLE, WAITS = mutated(None)


def without(number):
    """What fails without a wait."""
    install(mutated(number)[0])
    try:
        return [name for late in ("kernels", "to_host", "to_device") for name in failures(late)]
    finally:
        install(WHOLE)


torch.set_num_threads(1)
staging._TAKES_MAX = 0  # idle slots are given up at once
fake = asked.loaded(waits=WAITS)
asked.answer({str(number): functools.partial(without, number) for number in range(-1, len(WAITS))})

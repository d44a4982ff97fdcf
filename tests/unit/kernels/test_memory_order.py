"""The order of accesses to words that threads and processes share: x86-64 keeps it by itself, aarch64 does not.

No test can show a wrong order on x86-64, nor under an emulator that runs there. So these tests read the code: the
source, in which every shared word is accessed by functions that keep the order, and what LLVM makes of it for aarch64.
"""

import ast
from pathlib import Path

from totalreduce.kernels import exchange, relay

KERNELS = Path(exchange.__file__).parent
READS, WRITES = {"load_shared"}, {"store_shared", "raise_shared"}
OF_ENTRIES = {f"ENTRY.{name}" for name in vars(exchange.ENTRY) if name != "num_words"}


def names_in(expression):
    """The words that the index of an access names, but not those within it: ``TRACK.leaves_by + row[ROW.peer]``."""
    if isinstance(expression, ast.BinOp):
        return names_in(expression.left) | names_in(expression.right)
    return {ast.unparse(expression)} if isinstance(expression, ast.Attribute) else set()


def accesses_in(module):
    """Return the words that a module accesses plainly, and those by the functions that keep the order.

    Each has the sets ``read`` and ``written``.
    """
    plain, ordered = ({"read": set(), "written": set()} for _ in range(2))
    for node in ast.walk(ast.parse((KERNELS / module).read_text())):
        if isinstance(node, ast.Subscript):
            kind = "read" if isinstance(node.ctx, ast.Load) else "written"
            plain[kind] |= names_in(node.slice)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in READS | WRITES:
            ordered["read" if node.func.id in READS else "written"] |= names_in(node.args[1])
    return plain, ordered


def test_exactly_the_shared_words_of_the_exchange_are_accessed_in_order():
    plain, ordered = accesses_in("exchange_code.py")
    shared = set(exchange.SHARED)
    assert not (plain["read"] | plain["written"]) & shared
    assert ordered["written"] == shared
    # What a function returns tells Python of the culprit.
    assert ordered["read"] == shared - {"HEAD.culprit"}
    assert all(f"``{name}``" in exchange.__doc__ for name in shared | OF_ENTRIES)


def test_every_word_of_an_entry_is_accessed_in_order():
    """Entries are memory of several processes. Their words are accessed by ``load`` and ``store`` only."""
    tree = ast.parse((KERNELS / "exchange_code.py").read_text())
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) in OF_ENTRIES]
    accesses = {"load": set(), "store": set(), "_least": set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in accesses:
            argument = node.args[1 if node.func.id == "_least" else 0]  # ``_least`` loads a counter of every peer
            accesses[node.func.id] |= {part for part in ast.walk(argument) if part in named}
    assert set(named) == set().union(*accesses.values())
    names = {function: {ast.unparse(node) for node in nodes} for function, nodes in accesses.items()}
    assert names["store"] == names["load"] | names["_least"] == OF_ENTRIES


def test_exactly_the_shared_words_of_the_relay_are_accessed_in_order():
    plain, ordered = accesses_in("relay_code.py")
    assert not plain["read"] & set(relay.READ_SHARED)
    assert not plain["written"] & set(relay.WRITE_SHARED)
    assert ordered == {"read": set(relay.READ_SHARED), "written": set(relay.WRITE_SHARED)}
    assert all(f"``{name}``" in relay.__doc__ for name in {*relay.READ_SHARED, *relay.WRITE_SHARED})


def test_the_words_that_other_threads_use_of_an_operation_in_the_relay_are_the_shared_ones():
    """Of ``RelayedOperation``, which any thread may use; some methods are for the thread that moves messages."""
    tree = ast.parse((KERNELS.parent / "relay" / "relay.py").read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RelayedOperation")
    read, written = set(), set()
    for method in kind.body:
        if not isinstance(method, ast.FunctionDef) or method.name not in ("promote", "posted", "fail", "positions"):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Subscript) and getattr(node.value, "attr", getattr(node.value, "id", "")) in (
                "words",
                "_words",
                "_peers",
            ):
                (read if isinstance(node.ctx, ast.Load) else written).update(
                    names_in(node.slice) - {"self._at", "w.TRACKS_AT", "TRACK.num_words", "PEER.num_words"}
                )
    assert written == set(relay.READ_SHARED)
    assert read == set(relay.WRITE_SHARED) - {"OPERATION.is_promoted"}

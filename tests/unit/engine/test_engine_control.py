"""The bodies of control frames: what is encoded comes back, cut to its bounds; anything else is refused."""

import json

import pytest

from totalreduce.engine.control import (
    CONTROL_BYTES_MAX,
    Description,
    Farewell,
    LossNotice,
    MessageFacts,
    StatusReply,
    StatusRequest,
    decode_mismatch,
    encode_mismatch,
)
from totalreduce.foundation.errors import MismatchError, ProtocolError


def test_what_is_encoded_comes_back() -> None:
    assert Description.decode(Description("w", "allreduce of (3,)").encode(), 1) == ("w", "allreduce of (3,)")
    assert StatusRequest.decode(StatusRequest("w", 1.23456).encode(), 1) == ("w", 1.235, None)
    message = MessageFacts(3, 1, "4 elements of float32, 16 bytes")
    assert StatusRequest.decode(StatusRequest("w", 1.0, message).encode(), 1).message == message
    for other in ([3, 1], ["3", 1, "x"], 7):
        with pytest.raises(ProtocolError, match="rank 1 asks for a message that is"):
            StatusRequest.decode(json.dumps({"name": "w", "message": other}).encode(), 1)
    assert StatusReply.decode(StatusReply(True, "2 of 3").encode(), 1) == (True, "2 of 3")
    notice = LossNotice.decode(LossNotice(2, "its connection ended").encode(), 1, 3)
    assert notice == (2, "its connection ended", 1)
    assert notice.text == "its connection ended (reported by rank 1)"
    assert LossNotice.decode(notice.encode(), 0, 3) == notice  # whoever passes it on
    error = decode_mismatch(encode_mismatch(MismatchError("w", (0, 1), ("a", "b"))), 1)
    assert (error.tensor, error.ranks, error.values) == ("w", (0, 1), ("a", "b"))
    assert Farewell().encode() == b""
    reason, first = Farewell.decode(b"", 1, 3)
    assert (reason.partition(" (")[0], first) == ("it has closed the group", None)
    assert "if it had fewer batches: optimizer.join(), or torch's Join" in reason
    assert Farewell.decode(Farewell("ValueError: 3").encode(), 1, 3) == (
        "it has closed the group after ValueError: 3",
        None,
    )
    after = Farewell("", LossNotice(2, "it has closed the group"))
    assert Farewell.decode(after.encode(), 1, 3) == (reason, (2, "it has closed the group", 1))


def test_texts_are_cut_so_that_every_frame_is_accepted() -> None:
    long = "\N{SNOWMAN}" * 5000
    error = MismatchError("w" * 1024, (0, 1), (long[:1000], long[:1000]))
    for body in (
        Description("w" * 1024, long).encode(),
        LossNotice(1, long).encode(),
        Farewell(long, LossNotice(1, long)).encode(),
        encode_mismatch(error),
    ):
        assert len(body) <= CONTROL_BYTES_MAX
    assert Description.decode(Description("w", long).encode(), 1).text == long[:2048]
    hostile = json.dumps({"name": long, "is": long}).encode()
    assert [len(text) for text in Description.decode(hostile, 1)] == [1024, 2048]
    hostile = json.dumps({"tensor": long, "ranks": [0, 1], "values": [long, long]}).encode()
    refused = decode_mismatch(hostile, 1)
    assert [len(refused.tensor), *map(len, refused.values)] == [1024, 2048, 2048]
    assert len(LossNotice.decode(json.dumps({"rank": 0, "reason": long}).encode(), 1, 2).reason) < 540


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"3", b"[" * 100_000])
def test_no_json_object(body: bytes) -> None:
    for decode in (Description.decode, StatusRequest.decode, StatusReply.decode, decode_mismatch):
        with pytest.raises(ProtocolError, match="a control frame of rank 7 that is no JSON"):
            decode(body, 7)


@pytest.mark.parametrize("rank", [-1, 2, 1.0, "1", None, [1]])
@pytest.mark.parametrize("field", ["rank", "reporter"])
def test_the_loss_of_no_rank(field: str, rank: object) -> None:
    with pytest.raises(ProtocolError, match=r"rank 1 says that .* reports the loss of .*: there is no such rank"):
        LossNotice.decode(json.dumps({"rank": 0, field: rank}).encode(), 1, 2)


@pytest.mark.parametrize("change", [{"ranks": 3}, {"ranks": ["x"]}, {"values": None}, {"ranks": [1e999]}])
def test_a_mismatch_that_cannot_be_read(change: dict[str, object]) -> None:
    document = {"tensor": "w", "ranks": [0, 1], "values": ["a", "b"]} | change
    with pytest.raises(ProtocolError, match="a MISMATCH frame that cannot be read"):
        decode_mismatch(json.dumps(document).encode(), 1)

"""The table of timers compared with a simple model, and the parsing of requests."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripstop.diagnostics.timer_pipe import Request, parse_timer_pipe_line
from ripstop.diagnostics.timer_table import Timers

WORKERS, SCOPES = st.integers(2, 4), st.sampled_from("abc")
TIMES = st.one_of(st.integers(0, 20).map(float), st.just(math.inf))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), WORKERS, SCOPES, TIMES),
        st.tuples(st.just("clear"), WORKERS, SCOPES),
        st.tuples(st.just("forget"), WORKERS),
        st.tuples(st.just("expired"), TIMES),
    )
)


@given(STEPS)
def test_the_table_behaves_as_a_simple_model(steps: list[tuple]) -> None:
    table: Timers[int, int] = Timers()
    model: list[tuple[int, str, float, int]] = []
    for number, step in enumerate(steps):
        match step:
            case ("set", worker, scope, expires):
                table.set(worker, scope, expires, number)
                model = [timer for timer in model if timer[:2] != (worker, scope)]
                model.append((worker, scope, expires, number))
            case ("clear", worker, scope):
                table.clear(worker, scope)
                model = [timer for timer in model if timer[:2] != (worker, scope)]
            case ("forget", worker):
                table.forget(worker)
                model = [timer for timer in model if timer[0] != worker]
            case ("expired", now):
                found = table.expired(now)
                missed = [timer for timer in model if timer[2] <= now]
                assert {worker: set(them) for worker, them in found.items()} == {
                    worker: {timer[3] for timer in missed if timer[0] == worker}
                    for worker in {timer[0] for timer in missed}
                }
                expires_of = {timer[3]: timer[2] for timer in model}
                assert all(them == sorted(them, key=expires_of.__getitem__) for them in found.values())
        assert len(table) == len(model)
        assert table.workers() == {timer[0] for timer in model}
        assert table.deadline() == min((timer[2] for timer in model), default=None)
        assert all((timer[0], timer[1]) in table for timer in model)


def line(**changed: object) -> bytes:
    fields = {"version": 1, "pid": 77, "scope_id": "s", "expiration_time": 5.5, "signal": 9} | changed
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        (line(), Request(77, "s", 5.5, 9)),
        (line(expiration_time=-1, signal=0), Request(77, "s", -1.0)),
        (line(expiration_time=math.inf), Request(77, "s", math.inf, 9)),
        (line(signal=-3), Request(77, "s", 5.5, 0)),
        (line(more="fields", version=2), Request(77, "s", 5.5, 9)),
    ],
)
def test_a_request_is_parsed(line: bytes, request_: Request) -> None:
    assert parse_timer_pipe_line(line) == request_


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b"\xff", b"[" * 5000,
        line(pid=None), line(pid="77"), line(pid=0), line(pid=1), line(pid=-77), line(pid=1 << 40), line(pid=True),
        line(scope_id=None), line(scope_id=3), line(scope_id="x" * 5000),
        line(expiration_time="5"), line(expiration_time=math.nan), line(expiration_time=10**400),
        line(signal="KILL"), line(signal=65), line(signal=True), line(signal=1.5),
    ],
)  # fmt: skip
def test_an_invalid_request_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_timer_pipe_line(line)


@given(st.binary(max_size=200))
def test_no_line_raises_another_error(line: bytes) -> None:
    try:
        parse_timer_pipe_line(line)
    except ValueError as error:
        assert str(error)

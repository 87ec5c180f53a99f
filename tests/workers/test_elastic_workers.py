"""Who has registered: a worker, or a process below it."""

import socket

from ripstop.workers.elastic_workers import ElasticWorkers


def test_a_registration_tells_whether_it_came_from_the_worker_itself() -> None:
    registered: list[tuple[int, bool]] = []
    elastic = ElasticWorkers(
        find_worker={7: 7, 8: 7}.get,
        on_registered=lambda worker, is_itself: registered.append((worker, is_itself)),
        on_left=lambda worker: None,
        on_reformed=lambda worker, round: None,
        on_peer_lost=lambda round: None,
    )
    with socket.socket() as connection:
        for pid in (7, 8, 9):
            elastic.register(pid, connection)
    assert registered == [(7, True), (7, False)]

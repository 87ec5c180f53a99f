"""`torch.distributed.elastic.events`: events of a job, for a logging handler with a given name.

Handlers are torch's, those that a program puts into `_log_handlers` (here or in torch's module), and entry points of
the group `torchrun.event_handlers` (`telemetry/torch_handler_process.py`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import traceback
from dataclasses import asdict, dataclass, field
from enum import Enum

from ripstop.telemetry.torch_handler_process import NAMES, find_torch_handler_in_process

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):  # noqa: UP042 - torch's is a str and an Enum, and prints as one
    """Which process recorded the event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class _SerializedEvent:
    """A dataclass whose text is JSON."""

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]


@dataclass
class Event(_SerializedEvent):
    """One event; `timestamp` is in milliseconds."""

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        if isinstance(data, Event):
            return data
        fields = json.loads(data)
        return Event(**fields | {"source": EventSource[fields["source"]]})


class NodeState(str, Enum):  # noqa: UP042
    """A node's state in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class RdzvEvent(_SerializedEvent):
    """A step of a rendezvous on one node."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        if isinstance(data, RdzvEvent):
            return data
        fields = json.loads(data)
        return RdzvEvent(**fields | {"node_state": NodeState[fields["node_state"]]})


# handlers -------------------------------------------------------------------------------------------------------------

_log_handlers: dict[str, logging.Handler] = {name: find_torch_handler_in_process(name) for name in NAMES}
_events_loggers: dict[str, logging.Logger] = {}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """The handler with this name; KeyError if there is none."""
    if destination not in _log_handlers:
        theirs = getattr(sys.modules.get("torch.distributed.elastic.events.handlers"), "_log_handlers", {})
        try:
            _log_handlers[destination] = theirs.get(destination) or find_torch_handler_in_process(destination)
        except LookupError as error:
            raise KeyError(str(error)) from None
    return _log_handlers[destination]


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    if destination not in _events_loggers:
        handler = get_logging_handler(destination)
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        logger.propagate = False  # an event is logged once
        logger.addHandler(handler)
        _events_loggers[destination] = logger
    return _events_loggers[destination]


def record(event: Event, destination: str = "null") -> None:
    _get_or_create_logger(destination).info(event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    _get_or_create_logger("dynamic_rendezvous").info(event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Record a step of a rendezvous, named after the caller's file and function, if there is a handler."""
    if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        return
    caller = sys._getframe(1).f_code
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",  # noqa: PTH119
            run_id=run_id,
            message=message,
            hostname=hostname or socket.getfqdn(),
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=traceback.format_exc() if node_state == NodeState.FAILED else "",
        )
    )

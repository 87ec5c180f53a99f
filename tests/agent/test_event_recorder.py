"""What a coordinator gets of a node's events, over connections that break."""

from ripstop.agent.event_recorder import EventRecorder
from ripstop.model.event_json import from_json
from ripstop.model.events import AgentMessage
from ripstop.protocol.messages import Events
from ripstop.telemetry.journal import Journal


class Coordinator:
    """Keeps the events that arrive while it is connected."""

    def __init__(self) -> None:
        self.is_connected = True
        self._journal = Journal()

    def receive(self, message: Events) -> None:
        for line in message.lines if self.is_connected else ():
            record = from_json(line)
            assert record is not None
            self._journal.take(record)

    def texts(self) -> list[str]:
        return [record.event.text for _, record in self._journal.since(0) if isinstance(record.event, AgentMessage)]


def test_events_that_were_recorded_without_a_connection_arrive_before_those_of_the_reconnect() -> None:
    coordinator = Coordinator()
    recorder = EventRecorder("a", coordinator.receive)
    recorder.record(AgentMessage("connected"))
    coordinator.is_connected = False
    recorder.record(AgentMessage("alone"))
    coordinator.is_connected = True
    recorder.hold()
    recorder.record(AgentMessage("connected again"))
    recorder.send_again()
    recorder.record(AgentMessage("later"))
    assert coordinator.texts() == ["connected", "alone", "connected again", "later"]

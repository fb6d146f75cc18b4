"""Writes tests/fixtures/train/events.tfevents: event records of TensorBoard, by its own writer of version 2.21.0.

    python -m pip install tensorboard==2.21.0
    python tests/reference/tensorboard_events.py tests/fixtures/train/events.tfevents
"""

import sys

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def scalars(**values: float) -> Summary:
    return Summary(value=[Summary.Value(tag=f"training/{name}", simple_value=value) for name, value in values.items()])


EVENTS = [
    Event(wall_time=1700000000.0, file_version="brain.Event:2"),
    Event(wall_time=1700000000.25, step=1, session_log=SessionLog(status=SessionLog.START)),
    Event(wall_time=1700000001.5, step=10, summary=scalars(loss=5.5, grad_norm=0.0, learning_rate=0.1)),
    Event(wall_time=1700000002.75, step=300, summary=scalars(loss=-1e30)),
]

with open(sys.argv[1], "wb") as out:
    writer = RecordWriter(out)
    for event in EVENTS:
        writer.write(event.SerializeToString())
    writer.flush()

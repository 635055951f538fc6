"""Keys of files, frames and JSON that differ from the names of their attributes."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.checkpoint.committed.digest import TensorDifference
from phalanx.data.origin import StageShares
from phalanx.fleet.control.fleet_file import FleetIncident, Member
from phalanx.fleet.core import messages
from phalanx.fleet.core.state import Eligibility, FleetState, Incident, Node
from phalanx.fleet.core.succession import Barred
from phalanx.observe.record.notes import Throttling
from phalanx.run.identity import FieldDifference
from phalanx_serve.engine.sampler import SamplingRequest
from phalanx_serve.traffic.events import Request, Sampling
from phalanx_watch.runs.reproduce import Changed

SNAPSHOT = messages.RankSnapshot(2, 0, 5, "own", 1, 0)
SNAPSHOT_JSON = '{"ranks":2,"rank":0,"step":5,"kind":"own","nbytes":1,"epoch":0}'
SAMPLING_JSON = '{"temperature":1.0,"top_k":0,"top_p":1.0,"min_p":0.0,"seed":0,"choice":0,"vocab_size":0}'


@pytest.mark.parametrize(
    ("value", "json"),
    [
        (
            messages.Joined("n1", 1, 2, "h", 7, ("hall",), (SNAPSHOT,)),
            f'{{"type":"Joined","node":"n1","incarnation":1,"workers":2,"host":"h","data_port":7,"domain":["hall"],"held":[{SNAPSHOT_JSON}],'
            '"epoch":-1,"bound":false,"meeting_points":[],"started_as_spare":false,"leaving":false}',
        ),
        (
            messages.Parked("n1", 1, 0, ("h:1",), (SNAPSHOT,)),
            f'{{"type":"Parked","node":"n1","incarnation":1,"epoch":0,"meeting_points":["h:1"],"held":[{SNAPSHOT_JSON}]}}',
        ),
        (
            messages.Rollcall("parked", 0, 4, (3,), ("n2",)),
            '{"type":"Rollcall","what":"parked","epoch":0,"step":4,"steps":[3],"absent":["n2"]}',
        ),
        (
            Member("n1", "lost", "h", (0,), False, 1.5, "no heartbeat"),
            '{"name":"n1","role":"lost","host":"h","ranks":[0],"attached":false,"silent_s":1.5,"why":"no heartbeat","domain":[],'
            '"fault":"note"}',
        ),
        (
            FleetIncident(1.5, 0, "n1", "no heartbeat"),
            '{"unix_s":1.5,"epoch":0,"node":"n1","what":"no heartbeat","kind":"note","step":-1,"held_ranks":false}',
        ),
        (
            Incident(1.5, 0, "n1", "no heartbeat"),
            '{"at_s":1.5,"epoch":0,"node":"n1","what":"no heartbeat","ended_epoch":false,"level":"warning","kind":"note","step":-1,"held_ranks":false}',
        ),
        (
            Barred("n1", Eligibility.QUARANTINED, "no heartbeat"),
            '{"node":"n1","eligibility":"quarantined","why":"no heartbeat","fault":"note"}',
        ),
        (
            SamplingRequest(0, 3, 7, Sampling(), -1),
            f'{{"row":0,"position":3,"given":7,"sampling":{SAMPLING_JSON},"top":-1}}',
        ),
        (
            Request("r", (1, 2), 5, Sampling(), frozenset({0}), -1, False, (9,)),
            f'{{"id":"r","prompt":[1,2],"max_tokens":5,"sampling":{SAMPLING_JSON},"stop_tokens":[0],"top_logprobs":-1,'
            '"prompt_logprobs":false,"told":[9]}',
        ),
        (
            Throttling("n1", 1.0, 2.0, 3, ("power brake",)),
            '{"node":"n1","since_s":1.0,"seen_s":2.0,"looks":3,"what":["power brake"]}',
        ),
        (
            TensorDifference("w", "3 elements differ", 3, (0,), 0.5),
            '{"name":"w","what":"3 elements differ","elements":3,"first":[0],"largest":0.5}',
        ),
        (
            StageShares(1, None, {"a": 1.0}, {"a": 1.0}),
            '{"first_step":1,"last_step":null,"asked":{"a":1.0},"achieved":{"a":1.0}}',
        ),
        (
            FieldDifference("train.steps", 1, 2, "run"),
            '{"path":"train.steps","one":1,"other":2,"owner":"run"}',
        ),
        (
            Changed("commit", "a", "b", "perhaps", "git checkout a"),
            '{"what":"commit","then":"a","now":"b","weight":"perhaps","remedy":"git checkout a"}',
        ),
    ],
)
def test_a_value_is_encoded_under_the_keys_of_its_format(value: object, json: str) -> None:
    assert msgspec.json.encode(value).decode() == json
    assert msgspec.json.decode(json, type=type(value)) == value


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (Node, {"reason": "why", "snapshots": "held"}),
        (
            FleetState,
            {"last_seen_s": "heard", "reports_requested_s": "asked_s", "is_wait_recorded": "told_of_waiting"},
        ),
    ],
)
def test_the_state_of_a_fleet_keeps_its_keys(kind: type, keys: dict[str, str]) -> None:
    fields = msgspec.structs.fields(kind)
    assert {field.name: field.encode_name for field in fields if field.name != field.encode_name} == keys

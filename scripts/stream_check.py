"""Writes messages to a broker, runs `elmo stream`, and reads its outputs with other programs.

    stream_check.py FOLDER CHECK        (with elmo in PATH, and the environment of scripts/services)

The check `write` comes first; it leaves in FOLDER the dataset `reviews`, the same in S3, and what the others expect:
the messages as the broker has stored them, and their vectors as `elmo embed` computes them. `documents` runs the examples
of docs/stream.md on that dataset; `broker_permissions` and `s3_permissions` grant exactly what that page lists.
"""

import functools
import json
import os
import re
import struct
import subprocess
import sys
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pyarrow.ipc
import pyarrow.parquet
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "stream.md").read_text()
PARTITIONS = 3
# Messages before the first run of a stream, and before the second.
RUNS = (40, 25)
BROKER = os.environ["ELMO_TEST_KAFKA"]
SECONDS = 60  # that a broker may take for anything
STREAM = ["--format", "json", "--text-path", "/body", "--columns", "id=/id:int64,lang=/meta/lang:string"]
STREAM += ["--model", "tiny", "--threads", "1"]


def main() -> None:
    os.chdir(sys.argv[1])
    globals()[sys.argv[2]]()


# --- what is written ---------------------------------------------------------------------------------------------------


def write() -> None:
    name = f"interop-{uuid.uuid4().hex}"
    create(name)
    state = {"topic": name, "s3": f"s3://elmo-test/{name}", "messages": []}
    for run in RUNS:
        state["messages"] += produce(name, [message(len(state["messages"]) + n) for n in range(run)])
        outputs = ("reviews", state["s3"])
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda output: stream(name, "--output", output, "--rows-per-file", "7", "--once"), outputs))
    texts = [message for message in state["messages"] if message["text"]]
    Path("texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    elmo("embed", "texts.jsonl", "--model", "tiny", "--quiet", "--output", "embedded", "--keep", "partition,offset")
    Path("state.json").write_text(json.dumps(state))


def message(n: int) -> dict:
    """A message and what is expected of its row. Some have no text, or are no JSON."""
    partition = n % PARTITIONS
    if n == 12:
        return {"value": '{"id": 12', "partition": partition, "id": None, "lang": None, "text": None}
    sentences = ["The ferry waited for the harbour.", "Nobody saw the old bridge.", "Her letter came. It rained."]
    lang, text = "en" if n % 2 else "ünï", "" if n == 11 else f"{sentences[n % 3]} Message {n}."
    value = json.dumps({"id": n, "body": text, "meta": {"lang": lang}})
    return {"value": value, "partition": partition, "id": n, "lang": lang, "text": text}


def create(*names: str) -> None:
    admin = AdminClient({"bootstrap.servers": BROKER})
    for made in admin.create_topics([NewTopic(name, num_partitions=PARTITIONS) for name in names]).values():
        made.result(SECONDS)


def produce(topic: str, messages: list) -> list:
    """Writes messages, and returns them with the offset and the time that the broker has given them."""
    producer = Producer({"bootstrap.servers": BROKER, "enable.idempotence": True})

    def stored(message: dict):
        def report(error, found) -> None:
            assert error is None, error
            message.update(offset=found.offset(), timestamp=found.timestamp()[1])

        return report

    for message in messages:
        key = f"key-{message['partition']}"
        producer.produce(topic, message["value"], key, message["partition"], on_delivery=stored(message))
    assert producer.flush(SECONDS) == 0
    return messages


def elmo(*words: str, **environment: str) -> None:
    done = run(*words, **environment)
    assert done.returncode == 0, f"elmo {' '.join(words)}: exit {done.returncode}\n{done.stderr}"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELMO_")}
    return subprocess.run(
        ["elmo", *words], env={**kept, **environment}, capture_output=True, text=True, check=False, timeout=2 * SECONDS,
    )


def stream(topic: str, *words: str) -> None:
    group = f"group-{uuid.uuid4().hex}"
    elmo("stream", "--brokers", BROKER, "--topic", topic, "--group", group, *STREAM, *words)


# --- what is expected --------------------------------------------------------------------------------------------------


def expected() -> tuple:
    """The state of `write`, and the bytes of each vector by partition and offset."""
    state = json.loads(Path("state.json").read_text())
    table = pyarrow.parquet.read_table("embedded")
    places = zip(table["partition"].to_pylist(), table["offset"].to_pylist())
    vectors = [numpy.array(vector, dtype="<f4").tobytes() for vector in table["embedding"].to_pylist()]
    return state, dict(zip(places, vectors, strict=True))


def check(rows: list) -> None:
    """Compares the rows of a dataset, in any order, with the messages."""
    state, vectors = expected()
    found = {(row["_partition"], row["_offset"]): row for row in rows}
    assert len(found) == len(rows), "a message has several rows"
    for partition in range(PARTITIONS):
        offsets = sorted(offset for of, offset in found if of == partition)
        assert offsets == list(range(len(offsets))), f"partition {partition} has the offsets {offsets}"
    assert len(rows) == len(state["messages"]), f"{len(rows)} rows"
    for message in state["messages"]:
        place = (message["partition"], message["offset"])
        row = found[place]
        # The folders say the same as the columns.
        assert (row["_topic"], row["topic"], int(row["partition"])) == (state["topic"], state["topic"], place[0]), row
        assert round(row["_timestamp"].timestamp() * 1000) == message["timestamp"], row
        assert all(row[name] == message[name] for name in ("id", "lang", "text")), row
        vector = row["embedding"]
        bits = None if vector is None else numpy.asarray(vector, dtype="<f4").tobytes()
        assert bits == vectors.get(place), f"the vector of {place} differs from that of elmo embed"
        assert (row["error"] is None) == (message["text"] is not None), row
    assert sum(row["embedding"] is not None for row in rows) == len(vectors) == len(rows) - 2


# --- files -------------------------------------------------------------------------------------------------------------


def documents() -> None:
    """Runs the examples of `Reading the output`. Those in Python leave the dataset in `rows`."""
    section = PAGE.split("\n## Reading the output\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["sh"] + ["python"] * 4, "other examples than this script knows"
    for language, text in blocks:
        if language == "sh":
            done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, check=True)
            counted(done.stdout)
            continue
        names: dict = {}
        exec(text, names)  # pylint: disable=exec-used
        check(dictionaries(names["rows"]))


def counted(table: str) -> None:
    """Compares a printed table of partition, messages and next offset."""
    messages = json.loads(Path("state.json").read_text())["messages"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    assert rows[0] == ["partition", "messages", "next"], table
    of = [sum(message["partition"] == partition for message in messages) for partition in range(PARTITIONS)]
    assert rows[1:] == [[str(partition), str(n), str(n)] for partition, n in enumerate(of)], table


def dictionaries(rows) -> list:
    """The rows of a table of pyarrow, pandas, Polars or DuckDB."""
    kind = type(rows).__module__.split(".")[0].lstrip("_")
    if kind == "pandas":
        plain = rows.astype(object).where(rows.notna(), None)
        return plain.to_dict("records")
    if kind == "polars":
        return rows.to_dicts()
    table = rows.to_arrow_table() if kind == "duckdb" else rows
    return table.to_pylist()


def replay() -> None:
    """Streams with a limit for texts, then the dead letters without it, as the page says: together they are all messages."""
    topic, letters = (f"{name}-{uuid.uuid4().hex}" for name in ("replay", "letters"))
    create(topic, letters)
    body = "The ferry waited for the harbour. "
    values = [json.dumps({"id": n, "body": f"{n}. {body * (40 if n % 3 == 0 else 1)}"}) for n in range(20)]
    produce(topic, [{"value": value, "partition": n % PARTITIONS} for n, value in enumerate([*values, "{"])])
    limited = ("--max-text", "1KB", "--on-error", "dead-letter", "--dead-letter-topic", letters, "--once")
    stream(topic, "--output", "limited", *limited)
    # A letter may be there twice, as after a crash.
    stream(topic, "--output", "limited-again", *limited)
    stream(letters, "--output", "replayed", "--keep-headers", "--once")
    stream(topic, "--output", "unlimited", "--once")

    def place(row: dict) -> tuple:
        headers = {header["key"]: header["value"] for header in row["_headers"]}
        assert headers["elmo.source.topic"].decode() == topic, headers
        return int(headers["elmo.source.partition"]), int(headers["elmo.source.offset"])

    def rows(folder: str, of) -> dict:
        return {of(row): (row["id"], row["embedding"]) for row in pyarrow.parquet.read_table(folder).to_pylist()}

    def read(row: dict) -> tuple:
        return row["_partition"], row["_offset"]

    expected_rows, kept, replayed = rows("unlimited", read), rows("limited", read), rows("replayed", place)
    long = {at for at, (number, _) in expected_rows.items() if number is None or number % 3 == 0}
    assert len(expected_rows) == 21 and len(long) == 8 and set(replayed) == long, sorted(replayed)
    assert kept.keys().isdisjoint(replayed) and {**kept, **replayed} == expected_rows
    assert pyarrow.parquet.read_table("replayed").num_rows == 16, "each letter is there twice"


def s3() -> None:
    import pandas
    import polars
    import pyarrow.dataset
    import pyarrow.fs

    state, _ = expected()
    url, endpoint = state["s3"], os.environ["AWS_ENDPOINT_URL"]
    place = url.removeprefix("s3://")
    store = pyarrow.fs.S3FileSystem(endpoint_override=endpoint.removeprefix("http://"), scheme="http", region="us-east-1")
    check(pyarrow.dataset.dataset(place, filesystem=store, partitioning="hive").to_table().to_pylist())
    check(dictionaries(pandas.read_parquet(place, filesystem=store)))
    options = {"aws_endpoint_url": endpoint, "aws_allow_http": "true", "aws_region": "us-east-1"}
    pattern = f"{url}/topic=*/*/*.parquet"
    check(dictionaries(polars.read_parquet(pattern, hive_partitioning=True, storage_options=options)))
    names = [file.path for file in store.get_file_info(pyarrow.fs.FileSelector(place, recursive=True)) if file.is_file]
    assert any("/_elmo/" in name for name in names), "the record of the stream is beside the data"


def files() -> None:
    """A file is named after its first offset, and its footer says where the next one begins."""
    state, _ = expected()
    for partition in range(PARTITIONS):
        folder = Path("reviews") / f"topic={state['topic']}" / f"partition={partition}"
        end = 0
        for file in sorted(folder.iterdir()):
            footer = {key.decode(): value.decode() for key, value in pyarrow.parquet.read_metadata(file).metadata.items()}
            assert (file.name, footer["stream.start"]) == (f"{end:020}.parquet", str(end)), file
            rows = pyarrow.parquet.read_table(file, partitioning=None)
            assert rows["_offset"].to_pylist() == list(range(end, int(footer["stream.end"]))), file
            end = int(footer["stream.end"])
        assert end == sum(message["partition"] == partition for message in state["messages"])
        assert sum(1 for _ in folder.iterdir()) >= len(RUNS), "a file of each run"


# --- topics ------------------------------------------------------------------------------------------------------------


def topics() -> None:
    state, vectors = expected()
    raw, objects, tables = (f"{state['topic']}-{encoding}" for encoding in ("raw", "json", "arrow"))
    create(raw, objects, tables)
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(stream, state["topic"], "--output-topic", raw, "--encoding", "raw", "--once"),
                pool.submit(stream, state["topic"], "--output-topic", tables, "--encoding", "arrow", "--once"),
                pool.submit(stream, state["topic"], "--output-topic", objects, "--once")]
        for each in done:
            each.result()
    messages = {(message["partition"], message["offset"]): message for message in state["messages"]}
    for topic, compare in ((raw, compare_raw), (objects, compare_json), (tables, compare_arrow)):
        found = {}
        for record in read(topic, len(messages)):
            headers = dict(record.headers())
            place = (int(headers["elmo.source.partition"]), int(headers["elmo.source.offset"]))
            assert place not in found and headers["elmo.source.topic"].decode() == state["topic"], place
            found[place] = record
            assert record.key().decode() == f"key-{place[0]}" and record.timestamp()[1] == messages[place]["timestamp"]
            compare(record, headers, messages[place], vectors.get(place))
        assert found.keys() == messages.keys()


def compare_raw(record, headers: dict, message: dict, vector) -> None:
    assert record.value() == (vector or b""), "little-endian floats, nothing without a vector"
    text = message["text"]
    assert headers["elmo.text"] == (None if text is None else text.encode()), headers
    assert headers["elmo.id"] == (None if message["id"] is None else str(message["id"]).encode()), headers


def compare_json(record, _: dict, message: dict, vector) -> None:
    value = json.loads(record.value())
    numbers = value.pop("embedding")
    assert (None if numbers is None else struct.pack(f"<{len(numbers)}f", *numbers)) == vector
    assert value.pop("truncated") is False and (value.pop("error") is None) == (message["text"] is not None)
    if message["text"] is not None:
        assert value == json.loads(message["value"]), "the message itself"


def compare_arrow(record, _: dict, message: dict, vector) -> None:
    row, = pyarrow.ipc.open_stream(record.value()).read_all().to_pylist()
    numbers = row.pop("embedding")
    assert (None if numbers is None else struct.pack(f"<{len(numbers)}f", *numbers)) == vector
    assert row.pop("truncated") is False and (row.pop("error") is None) == (message["text"] is not None)
    assert row["text"] == message["text"] and row["id"] == message["id"], row


def read(topic: str, count: int) -> list:
    """The committed records of a topic, to its end."""
    consumer = Consumer({
        "bootstrap.servers": BROKER, "group.id": "unused", "enable.auto.commit": False,
        "isolation.level": "read_committed", "enable.partition.eof": True,
    })
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    records, ended, deadline = [], set(), time.monotonic() + SECONDS
    while len(ended) < PARTITIONS:
        assert time.monotonic() < deadline, f"{len(records)} of {count} records"
        record = consumer.poll(1)
        if record is None:
            continue
        if record.error() is None:
            records.append(record)
        elif record.error().code() == KafkaError._PARTITION_EOF:
            ended.add(record.partition())
        else:
            raise AssertionError(record.error())
    consumer.close()
    return records


# --- permissions -------------------------------------------------------------------------------------------------------


def permissions(heading: str) -> list:
    """The rows of the table of `Permissions` whose first cell is `heading`."""
    section = PAGE.split("\n## Permissions\n")[1].split("\n## ")[0]
    table = re.search(rf"^\| {heading} .*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE).group(1)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def broker_permissions() -> None:
    """Users with the listed operations, and no others on any of these resources, nor on the cluster, can do everything.
    Those who lack a single one cannot; Describe is implied by the others."""
    rows = permissions("broker: resource")
    lacking = [(row[0], word.strip()) for row in rows for word in row[1].split(",") if word.strip() != "Describe"]
    assert len(lacking) == 5, rows
    cases = [Granted(rows, missing) for missing in [None, *lacking]]
    create(*(topic for case in cases for topic in (case.topic, case.dead, case.output)))
    for case in cases:
        produce(case.topic, [message(n) for n in range(10, 15)])
    # What has an entry is closed to all others.
    entries = [entry for case in cases for entry in case.entries]
    entries.append(acl((ResourceType.BROKER, "kafka-cluster"), "User:nobody", "Describe"))
    admin = AdminClient({"bootstrap.servers": BROKER})
    finish(admin.create_acls(entries))
    secured()
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(Granted.check, cases))
    finally:
        finish(admin.delete_acls([acl_filter(entry) for entry in entries]))


class Granted:
    """Topics and a group of its own, and what a user may do with them: everything that the page lists but `missing`."""

    def __init__(self, rows: list, missing) -> None:
        name = f"granted-{uuid.uuid4().hex}"
        self.missing, self.folder = missing, name
        self.topic, self.dead, self.output, self.group = (f"{name}-{part}" for part in ("in", "dead", "out", "group"))
        resources = {
            "the topics": (ResourceType.TOPIC, self.topic),
            "the group": (ResourceType.GROUP, f"{self.group}*"),
            "the dead-letter topic": (ResourceType.TOPIC, self.dead),
            "the output topic": (ResourceType.TOPIC, self.output),
            "the transactional ids `elmo-GROUP-*`": (ResourceType.TRANSACTIONAL_ID, f"elmo-{self.group}*"),
        }
        assert {row[0] for row in rows} == resources.keys(), rows
        words = [(row[0], word.strip()) for row in rows for word in row[1].split(",")]
        user = f"User:{os.environ['ELMO_TEST_KAFKA_USER']}"
        self.entries = [acl(resources[name], user, word) for name, word in words if (name, word) != missing]
        self.entries += [acl(resource, "User:nobody", "Describe") for resource in resources.values()]

    def check(self) -> None:
        common = ["stream", *secured(), "--topic", self.topic, *STREAM, "--once"]
        letters = ["--on-error", "dead-letter", "--dead-letter-topic", self.dead]
        into_files = [*common, "--group", f"{self.group}-files", "--output", self.folder, *letters]
        into_topic = [*common, "--group", f"{self.group}-topic", "--output-topic", self.output]
        if self.missing is None:
            elmo(*into_files)
            elmo(*into_topic)
            return
        about_files = self.missing[0] in ("the topics", "the group", "the dead-letter topic")
        done = run(*(into_files if about_files else into_topic))
        assert done.returncode == 5, f"without {self.missing}: exit {done.returncode}\n{done.stderr}"
        if self.missing[0] == "the group":
            # Who only looks needs no more.
            elmo("stream", "status", *secured(), "--output", "reviews", "--group", f"{self.group}-files")


def acl(resource: tuple, user: str, operation: str) -> AclBinding:
    kind, name = resource
    pattern = ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL
    operation = AclOperation[operation.upper()]
    return AclBinding(kind, name.rstrip("*"), pattern, user, "*", operation, AclPermissionType.ALLOW)


def acl_filter(entry: AclBinding) -> AclBindingFilter:
    kind, pattern, permission = entry.restype, entry.resource_pattern_type, entry.permission_type
    return AclBindingFilter(kind, entry.name, pattern, entry.principal, entry.host, entry.operation, permission)


def finish(futures: dict) -> None:
    for future in futures.values():
        future.result(SECONDS)


@functools.cache
def secured() -> list:
    """How the user of the tests connects."""
    Path("secrets.properties").write_text(f"sasl.password={os.environ['ELMO_TEST_KAFKA_PASSWORD']}\n")
    user, authority = os.environ["ELMO_TEST_KAFKA_USER"], os.environ["ELMO_TEST_KAFKA_CA"]
    properties = ["security.protocol=SASL_SSL", "sasl.mechanism=SCRAM-SHA-256"]
    properties += [f"sasl.username={user}", f"ssl.ca.location={authority}"]
    words = ["--brokers", os.environ["ELMO_TEST_KAFKA_SASL_SSL"], "--kafka-secrets", "secrets.properties"]
    return words + [word for each in properties for word in ("-X", each)]


def s3_permissions() -> None:
    """With the listed permissions of S3, and no others, a stream is begun and continued; without one of them it is not."""
    import boto3

    statements = dict(permissions("store"))["S3"]
    bucket, folder = "elmo-test", f"granted-{uuid.uuid4().hex}"
    places = {"the bucket": f"arn:aws:s3:::{bucket}", "the folder": f"arn:aws:s3:::{bucket}/{folder}/*"}
    places["its `_elmo/`"] = f"arn:aws:s3:::{bucket}/{folder}/_elmo/*"
    rules = [(re.findall(r"`(s3:\w+)`", rule), places[rule.rsplit(" on ", 1)[1]]) for rule in statements.split("; ")]
    rules = [(action, place) for actions, place in rules for action in actions]
    assert len(rules) == 4, rules
    iam = boto3.client("iam", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    topic = f"{folder}-in"
    create(topic)
    produce(topic, [message(n) for n in range(5)])

    def user(rules: list) -> dict:
        # The server wants the bucket for the request that deletes several objects; AWS looks at each of them.
        rules = rules + [(action, places["the bucket"]) for action, _ in rules if action == "s3:DeleteObject"]
        name = uuid.uuid4().hex
        iam.create_user(UserName=name)
        entries = [{"Effect": "Allow", "Action": action, "Resource": place} for action, place in rules]
        policy = json.dumps({"Version": "2012-10-17", "Statement": entries})
        iam.put_user_policy(UserName=name, PolicyName="granted", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def once(user: dict) -> subprocess.CompletedProcess:
        words = ["--brokers", BROKER, "--topic", topic, "--group", folder, *STREAM]
        return run("stream", *words, "--once", "--output", f"s3://{bucket}/{folder}", **user)

    users = [user([rule for rule in rules if rule != missing]) for missing in rules]
    whole = user(rules)
    enforce(True)
    try:
        with ThreadPoolExecutor(3) as pool:
            for missing, done in zip(rules, pool.map(once, users)):
                assert done.returncode == 5, f"without {missing}: exit {done.returncode}\n{done.stderr}"
        for _ in range(2):
            done = once(whole)
            assert done.returncode == 0, done.stderr
            produce(topic, [message(n) for n in range(5)])
    finally:
        enforce(False)


def enforce(is_on: bool) -> None:
    """Whether the server looks at permissions from now on."""
    body = b"0" if is_on else b"inf"
    url, headers = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, data=body, method="POST", headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


if __name__ == "__main__":
    main()

"""Writes tests/fixtures/avro/messages.json: Avro data of several schemas, and what they hold, by fastavro 1.13.1.

    python -m pip install fastavro==1.13.1
    python tests/reference/avro_messages.py > tests/fixtures/avro/messages.json
"""

import io
import json
from datetime import date, datetime, timezone
from decimal import Decimal

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

UTC = timezone.utc

PLACE = {
    "type": "record",
    "name": "Place",
    "fields": [{"name": "city", "type": "string"}, {"name": "zip", "type": ["null", "string"]}],
}
REVIEW = {
    "type": "record",
    "name": "Review",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "text", "type": "string"},
        {"name": "stars", "type": "int"},
        {"name": "price", "type": "double"},
        {"name": "weight", "type": "float"},
        {"name": "ok", "type": "boolean"},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "at_us", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["FILM", "BOOK"]}},
        {"name": "place", "type": ["null", PLACE]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "attributes", "type": {"type": "map", "values": "long"}},
        {"name": "either", "type": ["null", "string", "long"]},
        {"name": "uuid", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "raw", "type": "bytes"},
    ],
}
# Fields in another order, one more, others missing, and a text that may be null.
LATER = {
    "type": "record",
    "name": "Review",
    "namespace": "shop",
    "fields": [
        {"name": "language", "type": "string"},
        {"name": "stars", "type": "long"},
        {"name": "text", "type": ["null", "string"]},
        {"name": "place", "type": ["null", PLACE]},
    ],
}
UUID = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"  # the example of RFC 4122
FIRST = {
    "id": 9007199254740993,
    "text": "Grüße \U00020000",
    "stars": 5,
    "price": 0.1,
    "weight": 16777216.0,
    "ok": True,
    "day": date(2024, 2, 29),
    "at": datetime(2024, 2, 29, 10, 30, 0, 250000, UTC),
    "at_us": datetime(2024, 2, 29, 10, 30, 0, 250001, UTC),
    "kind": "BOOK",
    "place": {"city": "Ulm", "zip": None},
    "tags": ["a", "b"],
    "attributes": {"pages": 12},
    "either": 7,
    "uuid": UUID,
    "amount": Decimal("12.30"),
    "raw": b"caf\xc3\xa9",
}
SECOND = FIRST | {
    "id": -1,
    "text": "",
    "ok": False,
    "place": None,
    "tags": [],
    "attributes": {},
    "either": "x",
    "raw": b"\xff",
}


def case(schema: object, values: list) -> dict:
    parsed = fastavro.parse_schema(schema)
    data = []
    for value in values:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, value)
        data.append(out.getvalue().hex())
    # In the order of bytes of the single-object encoding: fastavro gives 8a8f25cce724dd63 for "null", and the fingerprint is
    # the number 63dd24e7cc258f8a.
    rabin = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return {"schema": schema, "fingerprint": rabin, "data": data}


def main() -> None:
    later = [
        {"language": "de", "stars": 3, "text": "später", "place": {"city": "Bonn", "zip": "53111"}},
        {"language": "de", "stars": 2**40, "text": None, "place": None},
    ]
    cases = {
        "review": case(REVIEW, [FIRST, SECOND]),
        "later": case(LATER, later),
        "string": case("string", ["only a text"]),
        "place": {"schema": PLACE},
    }
    print(json.dumps(cases, indent=1))


main()

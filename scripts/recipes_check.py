"""Checks what the commands of docs/recipes.md left in a folder and what the page says they print (scripts/readme.py has
compared it with what they print), by computing it again in another way.

    recipes_check.py FOLDER        (with elmo in PATH)
"""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pyarrow.parquet

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "recipes.md").read_text()


def main() -> None:
    os.chdir(sys.argv[1])
    line_breaks()
    hive()
    tsv()
    pipe()
    nearest()
    word()
    duplicates()
    trial()
    joined()
    vectors()


def line_breaks() -> None:
    rows = read_csv("reviews.csv")
    texts = [row["review"] or None for row in rows]
    assert any(text and "\n\n" in text for text in texts), "the file has a cell with an empty line"
    found = table("review-vectors")
    assert found["review"].to_pylist() == texts
    assert found["place"].to_pylist() == [row["place"] for row in rows]
    assert [vector is None for vector in found["embedding"].to_pylist()] == [text is None for text in texts]


def hive() -> None:
    folders = {row["id"]: re.findall(r"=(\d+)", str(path)) for path, row in visits()}
    rows = [(id, year, month) for id, (year, month) in sorted(folders.items()) if year == "2024"]
    printed_rows = [(int(row[0]), row[1], row[2]) for row in printed("A hive dataset with its partition columns")]
    assert printed_rows == rows, printed_rows


def tsv() -> None:
    rows = read_csv("lamps.tsv", delimiter="\t", quoting=csv.QUOTE_NONE)
    found = table("lamp-vectors")
    assert found["code"].to_pylist() == [row["code"] for row in rows]
    assert found["name"].to_pylist() == [row["name"] for row in rows]
    assert found["embedding"].null_count == 0


def pipe() -> None:
    english = [row for row in read_json("notes.jsonl") if row["lang"] == "en"]
    found = table("note-vectors")
    assert found.select(["id", "lang", "text"]).to_pylist() == english
    assert found["embedding"].null_count == 0


def nearest() -> None:
    rooms = table("room-vectors")
    question = embed(["Was the old room cold?"])[0]
    order = numpy.argsort(-cosines(matrix(rooms), question[None])[:, 0])[:10]
    ids = [rooms["id"][int(at)].as_py() for at in order]
    printed_ids = [int(row[0]) for row in printed("The ten nearest rows to a question")]
    assert rooms.num_rows == 5000 and printed_ids == ids, ids


def word() -> None:
    ids, expected = [], []
    for _, row in visits():
        # The job at token level, of which the tokens called `bank` are taken.
        output = embed_lines([row["text"]], "--level", "token")
        found = [token["embedding"] for token in output["tokens"][0].as_py() if token["token"] == "bank"]
        assert len(found) == len(re.findall(r"\bbank\b", row["text"])), row
        ids += [row["id"]] * len(found)
        expected += [[f"{number:.2f}" for number in vector[:2]] for vector in found]
    rows = printed("The vectors of one word in every sentence")
    assert [int(row[0]) for row in rows] == ids, ids
    assert [re.findall(r"-?\d+\.\d+", row[1]) for row in rows] == expected, expected


def duplicates() -> None:
    notes = read_json("notes.jsonl")
    texts = embed([note["text"] for note in notes])
    near = numpy.tril(cosines(texts, texts) > 0.9, -1).any(axis=1)  # to a row before
    ids = [note["id"] for note, dropped in zip(notes, near) if not dropped]
    # Of the six notes, 4 has other spaces than 1, and 6 another punctuation mark than 2.
    assert ids == [1, 2, 3, 5], ids
    assert [int(row[0]) for row in printed("Near-duplicates removed")] == ids


def trial() -> None:
    found = table("trial")
    assert found["id"].to_pylist() == list(range(1, 101))
    numpy.testing.assert_array_equal(matrix(found), matrix(table("room-vectors"))[:100])


def joined() -> None:
    questions = [row["text"] for row in read_csv("questions.csv")]
    answers = [row["text"] for row in read_csv("answers.csv")]
    best = cosines(embed(questions), embed(answers)).argmax(axis=1)
    pairs = [[question, answers[at]] for question, at in zip(questions, best)]
    assert printed("Two files joined by meaning") == pairs, pairs


def vectors() -> None:
    rooms = table("room-vectors")
    assert rooms["text"][1].as_py() == "The old room on floor 2 was cold, said guest 2."
    numpy.testing.assert_allclose(matrix(rooms)[1], embed([rooms["text"][1].as_py()])[0], rtol=0, atol=0)


def printed(heading: str) -> list:
    """The rows of the table that the page shows as the output of a task."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    output = section.split("```text output\n")[1].split("```")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line.startswith("|")]
    return rows[1:]


def visits() -> list:
    """(path, row) of the hive dataset, in the order of the paths."""
    return [(path, row) for path in sorted(Path("visits").rglob("*.jsonl")) for row in read_json(path)]


def read_json(path) -> list:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_csv(path, **options) -> list:
    with open(path, newline="") as file:
        return list(csv.DictReader(file, **options))


def table(folder: str) -> pyarrow.Table:
    return pyarrow.parquet.read_table(folder)


def matrix(rows: pyarrow.Table) -> numpy.ndarray:
    return numpy.array(rows["embedding"].to_pylist(), dtype=numpy.float32)


def embed(texts: list) -> numpy.ndarray:
    return matrix(embed_lines(texts))


def embed_lines(texts: list, *options: str) -> pyarrow.Table:
    command = ["elmo", "embed", "-", "--quiet", "--overwrite", "--output", "check", *options]
    subprocess.run(command, input="".join(text + "\n" for text in texts), text=True, check=True, stdout=subprocess.DEVNULL)
    return table("check")


def cosines(a: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    a, b = a.astype(numpy.float64), b.astype(numpy.float64)
    return (a / numpy.linalg.norm(a, axis=1)[:, None]) @ (b / numpy.linalg.norm(b, axis=1)[:, None]).T


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures what the vectors of a model tell: beside a model with random weights, and beside the words alone.

    python3 scripts/model_worth.py ELMO MODEL [--raw raw-sample.jsonl.zst] [--state zero]

ELMO is the program, MODEL a directory with options.json and vocab.txt (scripts/venv makes a Python with the packages).

Senses: examples/data/senses.tsv has 20 words in two senses, in eight sentences each. The nearest of the other 15
sentences of a word, by the cosine of the word's vectors, has the same sense or not; of the three nearest, two or three
do. Equally near sentences share the vote, so a layer without context has the score of a random guess: 7/15 and 29/65.

Next paragraph (with --raw): 1,000 pairs of paragraphs that follow each other in a book. The first is the query, the
1,000 second ones are ranked by cosine. `centred` subtracts the mean of the candidates first. `raw` is JSON lines with
`id` (`book/chapter/number`) and `text`.
"""

import argparse
import csv
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy
import pyarrow.parquet

SENSES = Path(__file__).resolve().parent.parent / "examples" / "data" / "senses.tsv"
PAIRS = 1000
LEAST_WORDS = 20  # of a paragraph
MODELS = ("trained", "untrained")
EXAMPLES = (("bank", 0), ("spring", 8), ("race", 8), ("grave", 10), ("light", 9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("elmo", help="the program")
    parser.add_argument("model", help="the model's directory")
    parser.add_argument("--senses", default=SENSES, type=Path, help="word, part_of_speech, sense, text")
    parser.add_argument("--raw", type=Path, help="paragraphs as JSON lines, also .zst")
    parser.add_argument("--state", default="warm", choices=("zero", "warm"), help="of the LSTMs at the start of a sentence")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="model-worth-") as folder:
        runner = Runner(arguments.elmo, Path(arguments.model), Path(folder), arguments.state)
        senses(runner, arguments.senses)
        if arguments.raw:
            next_paragraph(runner, arguments.raw)


class Runner:
    """Embeds texts with the model, or with one of the same options and random weights."""

    def __init__(self, elmo: str, model: Path, folder: Path, state: str) -> None:
        self.elmo, self.folder, self.state = elmo, folder, state
        self.models = {"trained": model, "untrained": folder / "untrained"}
        text = folder / "text.txt"
        text.write_text("one line of text .\n" * 2)
        # One step that moves no weight: the model is the seeded random one that training begins with.
        options = ["--options", model / "options.json", "--vocab", model / "vocab.txt", "--output", self.models["untrained"]]
        rate = ["--steps", "1", "--optimizer", "adamw", "--learning-rate", "1e-30", "--rows", "1", "--lanes", "1"]
        self.run("train", "--shards", text, *options, *rate)

    def run(self, *words: object) -> None:
        done = subprocess.run([self.elmo, *map(str, words), "--quiet"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"elmo {words[0]}: {done.stderr}")

    def embed(self, model: str, texts: list[str], *options: str) -> pyarrow.Table:
        source, output = self.folder / "texts.jsonl", self.folder / "vectors"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        settings = ["--tokenizer", "moses", "--layers", "all", "--state", self.state, "--overwrite", "--output", output]
        self.run("embed", source, "--model", self.models[model], *settings, *options)
        table = pyarrow.parquet.read_table(output)
        assert table["text"].to_pylist() == texts
        return table

    def of_texts(self, model: str, texts: list[str]) -> dict[str, numpy.ndarray]:
        """Means over the tokens."""
        return by_layer(numpy.array(self.embed(model, texts)["embedding"].to_pylist()))

    def of_words(self, model: str, words: list[str], texts: list[str]) -> dict[str, numpy.ndarray]:
        """The only token of each text that is its word."""
        rows = []
        for word, tokens in zip(words, self.embed(model, texts, "--level", "token")["tokens"].to_pylist()):
            (found,) = (token["embedding"] for token in tokens if token["token"] == word)
            rows.append(found)
        return by_layer(numpy.array(rows))


def by_layer(vectors: numpy.ndarray, layers: int = 3) -> dict[str, numpy.ndarray]:
    """All layers of the rows, from one row of `--layers all`."""
    parts = numpy.split(vectors.astype(numpy.float64), layers, axis=1)
    names = ["token", *(str(i) for i in range(1, layers - 1)), "top"]
    return {**dict(zip(names, parts)), "average": sum(parts) / layers}


# --------------------------------------------------------------------------- senses


def senses(runner: Runner, path: Path) -> None:
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    words = [row["word"] for row in rows]
    texts = [row["text"] for row in rows]
    labels = numpy.array([row["sense"] for row in rows])
    of_word = {word: numpy.array([i for i, other in enumerate(words) if other == word]) for word in dict.fromkeys(words)}
    same_part = {word: len({rows[i]["part_of_speech"] for i in found}) == 1 for word, found in of_word.items()}

    def scores(near: numpy.ndarray, k: int) -> dict[str, float]:
        return {word: accuracy(near[numpy.ix_(at, at)], labels[at], k) for word, at in of_word.items()}

    def line(name: str, layer: str, near: numpy.ndarray) -> None:
        one, three = scores(near, 1), scores(near, 3)
        mean = lambda found: numpy.mean(list(found))
        groups = [mean(s for word, s in one.items() if same_part[word] == same) for same in (True, False)]
        print(f"{name:<12}{layer:<10}{mean(one.values()):>8.1%}{mean(three.values()):>8.1%}{groups[0]:>12.1%}{groups[1]:>12.1%}")

    print(f"Two senses of {len(of_word)} words, {len(rows)} sentences: right sense of the nearest sentences")
    print(f"{'':<12}{'layer':<10}{'k=1':>8}{'k=3':>8}{'k=1, one':>12}{'k=1, two':>12}")
    print(f"{'':<38}{'class':>12}{'classes':>12}")
    vectors = {}
    for model in MODELS:
        vectors[model] = runner.of_words(model, words, texts)
        for layer, found in vectors[model].items():
            line(model, layer, cosines(found, found))
    others = [[token for token in tokens_of(text) if token != word] for word, text in zip(words, texts)]
    line("other words", "TF-IDF", cosines(*[tf_idf(others, others)] * 2))
    deviation = math.sqrt(0.25 / len(rows))
    print(f"Guessing: {7 / 15:.1%} and {29 / 65:.1%}; standard deviation of such a guess {deviation:.1%} (k=1).")
    print("`one class`: words whose senses are the same part of speech; `two classes`: the other words.\n")

    print("By word, k=1, trained:", end="")
    by_layers = {layer: scores(cosines(found, found), 1) for layer, found in vectors["trained"].items()}
    for i, word in enumerate(of_word):
        figures = " ".join(f"{layer} {by_layers[layer][word] * 16:.0f}/16" for layer in ("1", "top"))
        print("\n   " if i % 3 == 0 else "   ", f"{word:<9}{figures:<19}", end="")
    print("\n\nNearest sentence of a word in context, layer 1, trained:")
    near = cosines(*[vectors["trained"]["1"]] * 2)
    for word, start in EXAMPLES:
        if word in of_word:
            example(texts, labels, near, of_word[word], of_word[word][start])
    print("\nNearest of all sentences, mean of the tokens, average of the layers, centred, trained:")
    of_texts = runner.of_texts("trained", texts)["average"]
    near = cosines(*[of_texts - of_texts.mean(axis=0)] * 2)
    for i in range(0, len(texts), len(texts) // 5):
        example(texts, None, near, numpy.arange(len(texts)), i + 3)


def example(texts: list[str], labels, near: numpy.ndarray, among: numpy.ndarray, i: int) -> None:
    best = max((j for j in among if j != i), key=lambda j: near[i, j])
    sense = "" if labels is None else f" ({labels[i]} -> {labels[best]})"
    print(f"    {texts[i]}\n      {near[i, best]:.2f}  {texts[best]}{sense}")


def accuracy(near: numpy.ndarray, labels: numpy.ndarray, k: int) -> float:
    """Leave-one-out: the expected share of rows whose k nearest have mostly their label, ties broken at random."""
    right = []
    for i in range(len(labels)):
        others = numpy.arange(len(labels)) != i
        values, same = near[i, others].round(9), labels[others] == labels[i]
        limit = numpy.sort(values)[-k]
        sure, tied = values > limit, values == limit
        drawn, votes = k - sure.sum(), same[sure].sum()
        good, bad = same[tied].sum(), (~same[tied]).sum()
        ways = sum(
            math.comb(good, g) * math.comb(bad, drawn - g) for g in range(drawn + 1) if 2 * (votes + g) > k
        )
        right.append(ways / math.comb(good + bad, drawn))
    return float(numpy.mean(right))


# --------------------------------------------------------------------------- next paragraph


def next_paragraph(runner: Runner, path: Path) -> None:
    pairs, possible = choose(read(path))
    texts = [text for pair in pairs for text in pair]
    print(f"\nNext paragraph among {len(pairs):,} (of {possible:,} possible pairs), {LEAST_WORDS} words or more")
    print(f"{'':<12}{'layer':<10}{'':<10}{'first':>8}{'in 10':>8}{'MRR':>8}")
    for model in MODELS:
        for layer, found in runner.of_texts(model, texts).items():
            queries, candidates = found[::2], found[1::2]
            ranks(model, layer, "", queries, candidates)
            centre = candidates.mean(axis=0)
            ranks(model, layer, "centred", queries - centre, candidates - centre)
    bags = [tokens_of(text) for text in texts]
    counted = tf_idf(bags, bags[1::2])
    ranks("words", "TF-IDF", "", counted[::2], counted[1::2])
    chance = sum(1 / rank for rank in range(1, len(pairs) + 1)) / len(pairs)
    print(f"{'guessing':<32}{1 / len(pairs):>8.1%}{10 / len(pairs):>8.1%}{chance:>8.3f}")


def ranks(name: str, layer: str, centred: str, queries: numpy.ndarray, candidates: numpy.ndarray) -> None:
    near = cosines(queries, candidates).round(9)
    right = numpy.diag(near)[:, None]
    # Candidates that are as near as the right one share its place.
    rank = 1 + (near > right).sum(axis=1) + ((near == right).sum(axis=1) - 1) / 2
    print(f"{name:<12}{layer:<10}{centred:<10}{(rank <= 1).mean():>8.1%}{(rank <= 10).mean():>8.1%}{(1 / rank).mean():>8.3f}")


def read(path: Path) -> list[dict]:
    command = ["zstd", "-dqc", path] if path.suffix == ".zst" else ["cat", path]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode().split("\n")
    return [json.loads(line) for line in lines if line]


def choose(paragraphs: list[dict]) -> tuple[list[tuple[str, str]], int]:
    """Pairs without a common paragraph, in an order that depends on the ids alone."""
    texts = {}
    for row in paragraphs:
        chapter, number = row["id"].rsplit("/", 1)
        if len(row["text"].split()) >= LEAST_WORDS:
            texts[chapter, int(number)] = row["text"]
    starts = [(chapter, number) for chapter, number in texts if (chapter, number + 1) in texts]
    starts.sort(key=lambda start: hashlib.sha256(f"{start[0]}/{start[1]}".encode()).digest())
    taken, pairs = set(), []
    for chapter, number in starts:
        pair = {(chapter, number), (chapter, number + 1)}
        if not pair & taken and len(pairs) < PAIRS:
            taken |= pair
            pairs.append((texts[chapter, number], texts[chapter, number + 1]))
    return pairs, len(starts)


# --------------------------------------------------------------------------- vectors


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def tf_idf(texts: list[list[str]], known: list[list[str]]) -> numpy.ndarray:
    """Rows of `(1 + log count) * log(texts / texts with the word)`, by the texts that are known."""
    frequency = Counter(word for text in known for word in set(text))
    column = {word: i for i, word in enumerate(sorted(frequency))}
    found = numpy.zeros((len(texts), len(column)))
    for row, text in zip(found, texts):
        for word, count in Counter(text).items():
            if word in column:
                row[column[word]] = (1 + math.log(count)) * math.log(len(known) / frequency[word])
    return found


def cosines(a: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    """Zero for a vector of zeros."""
    length = lambda rows: numpy.maximum(numpy.linalg.norm(rows, axis=1), 1e-300)[:, None]
    return (a / length(a)) @ (b / length(b)).T


if __name__ == "__main__":
    main()

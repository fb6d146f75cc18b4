#!/usr/bin/env python3
"""Writes an English corpus of a small world, from a seed: the same files on every machine.

    python3 corpus.py FOLDER [--sentences 40000] [--seed 1]

FOLDER/train-0.txt.gz ...   sentences for training, one per line, tokens separated by spaces
FOLDER/heldout.jsonl        2,000 draws that are not in the training text: `topic` and `text`
FOLDER/senses.csv           sentences with an ambiguous word: `id`, `word`, `topic` (its sense) and `text`
FOLDER/best.txt             the perplexity that a perfect model would reach on heldout.jsonl

The grammar (grammar.txt) knows the probability of each sentence, so the perplexity of a perfect model is
exp(-sum of ln p / number of predictions). A sentence of n tokens has n + 1 predictions, in either direction.
"""
import argparse
import csv
import gzip
import json
import math
import random
from pathlib import Path

SHARDS, HELD_OUT, PER_SENSE = 4, 2000, 10
SENSES = {"bank": "river money", "bat": "barn cricket", "match": "cricket kitchen", "note": "concert office", "spring": "garden hills"}


def read_grammar(path):
    grammar = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            rules = grammar.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, alternatives = line.split(": ", 1)
            parsed = [alternative.split() for alternative in alternatives.split(" | ")]
            weights = [int(words.pop(0)[:-1]) if words[0].endswith("*") else 1 for words in parsed]
            rules[name] = parsed, weights
    return grammar


class Writer:
    def __init__(self, grammar, seed):
        self.grammar, self.random = grammar, random.Random(seed)
        self.topics = [topic for topic in grammar if topic != "every"]

    def sentence(self, topic=None):
        """Draws a topic, its text, and the natural logarithm of their probability."""
        topic = topic or self.random.choice(self.topics)
        number = self.random.randrange(2)
        self.log_p = -math.log(len(self.topics))
        self.has_number = False
        words = self.expand("sentence", topic, number)
        if self.has_number:  # else both numbers give this sentence
            self.log_p -= math.log(2)
        return topic, " ".join([words[0].capitalize(), *words[1:]]), self.log_p

    def expand(self, rule, topic, number):
        alternatives, weights = self.grammar[topic].get(rule) or self.grammar["every"][rule]
        (chosen,) = self.random.choices(range(len(weights)), weights)
        self.log_p += math.log(weights[chosen] / sum(weights))
        words = []
        for word in alternatives[chosen]:
            self.has_number |= "/" in word
            words += self.expand(word[1:-1], topic, number) if word[0] == "<" else [word.split("/")[number * ("/" in word)]]
        return words


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sentences", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    writer = Writer(read_grammar(Path(__file__).with_name("grammar.txt")), options.seed)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)

    held_out = [writer.sentence() for _ in range(HELD_OUT)]
    predictions = sum(len(text.split()) + 1 for _, text, _ in held_out)
    best = math.exp(-sum(log_p for _, _, log_p in held_out) / predictions)
    (folder / "heldout.jsonl").write_text("".join(json.dumps({"topic": topic, "text": text}) + "\n" for topic, text, _ in held_out))
    (folder / "best.txt").write_text(f"{best:.3f}\n")

    with open(folder / "senses.csv", "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["id", "word", "topic", "text"])
        number = 0
        for word, topics in SENSES.items():
            for topic in topics.split():
                texts = set()
                while len(texts) < PER_SENSE:
                    text = writer.sentence(topic)[1]
                    if word in text.split() and text not in texts:
                        texts.add(text)
                        rows.writerow([number, word, topic, text])
                        number += 1

    unseen, tokens = {text for _, text, _ in held_out}, 0
    draws = (text for _, text, _ in iter(writer.sentence, None) if text not in unseen)
    for shard in range(SHARDS):
        texts = [next(draws) for _ in range(shard, options.sentences, SHARDS)]
        tokens += sum(len(text.split()) for text in texts)
        with gzip.GzipFile(folder / f"train-{shard}.txt.gz", "wb", mtime=0) as file:
            file.write("".join(text + "\n" for text in texts).encode())
    print(f"{options.sentences} sentences, {tokens} tokens; a perfect model would reach perplexity {best:.2f} on heldout.jsonl")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Perplexity of a trigram model with interpolated Kneser-Ney smoothing, to be set beside that of a biLM.

Same vocabulary, same predictions: `n + 1` of a sentence (its words and `</S>`, or `<S>` when reading backward), words
outside of the vocabulary are `<UNK>`, in training and in the text that is scored.

    python3 tests/reference/kneser_ney.py --train 'train/*.zst' --valid valid.txt.zst --size 10000
    python3 tests/reference/kneser_ney.py --train 'train/*.zst' --valid valid.txt.zst --vocabulary vocab.txt
    python3 tests/reference/kneser_ney.py --self-check

Formulas: Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", interpolated, with
one discount per order, `D = n1 / (n1 + 2 n2)`, or modified, with three. The counts of the lower orders are the numbers
of distinct words before, except after the start of the sentence, which nothing precedes: raw counts there.
"""

import argparse
import glob
import itertools
import math
import random
import subprocess
from collections import Counter, defaultdict
from fractions import Fraction

SPECIALS = ["<S>", "</S>", "<UNK>"]
UNKNOWN = 2


def lines(pattern):
    """Lists of words of all files that a pattern names; .zst through the program zstd."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise SystemExit(f"{pattern}: no such files")
    for path in paths:
        if path.endswith(".zst"):
            text = subprocess.run(["zstd", "-dqc", path], check=True, stdout=subprocess.PIPE).stdout.decode()
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        yield from (line.split() for line in text.split("\n") if line)


def most_frequent(sentences, size):
    """The specials, then words by falling count, then by bytes."""
    counts = Counter(itertools.chain.from_iterable(sentences))
    words = sorted(counts.keys() - set(SPECIALS), key=lambda word: (-counts[word], word.encode()))
    return SPECIALS + words[: size - len(SPECIALS)]


def encode(sentences, vocabulary, backward):
    """Lists of ids with boundaries, in reading order. Id 0 is the start, 1 the end, for either direction."""
    ids = {word: i for i, word in enumerate(vocabulary)}
    for words in sentences:
        if backward:
            words = words[::-1]
        yield [0, *(ids.get(word, UNKNOWN) for word in words), 1]


class Discounts:
    """What is subtracted from counts 1, 2, and 3 or more; estimated from counts of counts."""

    def __init__(self, counts, modified):
        n = Counter(count for count in counts if count <= 4)
        y = Fraction(n[1], n[1] + 2 * n[2]) if n[1] else Fraction(1, 2)
        self.values = [y, y, y]
        if modified and all(n[k] for k in (1, 2, 3, 4)):
            self.values = [k - (k + 1) * y * Fraction(n[k + 1], n[k]) for k in (1, 2, 3)]
        self.values = [min(max(d, Fraction(0)), Fraction(k)) for k, d in zip((1, 2, 3), self.values)]

    def of(self, count):
        return self.values[min(count, 3) - 1] if count else 0


class Order:
    """Discounted counts of one order: (context, word) pairs packed into numbers, and totals per context."""

    def __init__(self, counts, v, modified, number):
        self.v = v
        self.counts = counts
        discounts = Discounts(counts.values(), modified)
        self.discounts = [number(d) for d in discounts.values]
        self.total, seen = defaultdict(int), defaultdict(lambda: [0, 0, 0])
        for key, count in counts.items():
            self.total[key // v] += count
            seen[key // v][min(count, 3) - 1] += 1
        mass = lambda kinds: sum(n * d for n, d in zip(kinds, self.discounts))
        self.left = {context: mass(kinds) for context, kinds in seen.items()}

    def probability(self, context, word, below):
        """Interpolated with the probability of the order below."""
        total = self.total.get(context, 0)
        if not total:
            return below
        count = self.counts.get(context * self.v + word, 0)
        kept = count - self.discounts[min(count, 3) - 1] if count else 0
        return (kept + self.left[context] * below) / total


class Trigrams:
    """`number` is float, or Fraction in the self-check."""

    def __init__(self, sentences, v, modified=False, number=float):
        self.v, self.number = v, number
        three, starts = Counter(), Counter()
        for ids in sentences:
            three.update((a * v + b) * v + c for a, b, c in zip(ids, ids[1:], ids[2:]))
            starts[ids[1]] += 1
        # Distinct words before a bigram; the bigrams at the start are counted as often as they occur.
        two = Counter(key % (v * v) for key in three)
        two.update(starts)  # context 0: the key is the word itself
        one = Counter(key % v for key in two)
        self.orders = [Order(counts, v, modified, number) for counts in (one, two, three)]

    def probability(self, context, word):
        """`context`: the ids before, one at the start of a sentence, else two."""
        p = self.orders[0].probability(0, word, self.number(1) / (self.v - 1))  # the start is never predicted
        p = self.orders[1].probability(context[-1], word, p)
        if len(context) == 2:
            p = self.orders[2].probability(context[0] * self.v + context[1], word, p)
        return p

    def logarithms(self, ids):
        return [math.log(self.probability(ids[max(0, t - 2) : t], ids[t])) for t in range(1, len(ids))]


def perplexity(model, sentences):
    sums = [(sum(scores), len(scores)) for scores in map(model.logarithms, sentences)]
    predictions = sum(n for _, n in sums)
    return math.exp(-sum(total for total, _ in sums) / predictions), predictions


# --------------------------------------------------------------------------- self-check


def self_check():
    rng = random.Random(1)
    v = 12
    draw = lambda: [0, *(rng.choice([2, 3, 4, 4, 5, 5, 5, 6, 7, 7, 8]) for _ in range(rng.randrange(9))), 1]
    sentences = [draw() for _ in range(60)]
    words = range(1, v)
    for modified in (False, True):
        model = Trigrams(sentences, v, modified, Fraction)
        contexts = [(0,), *itertools.product(range(v), words)]
        for context in contexts:
            assert sum(model.probability(context, word) for word in words) == 1, context
            assert all(model.probability(context, word) > 0 for word in words), context
        print(f"{len(contexts)} contexts, {'three discounts' if modified else 'one discount'}: every sum is exactly 1")
    by_hand()


def by_hand():
    """`a b` and `a c`, ids a 3, b 4, c 5; v 6. n1 of trigrams: <S>ab <S>ac ab</S> ac</S> = 4, n2 = 0: D = 1.

    Bigrams before which one distinct word stands: ab, ac, b</S>, c</S>; <S>a occurs twice: D = 4 / (4 + 2) = 2/3.
    Words: a after <S>, b and c after a, </S> after b and c: n1 = 3, n2 = 1, D = 3/5; 5 in all, 3/5 * 4 = 12/5 left.
    """
    model = Trigrams([[0, 3, 4, 1], [0, 3, 5, 1]], 6, number=Fraction)
    p_b = (1 - Fraction(3, 5)) / 5 + Fraction(12, 25) * Fraction(1, 5)
    p_b_after_a = (1 - Fraction(2, 3)) / 2 + Fraction(4, 3) / 2 * p_b
    p_b_after_start_a = 0 + Fraction(2, 2) * p_b_after_a  # the trigram's discount takes all of its count
    assert model.probability((3,), 4) == p_b_after_a
    assert model.probability((0, 3), 4) == p_b_after_start_a
    print("two sentences: as computed by hand")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", help="files, as a pattern: one sentence per line, tokens separated by white space")
    parser.add_argument("--valid", help="files that are scored")
    parser.add_argument("--vocabulary", help="one word per line, as elmo vocab writes it")
    parser.add_argument("--size", type=int, default=10_000, help="without --vocabulary: the most frequent words")
    parser.add_argument("--self-check", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_check:
        return self_check()
    if not (arguments.train and arguments.valid):
        parser.error("--train and --valid are needed")
    if arguments.vocabulary:
        with open(arguments.vocabulary, encoding="utf-8") as file:
            vocabulary = file.read().split("\n")[:-1]
        assert vocabulary[:3] == SPECIALS, "the vocabulary begins with <S>, </S>, <UNK>"
    else:
        vocabulary = most_frequent(lines(arguments.train), arguments.size)
    tokens = [token for ids in encode(lines(arguments.valid), vocabulary, False) for token in ids[1:-1]]
    unknown = tokens.count(UNKNOWN) / len(tokens)
    print(f"vocabulary: {len(vocabulary):,}; {unknown:.2%} of {len(tokens):,} tokens are <UNK>")
    for modified in (False, True):
        means = []
        for side in ("forward", "backward"):
            read = lambda pattern: encode(lines(pattern), vocabulary, side == "backward")
            model = Trigrams(read(arguments.train), len(vocabulary), modified)
            value, predictions = perplexity(model, read(arguments.valid))
            means.append(math.log(value))
            discounts = [[round(d, 3) for d in order.discounts] for order in model.orders]
            print(f"{side:8} {value:8.2f}  {predictions:,} predictions, discounts {discounts}", flush=True)
        name = "modified Kneser-Ney, three discounts" if modified else "Kneser-Ney, one discount"
        print(f"average  {math.exp(sum(means) / 2):8.2f}  {name}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How far the token vectors of sentences that are read alone are from those of running text, by start state.

    options="--tokenizer whitespace --sentences off --level token --layers all --on-long truncate"
    elmo embed held-out.txt $options --model model --state carry --batch-rows 1 -o carried
    elmo embed held-out.txt $options --model model --state zero -o zero
    for state in states/*; do elmo embed held-out.txt $options --model $state --state warm -o out/$(basename $state); done
    python3 benches/scripts/state_distances.py carried zero out/*

Prints for each folder the norm of the difference over the norm, in percent, as a mean over tokens: over the first ones of all sentences
in the direction of reading, and over all. Layers 1 and 2, forward and backward. The first twentieth of the tokens is left out, where the
carried state is still near that of the beginning. `warm_states.py` makes the states. Needs numpy and pyarrow.
"""

import argparse

import numpy as np
import pyarrow.parquet as pq

LAYERS = 3


def sentences(folder):
    """Per sentence an array [tokens, layers, 2, D]: both halves of a layer's vector."""
    column = pq.read_table(folder, columns=["tokens"])["tokens"].combine_chunks()
    vectors = column.values.field("embedding")
    width = vectors.type.list_size // LAYERS // 2
    numbers = np.asarray(vectors.values, np.float64).reshape(-1, LAYERS, 2, width)
    ends = np.asarray(column.offsets)
    return [numbers[start:end] for start, end in zip(ends, ends[1:])]


def without_start(all_sentences):
    total, seen = sum(map(len, all_sentences)), 0
    for number, sentence in enumerate(all_sentences):
        if seen >= total / 20:
            return number
        seen += len(sentence)
    return 0


def distance(pairs):
    """Mean over the tokens."""
    a, b = (np.concatenate(half) for half in zip(*pairs))
    return 100 * (np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("carried")
    parser.add_argument("others", nargs="+")
    args = parser.parse_args()
    carried = sentences(args.carried)
    first = without_start(carried)
    print("folder\tlayer\tfirst forward\tfirst backward\tall forward\tall backward")
    for folder in args.others:
        pairs = [(a, b) for a, b in zip(sentences(folder), carried, strict=True) if len(b)][first:]
        for layer in range(1, LAYERS):
            of = lambda at, way: distance([(a[at, layer, way], b[at, layer, way]) for a, b in pairs])  # noqa: E731
            row = [of(slice(0, 1), 0), of(slice(-1, None), 1), of(slice(None), 0), of(slice(None), 1)]
            print(folder, layer, *(f"{number:.2f}" for number in row), sep="\t")


if __name__ == "__main__":
    main()

"""What the programs of compare.py share: choosing sentences, and the command line and report of one peer.

A peer is an object with these members:

* `versions`: names and versions of the libraries that compute;
* `embed(sentences, batch)`: yields an array (layers, words, dimensions) per sentence, in order.
"""

import argparse
import json
import resource
import time
from pathlib import Path

LATENCY_SENTENCES = 100


def read_sentences(path):
    """Lists of words, split at white space. Empty lines are left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [words for words in map(str.split, lines) if words]


def spread(items, n, block):
    """About n of the items: whole blocks of neighbours, evenly spaced; at least one block, at most all items."""
    if n >= len(items) or len(items) <= block:
        return items
    blocks = [items[i : i + block] for i in range(0, len(items) - block + 1, block)]
    count = max(1, min(len(blocks), n // block))
    chosen = [blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count)]
    return [item for block in chosen for item in block]


def latency_sentences(sentences, words, warm_up):
    """Sentences to warm up with, and distinct sentences of this many words to time."""
    timed = [list(key) for key in dict.fromkeys(tuple(s) for s in sentences if len(s) == words)]
    timed = spread(timed, LATENCY_SENTENCES, 1)
    taken = set(map(tuple, timed))
    return spread([s for s in sentences if tuple(s) not in taken], warm_up, 1), timed


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def throughput(peer, sentences, arguments):
    if arguments.order == "sorted":
        sentences = sorted(sentences, key=len)
    chosen = spread(sentences, arguments.sentences, arguments.batch)
    wall, cpu, tokens = time.perf_counter(), cpu_seconds(), 0
    for vectors in peer.embed(chosen, arguments.batch):
        tokens += vectors.shape[1]
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    assert tokens == sum(map(len, chosen)), "the peer returned another number of tokens"
    return dict(sentences=len(chosen), tokens=tokens, seconds=wall, cpu_seconds=cpu)


def dump(peer, sentences, arguments):
    """Saves the layers of all words. The peer is fresh: LSTM states of its first batch start from zeros."""
    import numpy

    vectors = list(peer.embed(sentences, arguments.batch))
    numpy.save(arguments.dump, numpy.concatenate(vectors, axis=1))
    return dict(sentences=len(sentences), tokens=sum(v.shape[1] for v in vectors))


def latency(peer, sentences, arguments):
    """Milliseconds per call with one sentence."""
    warm_up, timed = latency_sentences(sentences, arguments.latency, arguments.warm_up)
    for _ in peer.embed(warm_up, arguments.batch):
        pass
    milliseconds = []
    for sentence in timed:
        start = time.perf_counter()
        list(peer.embed([sentence], 1))
        milliseconds.append(1000 * (time.perf_counter() - start))
    return dict(milliseconds=milliseconds)


def main(description, load, add_arguments=lambda parser: None):
    """Runs one peer and prints its report as one line of JSON. `load(arguments)` returns the peer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="folder with options.json and weights.hdf5")
    parser.add_argument("text", type=Path, help="one sentence per line, words separated by spaces")
    parser.add_argument("--sentences", type=int, default=1 << 62, help="embed about this many, evenly spaced")
    parser.add_argument("--order", choices=("file", "sorted"), default="file", help="sorted: by length, the whole text")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dump", type=Path, metavar="FILE.npy", help="save the vectors of the text instead")
    parser.add_argument("--latency", type=int, metavar="WORDS", help="time single sentences of this length instead")
    parser.add_argument("--warm-up", type=int, default=20, help="sentences to embed before --latency")
    add_arguments(parser)
    arguments = parser.parse_args()
    sentences = read_sentences(arguments.text)
    peer = load(arguments)
    report = dict(versions=peer.versions, loaded_mb=peak_mb())
    if arguments.dump:
        report |= dump(peer, sentences, arguments)
    elif arguments.latency:
        report |= latency(peer, sentences, arguments)
    else:
        report |= throughput(peer, sentences, arguments)
    print(json.dumps(report | dict(peak_mb=peak_mb())))

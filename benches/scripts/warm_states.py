#!/usr/bin/env python3
"""Writes copies of a model whose start state `warm` was taken after other texts, to compare them with `elmo eval`.

    elmo model convert books model --to safetensors --warm-state
    python3 benches/scripts/warm_states.py model --text corpus.txt --out states
    for state in states/*; do elmo eval held-out.txt --model "$state" --state warm; done

MODEL is a model directory with `warm_state.safetensors`, and `--text` has a tokenised sentence on each line: text of the kind that
the model was trained on. `open` states are taken after the last word of the last sentence, as in training; `closed` ones after the
boundary behind it. `mean` is the mean of the open states after each of 200 sentences. Needs numpy; the forward pass is that of
`tests/reference/golden.py`.
"""

import argparse
import json
import re
import struct
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "reference"))
from golden import BiLm  # noqa: E402

MAX_PASSES, TOLERANCE = 20, 1e-6
NUMBERS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def read(path):
    """Tensors and metadata of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[first:last], NUMBERS[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def write(path, numbers, metadata):
    raw = np.asarray(numbers, "<f4").tobytes()
    entry = {"dtype": "F32", "shape": [len(numbers)], "data_offsets": [0, len(raw)]}
    text = json.dumps({"__metadata__": metadata, "warm_state": entry}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw)


def zero(model):
    """Per direction the h and the c of all layers, one row each."""
    sizes = (model.lstm["projection_dim"], model.lstm["dim"])
    return [tuple([np.zeros((1, n)) for _ in range(model.lstm["n_layers"])] for n in sizes) for _ in (0, 1)]


def after(model, sentence, state, closed):
    """The state after a sentence."""
    whole = ["<S>", *sentence, "</S>"]
    state = [tuple(list(part) for part in direction) for direction in state]
    for direction, words in enumerate([whole if closed else whole[:-1], whole if closed else whole[1:]]):
        tokens, lengths = model.token_layer([words])
        model.stack(direction, tokens, lengths, state[direction])
    return state


def flat(state):
    """In the order of the file: for each layer h forward, h backward, c forward, c backward."""
    layers = range(len(state[0][0]))
    return np.concatenate([state[r][k][i][0] for i in layers for k in (0, 1) for r in (0, 1)])


def converged(model, text, closed):
    """The state after reading a text until it no longer changes."""
    state = zero(model)
    for _ in range(MAX_PASSES):
        before = flat(state)
        for sentence in text:
            state = after(model, sentence, state, closed)
        if np.abs(flat(state) - before).max() <= TOLERANCE:
            break
    return flat(state)


def mean(model, text):
    """The mean of the states after each sentence of running text."""
    state, total = zero(model), 0.0
    for sentence in text:
        state = after(model, sentence, state, False)
        total = total + flat(state)
    return total / len(text)


def english():
    """The text of the library."""
    source = (ROOT / "src" / "states.rs").read_text()
    block = re.search(r"WARM_UP: \[&str; \d+\] = \[(.*?)\];", source, re.S)[1]
    return [json.loads(line).split() for line in re.findall(r'"(?:[^"\\]|\\.)*"', block)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options = json.loads((args.model / "options.json").read_text())
    model = BiLm(options, read(args.model / "weights.safetensors")[0])
    _, metadata = read(args.model / "warm_state.safetensors")
    lines = (line.split() for line in args.text.read_text().splitlines())
    corpus = [words for words in lines if 5 <= len(words) <= 40]
    texts = {"english": english(), "corpus": corpus[:6], "corpus-other": corpus[100:106], "boundaries": [[]]}
    states = {f"{name}-{kind}": converged(model, text, kind == "closed")
              for name, text in texts.items() for kind in ("open", "closed")}
    states["corpus-mean"] = mean(model, corpus[:200])
    for name, numbers in states.items():
        folder = args.out / name
        folder.mkdir(parents=True)
        for file in args.model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        write(folder / "warm_state.safetensors", numbers, metadata)
    stored = read(args.model / "warm_state.safetensors")[0]["warm_state"]
    print(f"largest difference of english-open from the stored state: {np.abs(states['english-open'] - stored).max():.1e}")


if __name__ == "__main__":
    main()

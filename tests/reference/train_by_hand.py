#!/usr/bin/env python3
"""Repeats tests/fixtures/train from its files alone, in float64 numpy, with the backward pass written out by hand.

A second opinion on train_step.py, with which it shares nothing but the recipe of the initial weights (golden.py): no
automatic differentiation, one window cell after the other in the packer, states and gradients in plain arrays.

    python3 tests/reference/train_by_hand.py

Letters as in train_step.py. `d_x` is the gradient of the scaled loss with respect to x.
"""

import json
import math
from pathlib import Path

import numpy as np
from golden import bound, tensor_shapes, uniform
from safetensors.numpy import load_file

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "train"
AGREEMENT = 1e-11


def read_json(name):
    return json.loads((FIXTURES / name).read_bytes())


TEXT = read_json("text.json")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# --------------------------------------------------------------------------- windows


def fill(sentences, backward, rows, positions):
    """Windows [row][position] of (input, target), cell by cell."""
    sentences = [["<S>", *s, "</S>"][:: -1 if backward else 1] for s in sentences]
    reading, windows = [[] for _ in range(rows)], []
    while True:
        window = [[None] * positions for _ in range(rows)]
        for row in range(rows):
            for position in range(positions):
                if len(reading[row]) < 2:  # its last symbol was a target, and is never an input
                    if not sentences:
                        return windows
                    reading[row] = sentences.pop(0)
                window[row][position] = tuple(reading[row][:2])
                reading[row] = reading[row][1:]
        windows.append(window)


def check_windows():
    known = {word: i for i, word in enumerate(TEXT["vocabulary"])}
    stored = load_file(FIXTURES / "windows.safetensors")
    steps, _, rows, positions = stored["inputs"].shape
    for r, side in enumerate(("forward", "backward")):
        windows = fill(TEXT[side], r == 1, rows, positions)[:steps]
        inputs = [[[TEXT["words"].index(pair[0]) for pair in row] for row in window] for window in windows]
        targets = [[[known.get(pair[1], known["<UNK>"]) for pair in row] for row in window] for window in windows]
        assert (stored["inputs"][:, r] == inputs).all() and (stored["targets"][:, r] == targets).all(), side
    packing = read_json("packing.json")
    for r, side in enumerate(("forward", "backward")):
        windows = fill(packing["sentences"], r == 1, packing["rows"], packing["positions"])
        sheets = [window[side] for window in packing["windows"]]
        joined = [[list(zip(*rows)) for rows in zip(sheet["inputs"], sheet["targets"])] for sheet in sheets]
        assert windows == joined, f"packing.json: {side}"
    print("windows are the same")


# --------------------------------------------------------------------------- token layer


class TokenLayer:
    """Character rows (N, M) -> token vectors (N, P), and back."""

    def __init__(self, options, w):
        self.options, self.w = options, w

    def forward(self, ids):
        self.ids, self.x, self.top, self.inputs = ids, [], [], []
        e = self.w["char_embed"][ids]
        for i, (width, n) in enumerate(self.options["filters"]):
            filters = self.w[f"CNN/W_cnn_{i}"].reshape(-1, n)
            places = ids.shape[1] - width + 1
            flat = np.stack([e[:, k : k + width].reshape(len(ids), -1) for k in range(places)])  # (place, N, width * C)
            u = flat @ filters + self.w[f"CNN/b_cnn_{i}"]
            self.top.append(u.argmax(axis=0))  # (N, n)
            self.x.append(u.max(axis=0))
        x = np.concatenate(self.x, axis=1)
        x = np.maximum(x, 0) if self.options["activation"] == "relu" else np.tanh(x)
        self.features = x
        for k in range(self.options["n_highway"]):
            name = f"CNN_high_{k}"
            g = sigmoid(x @ self.w[f"{name}/W_carry"] + self.w[f"{name}/b_carry"])
            h = np.maximum(x @ self.w[f"{name}/W_transform"] + self.w[f"{name}/b_transform"], 0)
            self.inputs.append((x, g, h))
            x = g * h + (1 - g) * x
        self.last = x
        return x @ self.w["CNN_proj/W_proj"] + self.w["CNN_proj/b_proj"] if "CNN_proj/W_proj" in self.w else x

    def backward(self, d, into):
        if "CNN_proj/W_proj" in self.w:
            into["CNN_proj/W_proj"] += self.last.T @ d
            into["CNN_proj/b_proj"] += d.sum(axis=0)
            d = d @ self.w["CNN_proj/W_proj"].T
        for k in reversed(range(self.options["n_highway"])):
            d = self.highway_backward(f"CNN_high_{k}", *self.inputs[k], d, into)
        d = d * ((self.features > 0) if self.options["activation"] == "relu" else 1 - self.features**2)
        first = 0
        for i, (width, n) in enumerate(self.options["filters"]):
            self.filter_backward(i, width, n, d[:, first : first + n], into)
            first += n

    def highway_backward(self, name, x, g, h, d, into):
        d_gate = d * (h - x) * g * (1 - g)
        d_transform = d * g * (h > 0)
        for part, d_part in (("carry", d_gate), ("transform", d_transform)):
            into[f"{name}/W_{part}"] += x.T @ d_part
            into[f"{name}/b_{part}"] += d_part.sum(axis=0)
        return d * (1 - g) + d_gate @ self.w[f"{name}/W_carry"].T + d_transform @ self.w[f"{name}/W_transform"].T

    def filter_backward(self, i, width, n, d, into):
        """Only the largest position of each filter has a gradient."""
        into[f"CNN/b_cnn_{i}"] += d.sum(axis=0)
        for token in range(len(self.ids)):
            for o in range(n):
                place = self.top[i][token, o]
                characters = self.ids[token, place : place + width]
                into[f"CNN/W_cnn_{i}"][0, :, :, o] += d[token, o] * self.w["char_embed"][characters]
                np.add.at(into["char_embed"], characters, d[token, o] * self.w[f"CNN/W_cnn_{i}"][0, :, :, o])


# --------------------------------------------------------------------------- LSTM


class Cell:
    """One layer over a window: (R, T, P) -> (R, T, P), without the skip connection."""

    def __init__(self, options, w, name):
        self.options, self.w, self.name = options, w, name
        self.projected = f"{name}/W_P_0" in w

    def forward(self, x, h, c):
        self.steps, outputs = [], []
        for t in range(x.shape[1]):
            joined = np.concatenate([x[:, t], h], axis=1)
            z = joined @ self.w[f"{self.name}/W_0"] + self.w[f"{self.name}/B"]
            i, j, f, o = np.split(z, 4, axis=1)
            i, j, f, o = sigmoid(i), np.tanh(j), sigmoid(f + 1), sigmoid(o)
            raw = f * c + i * j
            now = self.clip(raw, "cell_clip")
            m = o * np.tanh(now)
            raw_h = m @ self.w[f"{self.name}/W_P_0"] if self.projected else m
            h = self.clip(raw_h, "proj_clip") if self.projected else raw_h
            self.steps.append((joined, i, j, f, o, c, raw, now, m, raw_h))
            c = now
            outputs.append(h)
        return np.stack(outputs, axis=1), h, c

    def clip(self, x, what):
        limit = self.options[what]
        return x if limit is None else np.clip(x, -limit, limit)

    def open(self, x, what):
        """Where the clip lets the gradient through: on and inside the limits."""
        limit = self.options[what]
        return 1.0 if limit is None else np.abs(x) <= limit

    def backward(self, d_y, into):
        w = self.w[f"{self.name}/W_0"]
        d_x = np.zeros_like(d_y)
        d_h, d_c = 0.0, 0.0  # nothing comes from the next window
        for t in reversed(range(d_y.shape[1])):
            joined, i, j, f, o, before, raw, now, m, raw_h = self.steps[t]
            d_m = d_y[:, t] + d_h
            if self.projected:
                d_raw_h = d_m * self.open(raw_h, "proj_clip")
                into[f"{self.name}/W_P_0"] += m.T @ d_raw_h
                d_m = d_raw_h @ self.w[f"{self.name}/W_P_0"].T
            tanh = np.tanh(now)
            d_raw = (d_c + d_m * o * (1 - tanh**2)) * self.open(raw, "cell_clip")
            d_i, d_j = d_raw * j * i * (1 - i), d_raw * i * (1 - j**2)
            d_f, d_o = d_raw * before * f * (1 - f), d_m * tanh * o * (1 - o)
            d_z = np.concatenate([d_i, d_j, d_f, d_o], axis=1)
            into[f"{self.name}/W_0"] += joined.T @ d_z
            into[f"{self.name}/B"] += d_z.sum(axis=0)
            d_joined = d_z @ w.T
            d_x[:, t], d_h = np.split(d_joined, 2, axis=1)
            d_c = d_raw * f
        return d_x


class Direction:
    """The layers of one direction, with dropout and skip connections."""

    def __init__(self, options, w, r):
        lstm = options["lstm"]
        self.skip, self.keep = lstm["use_skip_connections"], 1 - options["dropout"]
        self.cells = [Cell(lstm, w, f"RNN_{r}/RNN/MultiRNNCell/Cell{i}/LSTMCell") for i in range(lstm["n_layers"])]

    def forward(self, x, state, masks):
        self.factors = [1.0 if masks is None else masks[k] / self.keep for k in range(len(self.cells) + 1)]
        x, after = x * self.factors[0], []
        for k, cell in enumerate(self.cells):
            y, h, c = cell.forward(x, *state[k])
            x = (y + x if k > 0 and self.skip else y) * self.factors[k + 1]
            after.append((h, c))
        return x, after

    def backward(self, d, into):
        for k in reversed(range(len(self.cells))):
            d = d * self.factors[k + 1]
            d_x = self.cells[k].backward(d, into)
            d = d_x + d if k > 0 and self.skip else d_x
        return d * self.factors[0]


# --------------------------------------------------------------------------- loss


def full_softmax(x, targets, w, into, scale):
    """Mean loss of (n, P) with (n,) targets, and scale * d loss / d x."""
    logits = x @ w["softmax/W"].T + w["softmax/b"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    n = np.arange(len(x))
    loss = -np.log(p[n, targets]).mean()
    p[n, targets] -= 1
    d = p * scale / len(x)
    into["softmax/W"] += d.T @ x
    into["softmax/b"] += d.sum(axis=0)
    return loss, d @ w["softmax/W"]


def sampled_softmax(x, targets, given, w, into, scale):
    """Position by position, over a list of classes: the target, then the negatives that differ from it."""
    loss, d_x = 0.0, np.zeros_like(x)
    for n, target in enumerate(targets):
        others = given["negatives"] != target
        classes = np.concatenate([[target], given["negatives"][others]])
        counts = np.concatenate([[given["targets"][n]], given["counts"][others]])
        logits = w["softmax/W"][classes] @ x[n] + w["softmax/b"][classes] - np.log(counts)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        loss -= math.log(p[0]) / len(x)
        p[0] -= 1
        d = p * scale / len(x)
        into["softmax/W"][classes] += np.outer(d, x[n])  # classes are distinct
        into["softmax/b"][classes] += d
        d_x[n] = d @ w["softmax/W"][classes]
    return loss, d_x


# --------------------------------------------------------------------------- training


def character_ids(words, m):
    special = {"<S>": bytes([0]), "</S>": bytes([1])}
    table = np.full((len(words), m), 260)
    for row, word in zip(table, words):
        inner = np.frombuffer(word.encode()[: m - 2], np.uint8).astype(int)
        if word in special:
            inner = np.array([256 + special[word][0]])
        row[0], row[1 + len(inner)] = 258, 259
        row[1 : 1 + len(inner)] = inner
    return table


def weights_of(case):
    options = case["options"]
    v, p = options["n_tokens_vocab"], options["lstm"]["projection_dim"]
    shapes = tensor_shapes(options) | {"softmax/W": (v, p), "softmax/b": (v,)}
    limits = {name: bound(name, shape, case["scale"]) for name, shape in shapes.items()}
    limits["softmax/W"] = case["scale"] * np.sqrt(3 / p)
    return {name: uniform(name, case["seed"], shapes[name], limits[name]).astype(float) for name in case["tensors"]}


def replica(case, w, given, prefix, step, rows, state):
    """Losses, gradients and new state of one replica's rows."""
    options, scale = case["options"], case["gradient_scale"]
    inputs, targets = (WINDOWS[key][step][:, rows] for key in ("inputs", "targets"))
    into = {name: np.zeros_like(value) for name, value in w.items()}
    token_layer = TokenLayer(options["char_cnn"], w)
    vectors = token_layer.forward(character_ids(TEXT["words"], options["char_cnn"]["max_characters_per_token"]))
    d_vectors, losses, after = np.zeros_like(vectors), [], []
    for r in (0, 1):
        direction = Direction(options, w, r)
        masks = given[f"{prefix}/dropout"][step, r] if f"{prefix}/dropout" in given else None
        y, new = direction.forward(vectors[inputs[r]], state[r], masks)
        flat, flat_targets = y.reshape(-1, y.shape[2]), targets[r].ravel()
        if options["sample_softmax"]:
            counts = given[f"{prefix}/expected_counts/negatives"][step, r]
            of_targets = given[f"{prefix}/expected_counts/targets"][step, r][rows].ravel()
            sample = dict(negatives=given[f"{prefix}/negatives"][step, r], counts=counts, targets=of_targets)
            loss, d = sampled_softmax(flat, flat_targets, sample, w, into, scale / 2)
        else:
            loss, d = full_softmax(flat, flat_targets, w, into, scale / 2)
        np.add.at(d_vectors, inputs[r], direction.backward(d.reshape(y.shape), into))
        losses.append(loss)
        after.append(new)
    token_layer.backward(d_vectors, into)
    return losses, into, after


def rate(case, t):
    """A schedule as pieces: warm-up, then what is left."""
    schedule, top = case["schedule"], case["options"]["learning_rate"]
    warm = schedule.get("warmup_steps", 0)
    if t < warm:
        return top / warm * t
    if schedule["name"] == "cosine":
        done = min((t - warm) / (schedule["total_steps"] - warm), 1)
        return top * schedule["final_ratio"] + top * (1 - schedule["final_ratio"]) * math.cos(math.pi / 2 * done) ** 2
    return top / math.sqrt(t / warm) if schedule["name"] == "inverse_sqrt" else top


class Optimizer:
    def __init__(self, settings, w):
        self.settings = settings
        self.a = {name: np.full_like(value, settings.get("initial_accumulator", 0)) for name, value in w.items()}
        self.m = {name: np.zeros_like(value) for name, value in w.items()}

    def update(self, name, w, g, rate, t):
        if self.settings["name"] == "adagrad":
            self.a[name] += g * g
            return w - rate * g / np.sqrt(self.a[name])
        b1, b2 = self.settings["beta1"], self.settings["beta2"]
        self.m[name] += (1 - b1) * (g - self.m[name])
        self.a[name] += (1 - b2) * (g * g - self.a[name])
        decay = self.settings["weight_decay"] if name in self.settings["decayed"] else 0.0
        move = self.m[name] / (1 - b1**t) / (np.sqrt(self.a[name] / (1 - b2**t)) + self.settings["epsilon"])
        return w - rate * (decay * w + move)


def joined(states):
    """States of replicas, each [layer] of (h, c) -> the state of all rows."""
    return [tuple(np.concatenate(parts) for parts in zip(*cells)) for cells in zip(*states)]


def run(case, given):
    """Yields (name, value) of everything that expected.safetensors has for the case."""
    options, name, w = case["options"], case["name"], weights_of(case)
    lstm = options["lstm"]
    steps, _, rows, _ = WINDOWS["inputs"].shape
    replicas = case.get("replicas", 1)
    parts = np.split(np.arange(rows), replicas)
    zero = lambda: [[(np.zeros((rows, lstm["projection_dim"])), np.zeros((rows, lstm["dim"])))] * lstm["n_layers"]] * 2
    state, optimizer, history = zero(), Optimizer(case["optimizer"], w), []
    for t in range(1, steps + 1):
        results = []
        for k, part in enumerate(parts):
            prefix = f"{name}/replica{k}" if replicas > 1 else name
            own = [[(h[part], c[part]) for h, c in side] for side in state]
            results.append(replica(case, w, given, prefix, t - 1, part, own))
        losses = np.mean([r[0] for r in results], axis=0)
        gradients = {n: sum(r[1][n] for r in results) / replicas for n in w}
        state = [joined([r[2][side] for r in results]) for side in (0, 1)]
        norms = [np.sqrt((g**2).sum()) for g in gradients.values()]
        norm = math.sqrt(sum(n * n for n in norms))
        clip = min(1.0, options["all_clip_norm_val"] / norm)
        history.append(([*losses, losses.sum() / 2], norm, clip, rate(case, t), norms))
        w = {n: optimizer.update(n, w[n], g * clip, history[-1][3], t) for n, g in gradients.items()}
        if t in case["kept_weights"]:
            yield from ((f"weights/{t}/{n}", value) for n, value in w.items())
    for key, values in zip(("loss", "norm", "clip", "learning_rate", "tensor_norms"), zip(*history)):
        yield key, np.array(values)[:10] if key == "tensor_norms" else np.array(values)
    for k, what in enumerate("hc"):
        yield f"state/{what}", np.array([[cell[k] for cell in side] for side in state])


WINDOWS = load_file(FIXTURES / "windows.safetensors")

# --------------------------------------------------------------------------- evaluation


def log_probabilities(w, x, targets):
    """(n, P), (n,) -> natural logarithms (n,)."""
    logits = x @ w["softmax/W"].T + w["softmax/b"]
    top = logits.max(axis=1)
    return logits[np.arange(len(x)), targets] - top - np.log(np.exp(logits - top[:, None]).sum(axis=1))


class Reader:
    """Scores cells of (input, target) words, row by row, with carried state."""

    def __init__(self, options, w, rows, start):
        self.w, self.token_layer, self.known = w, TokenLayer(options["char_cnn"], w), TEXT["vocabulary"]
        self.directions = [Direction(options, w, r) for r in (0, 1)]
        self.state = [[tuple(np.repeat(x[None], rows, axis=0) for x in cell) for cell in side] for side in start]

    def read(self, r, window):
        """[row][position] of (input, target) -> logarithms (R, T)."""
        rows, positions = len(window), len(window[0])
        flat = [pair for row in window for pair in row]
        x = self.token_layer.forward(character_ids([word for word, _ in flat], 50)).reshape(rows, positions, -1)
        y, self.state[r] = self.directions[r].forward(x, self.state[r], None)
        ids = [self.known.index(word if word in self.known else "<UNK>") for _, word in flat]
        return log_probabilities(self.w, y.reshape(rows * positions, -1), np.array(ids)).reshape(rows, positions)


def check_evaluation():
    stored = read_json("evaluation.json")
    model, carried = stored["model"], stored["carried"]
    options, lstm = model["options"], model["options"]["lstm"]
    w = weights_of(model | dict(tensors=[*tensor_shapes(options), "softmax/W", "softmax/b"]))
    cell = lambda p, d: [[(p(r, i), d(r, i)) for i in range(lstm["n_layers"])] for r in (0, 1)]
    part = lambda what, n: lambda r, i: uniform(f"state/RNN_{r}/Cell{i}/{what}", model["seed"], (n,), 0.5).astype(float)
    zeros = lambda n: lambda r, i: np.zeros(n)
    sizes = lstm["projection_dim"], lstm["dim"]
    starts = {"zero": cell(*map(zeros, sizes)), "given": cell(part("h", sizes[0]), part("c", sizes[1]))}

    reader = Reader(options, w, carried["rows"], starts["zero"])
    sides = [fill(carried["sentences"], r == 1, carried["rows"], 1) for r in (0, 1)]
    losses = np.array([[-reader.read(r, sides[r][k]).mean() for r in (0, 1)] for k in range(len(sides[0]))])
    worst = np.abs(losses - carried["losses"]).max()
    figures = [np.exp(losses.mean()), *np.exp(losses.mean(axis=0))]
    for key, figure in zip(("perplexity", "forward", "backward"), figures):
        worst = max(worst, abs(carried[key] - figure))
    for entry in stored["sentences"]:
        for r, side in enumerate(("forward", "backward")):
            window = fill([entry["words"]], r == 1, 1, len(entry["words"]) + 1)[0]
            found = Reader(options, w, 1, starts[entry["start"]]).read(r, window)[0]
            worst = max(worst, np.abs(found - entry[side]).max())
    print(f"{'evaluation.json':32} largest difference {worst:.1e}")
    assert worst <= AGREEMENT


def check_small_files():
    worst = 0.0
    for entry in read_json("sampler.json")["sampler"]:
        v = entry["vocabulary_size"]
        p = np.array([(math.log(k + 2) - math.log(k + 1)) / math.log(v + 1) for k in entry["ids"]])
        if "probabilities" in entry:
            worst = max(worst, np.abs(p - entry["probabilities"]).max())
            assert len(p) < v or abs(p.sum() - 1) < 1e-14
            continue
        n, samples = entry["num_tries"], entry["samples"]
        counts = p * samples if n == samples else 1 - (1 - p) ** n
        worst = max(worst, np.abs(counts - entry["expected_counts"]).max())
    for entry in read_json("schedules.json")["schedules"]:
        case = dict(schedule=entry["schedule"], options=dict(learning_rate=entry["learning_rate"]))
        worst = max(worst, *(abs(rate(case, t + 1) - value) for t, value in enumerate(entry["rates"])))
    print(f"{'sampler.json, schedules.json':32} largest difference {worst:.1e}")
    assert worst <= AGREEMENT


# --------------------------------------------------------------------------- all


def main():
    check_windows()
    check_small_files()
    check_evaluation()
    given, expected = load_file(FIXTURES / "given.safetensors"), load_file(FIXTURES / "expected.safetensors")
    seen = set()
    for case in read_json("cases.json")["cases"]:
        worst = 0.0
        for key, value in run(case, given):
            key = f"{case['name']}/{key}"
            seen.add(key)
            assert expected[key].shape == value.shape, key
            worst = max(worst, np.abs(expected[key] - value).max())
        print(f"{case['name']:32} largest difference {worst:.1e}", flush=True)
        assert worst <= AGREEMENT, case["name"]
    assert seen == expected.keys(), expected.keys() ^ seen


if __name__ == "__main__":
    main()

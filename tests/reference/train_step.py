#!/usr/bin/env python3
"""Makes tests/fixtures/train: steps of training the biLM in float64 PyTorch, with explicit operations.

Written from the recipe of bilm-tf (bilm/training.py, bilm/data.py). The forward pass is compared with golden.py, the
gradients with finite differences, and all of it with train_by_hand.py, whose backward pass is written out in numpy.

    python3 tests/reference/train_step.py                # writes tests/fixtures/train
    python3 tests/reference/train_step.py --check        # computes anew and compares with what lies there
    python3 tests/reference/train_step.py --self-check   # gradients against differences, activations against golden.py

Letters: R rows, T positions of a window, N words, M characters per word, C character width, F filters,
P projection_dim, D LSTM dim, L LSTM layers, V vocabulary size. Direction 0 is forward, 1 is backward.
"""

import argparse
import json
import math
import platform
import random
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from golden import BiLm, bound, json_lines, seeded_state, tensor_shapes, uniform
from safetensors.numpy import load_file, save_file

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "train"
STEPS, ROWS, POSITIONS = 50, 4, 5
# Norms of single gradients are kept for so many steps.
NORMS_OF = 10
# Of losses and weights, and of norms relative to their size, to a program in float32.
FLOAT32_TOLERANCE = 5e-6

# --------------------------------------------------------------------------- text and windows

# Mostly lower-case words of one small vocabulary. "grandfather..." has 54 bytes, "日本..." 51, cut inside a character.
TEXT = """
the river runs past the mill .
the old mill stands by the river .
rain fell on the mill and on the river .
who saw the rain ?
nobody saw the old man .
the man saw the river , and the rain fell .
yes .
no , said the man .
no , said Ελλάδα .
the café by the river was old .
Ελλάδα was naïve , said nobody .
😀 said the café .
the naïve man ran past the café , past the mill , and past the old river .
grandfather-and-grandmother-and-great-grandfather-again said yes .
grandfather-and-grandmother-and-great-grandfather-again said no .
grandfather-and-grandmother-and-great-grandfather-never was not here .
日本日本日本日本日本日本日本日本日本 was old .
see <S> and </S> and <UNK> here .
and the rain ran on and on and on and on , past the mill , past the man , past nobody .
was it here ?
it was .
?
who ran ?
it ran .
it was unheard-of , said nobody .
a
yes , yes , yes !
"""
SENTENCES = [line.split() for line in TEXT.strip().split("\n")]


def vocabulary(sentences, size):
    """The specials, then words by falling count, then by bytes."""
    counts = Counter(word for sentence in sentences for word in sentence)
    specials = ["<S>", "</S>", "<UNK>"]
    words = sorted(counts.keys() - set(specials), key=lambda word: (-counts[word], word.encode()))
    return specials + words[: size - len(specials)]


VOCABULARY = vocabulary(SENTENCES, 32)
WORDS = sorted({word for sentence in SENTENCES for word in sentence} | {"<S>", "</S>"}, key=str.encode)


def stream(seed, predictions):
    """Sentences in passes of different order, enough for so many predictions."""
    order, sentences = random.Random(seed), []
    while sum(len(sentence) + 1 for sentence in sentences) < predictions:
        sentences += order.sample(SENTENCES, len(SENTENCES))
    return sentences


def pairs(sentence, direction):
    """Input and target of every prediction of a sentence, in reading order."""
    symbols = ["<S>", *sentence, "</S>"]
    if direction == 1:
        symbols.reverse()
    return list(zip(symbols[:-1], symbols[1:]))


def pack(sentences, direction, rows, positions):
    """Yields windows [row][position] of pairs, until a row cannot be filled.

    A row takes the next sentence of the common stream when it has read its own, also inside a window.
    """
    reader = iter(sentences)
    rest = [[] for _ in range(rows)]
    while True:
        window = []
        for row in range(rows):
            while len(rest[row]) < positions:
                sentence = next(reader, None)
                if sentence is None:
                    return
                rest[row] += pairs(sentence, direction)
            window.append(rest[row][:positions])
            rest[row] = rest[row][positions:]
        yield window


def word_id(word):
    return VOCABULARY.index(word) if word in VOCABULARY else VOCABULARY.index("<UNK>")


def character_rows(words, m):
    """(N, M): ids of training, which are not shifted by one."""
    special = {"<S>": [256], "</S>": [257]}
    rows = []
    for word in words:
        inner = special.get(word) or list(word.encode())[: m - 2]
        rows.append([258] + inner + [259] + [260] * (m - 2 - len(inner)))
    return torch.tensor(rows)


def encoded(windows):
    """Windows of pairs -> (S, R, T) indices into WORDS, (S, R, T) ids in VOCABULARY."""
    inputs = [[[WORDS.index(word) for word, _ in row] for row in window] for window in windows]
    targets = [[[word_id(word) for _, word in row] for row in window] for window in windows]
    return np.array(inputs), np.array(targets)


FORWARD_TEXT, BACKWARD_TEXT = (stream(seed, STEPS * ROWS * POSITIONS + 100) for seed in (1, 2))


def training_windows():
    """inputs and targets: (S, 2, R, T)."""
    sides = [list(pack(text, r, ROWS, POSITIONS))[:STEPS] for r, text in enumerate((FORWARD_TEXT, BACKWARD_TEXT))]
    forward, backward = encoded(sides[0]), encoded(sides[1])
    return tuple(np.stack([f, b], axis=1) for f, b in zip(forward, backward))


# --------------------------------------------------------------------------- model


def initial_weights(options, seed, scale):
    """Float32 numbers by the recipe of seeded.rs, the softmax included."""
    weights = {n: uniform(n, seed, s, bound(n, s, scale)) for n, s in tensor_shapes(options).items()}
    v, p = options["n_tokens_vocab"], options["lstm"]["projection_dim"]
    weights["softmax/W"] = uniform("softmax/W", seed, (v, p), scale * np.sqrt(3 / p))
    weights["softmax/b"] = uniform("softmax/b", seed, (v,), scale / 2)
    return dict(sorted(weights.items()))


class Model:
    """The biLM with its softmax; `w` holds the leaves that are trained."""

    def __init__(self, options, weights, dtype=torch.float64):
        self.cnn, self.lstm, self.dtype = options["char_cnn"], options["lstm"], dtype
        self.keep = 1 - options["dropout"]
        self.w = {name: torch.tensor(value, dtype=dtype).requires_grad_() for name, value in weights.items()}
        self.characters = character_rows(WORDS, self.cnn["max_characters_per_token"])
        self.clipped = Counter()

    def token_vectors(self, characters):
        """(N, M) -> (N, P)."""
        e = self.w["char_embed"][characters]  # (N, M, C)
        x = []
        for i, (width, _) in enumerate(self.cnn["filters"]):
            windows = e.unfold(1, width, 1)  # (N, M - width + 1, C, width)
            u = torch.einsum("npcw,wcf->npf", windows, self.w[f"CNN/W_cnn_{i}"][0]) + self.w[f"CNN/b_cnn_{i}"]
            u = u.max(dim=1).values
            x.append(torch.relu(u) if self.cnn["activation"] == "relu" else torch.tanh(u))
        x = torch.cat(x, dim=1)  # (N, F)
        for k in range(self.cnn["n_highway"]):
            gate = torch.sigmoid(x @ self.w[f"CNN_high_{k}/W_carry"] + self.w[f"CNN_high_{k}/b_carry"])
            new = torch.relu(x @ self.w[f"CNN_high_{k}/W_transform"] + self.w[f"CNN_high_{k}/b_transform"])
            x = gate * new + (1 - gate) * x
        if "CNN_proj/W_proj" in self.w:
            x = x @ self.w["CNN_proj/W_proj"] + self.w["CNN_proj/b_proj"]
        return x

    def clip(self, x, limit, what):
        if limit is None:
            return x
        self.clipped[what] += int((x.abs() > limit).sum())
        self.clipped[f"all {what}"] += x.numel()
        return torch.clamp(x, -limit, limit)  # derivative 1 on and inside the limits, 0 outside

    def layer(self, direction, layer, x, h, c):
        """One cell over (R, T, P) in reading order; returns outputs and the state after the last position."""
        cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
        outputs = []
        for t in range(x.shape[1]):
            z = torch.cat([x[:, t], h], dim=1) @ self.w[f"{cell}/W_0"] + self.w[f"{cell}/B"]
            i, j, f, o = z.split(self.lstm["dim"], dim=1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(j)
            c = self.clip(c, self.lstm["cell_clip"], "cell")
            h = torch.sigmoid(o) * torch.tanh(c)
            if f"{cell}/W_P_0" in self.w:
                h = self.clip(h @ self.w[f"{cell}/W_P_0"], self.lstm["proj_clip"], "proj")
            outputs.append(h)
        y = torch.stack(outputs, dim=1)
        if layer > 0 and self.lstm["use_skip_connections"]:
            y = y + x
        return y, h, c

    def read(self, direction, tokens, state, masks=None):
        """(R, T, P), state [layer] of (h, c), masks (L + 1, R, T, P) -> outputs of each layer and new state."""

        def drop(place, x):
            return x if masks is None else x * masks[place] / self.keep

        x, outputs, new_state = drop(0, tokens), [], []
        for layer in range(self.lstm["n_layers"]):
            y, h, c = self.layer(direction, layer, x, *state[layer])
            x = drop(layer + 1, y)
            outputs.append(x)
            new_state.append((h, c))
        return outputs, new_state

    def zero_state(self, rows):
        sizes = (self.lstm["projection_dim"], self.lstm["dim"])
        cell = lambda: tuple(torch.zeros((rows, n), dtype=self.dtype) for n in sizes)
        return [[cell() for _ in range(self.lstm["n_layers"])] for _ in (0, 1)]

    def log_probabilities(self, x):
        """(..., P) -> (..., V)."""
        return torch.log_softmax(x @ self.w["softmax/W"].T + self.w["softmax/b"], dim=-1)

    def full_loss(self, x, targets):
        """Mean of -log p(target): (R, T, P), (R, T)."""
        return -self.log_probabilities(x).gather(-1, targets[..., None]).mean()

    def sampled_loss(self, x, targets, negatives, counts_of_negatives, counts_of_targets):
        w, b = self.w["softmax/W"], self.w["softmax/b"]
        true = (x * w[targets]).sum(-1) + b[targets] - counts_of_targets.log()  # (R, T)
        other = x @ w[negatives].T + b[negatives] - counts_of_negatives.log()  # (R, T, N)
        other = other.masked_fill(targets[..., None] == negatives, -math.inf)  # accidental hits
        every = torch.cat([true[..., None], other], dim=-1)
        return (torch.logsumexp(every, dim=-1) - true).mean()

    def losses(self, inputs, targets, state, given, rows=slice(None)):
        """Losses of both directions for some rows of a window, and their new state."""
        tokens = self.token_vectors(self.characters)
        losses, new_state = [], []
        for r in (0, 1):
            masks = given["dropout"][r][:, rows].to(self.dtype) if "dropout" in given else None
            outputs, after = self.read(r, tokens[inputs[r, rows]], state[r], masks)
            if "negatives" in given:
                counts = given["expected_counts/targets"][r, rows], given["expected_counts/negatives"][r]
                counts_of_targets, counts_of_negatives = (count.to(self.dtype) for count in counts)
                negatives = given["negatives"][r]
                loss = self.sampled_loss(
                    outputs[-1], targets[r, rows], negatives, counts_of_negatives, counts_of_targets
                )
            else:
                loss = self.full_loss(outputs[-1], targets[r, rows])
            losses.append(loss)
            new_state.append([(h.detach(), c.detach()) for h, c in after])
        return losses, new_state


# --------------------------------------------------------------------------- optimisers


def learning_rate(schedule, top, t):
    """Step t counts from 1."""
    if schedule["name"] == "constant":
        return top
    warm = schedule["warmup_steps"]
    if t <= warm:
        return top * t / warm
    if schedule["name"] == "inverse_sqrt":
        return top * math.sqrt(warm / t)
    share = min(1.0, (t - warm) / (schedule["total_steps"] - warm))
    low = schedule["final_ratio"]
    return top * (low + (1 - low) * (1 + math.cos(math.pi * share)) / 2)


class Optimizer:
    def __init__(self, settings, w):
        self.settings, self.t = settings, 0
        start = settings.get("initial_accumulator", 0.0)
        self.first = {name: torch.zeros_like(value) for name, value in w.items()}
        self.second = {name: torch.full_like(value, start) for name, value in w.items()}

    @torch.no_grad()
    def step(self, w, gradients, rate):
        self.t += 1
        for name, g in gradients.items():
            if self.settings["name"] == "adagrad":
                self.second[name] += g**2
                w[name] -= rate * g / self.second[name].sqrt()
            else:
                self.adamw(name, w[name], g, rate)

    def adamw(self, name, w, g, rate):
        b1, b2 = self.settings["beta1"], self.settings["beta2"]
        if name in self.settings["decayed"]:
            w *= 1 - rate * self.settings["weight_decay"]
        self.first[name] = b1 * self.first[name] + (1 - b1) * g
        self.second[name] = b2 * self.second[name] + (1 - b2) * g**2
        m, v = self.first[name] / (1 - b1**self.t), self.second[name] / (1 - b2**self.t)
        w -= rate * m / (v.sqrt() + self.settings["epsilon"])


# --------------------------------------------------------------------------- the step


def gradients_of(model, case, inputs, targets, state, given):
    """Losses (forward, backward), gradients by name and new state; several replicas share the rows evenly.

    `given` has one entry per replica. Losses and gradients are the means over the replicas.
    """
    replicas = case.get("replicas", 1)
    size = ROWS // replicas
    sums, gradients, states = [0.0, 0.0], None, []
    for k in range(replicas):
        rows = slice(k * size, (k + 1) * size)
        own = [[(h[rows], c[rows]) for h, c in side] for side in state]
        losses, after = model.losses(inputs, targets, own, given[k], rows)
        total = (losses[0] + losses[1]) / 2
        found = torch.autograd.grad(total * case["gradient_scale"], list(model.w.values()))
        gradients = found if gradients is None else [a + b for a, b in zip(gradients, found)]
        sums = [a + b.detach() for a, b in zip(sums, losses)]
        states.append(after)
    merged = [
        [tuple(torch.cat(parts) for parts in zip(*(s[r][i] for s in states))) for i in range(model.lstm["n_layers"])]
        for r in (0, 1)
    ]
    named = {name: g / replicas for name, g in zip(model.w, gradients)}
    return [s / replicas for s in sums], named, merged


def train(case, given, dtype=torch.float64):
    """Runs all steps of a case; what expected.safetensors holds, without the name of the case."""
    options = case["options"]
    model = Model(options, initial_weights(options, case["seed"], case["scale"]), dtype)
    optimizer = Optimizer(case["optimizer"], model.w)
    all_inputs, all_targets = (torch.from_numpy(x) for x in training_windows())
    state = model.zero_state(ROWS)
    kept = {key: [] for key in ("loss", "norm", "clip", "learning_rate", "tensor_norms")}
    expected = {}
    for step in range(STEPS):
        now = [{key: torch.from_numpy(value[step]) for key, value in part.items()} for part in given]
        losses, gradients, state = gradients_of(model, case, all_inputs[step], all_targets[step], state, now)
        norms = torch.stack([g.norm() for g in gradients.values()])
        norm = norms.norm()
        limit = options["all_clip_norm_val"]
        clip = limit * min(1 / norm.item(), 1 / limit)
        rate = learning_rate(case["schedule"], options["learning_rate"], step + 1)
        optimizer.step(model.w, {name: g * clip for name, g in gradients.items()}, rate)
        forward, backward = (loss.item() for loss in losses)
        kept["loss"].append([forward, backward, (forward + backward) / 2])
        kept["norm"].append(norm.item())
        kept["clip"].append(clip)
        kept["learning_rate"].append(rate)
        if step < NORMS_OF:
            kept["tensor_norms"].append(norms.tolist())
        if step + 1 in case["kept_weights"]:
            expected |= {f"weights/{step + 1}/{n}": w.detach().double().numpy().copy() for n, w in model.w.items()}
    for k, what in enumerate("hc"):
        layers = [torch.stack([cell[k] for cell in side]) for side in state]
        expected[f"state/{what}"] = torch.stack(layers).double().numpy()
    return expected | {key: np.array(values) for key, values in kept.items()}, model.clipped


# --------------------------------------------------------------------------- what a case is given


def probability(k, v):
    return math.log((k + 2) / (k + 1)) / math.log(v + 1)


def expected_count(k, v, samples, tries):
    p = probability(k, v)
    return p * samples if tries == samples else -math.expm1(tries * math.log1p(-p))


def draw(rng, v, samples):
    """Distinct ids, log-uniform by rank, and the number of draws."""
    found, tries = [], 0
    while len(found) < samples:
        k = int(math.exp(rng.random() * math.log(v + 1))) - 1
        tries += 1
        if k < v and k not in found:
            found.append(k)
    return found, tries


def given_values(case):
    """Masks and negatives of every step, one dict per replica."""
    options = case["options"]
    rng = np.random.default_rng(case["seed"])
    _, targets = training_windows()
    given = [{} for _ in range(case.get("replicas", 1))]
    if options["dropout"] > 0:
        shape = (STEPS, 2, options["lstm"]["n_layers"] + 1, ROWS, POSITIONS, options["lstm"]["projection_dim"])
        given[0]["dropout"] = (rng.random(shape) >= options["dropout"]).astype(np.uint8)
    if options["sample_softmax"]:
        for part in given:
            part |= negatives(rng, options["n_tokens_vocab"], options["n_negative_samples_batch"], targets)
    return given


def negatives(rng, v, n, targets):
    found, tries = np.zeros((STEPS, 2, n), np.int64), np.zeros((STEPS, 2), np.int64)
    of_negatives, of_targets = np.zeros((STEPS, 2, n)), np.zeros(targets.shape)
    for step in range(STEPS):
        for r in (0, 1):
            ids, tries[step, r] = draw(rng, v, n)
            found[step, r] = ids
            count = lambda k: expected_count(int(k), v, n, int(tries[step, r]))
            of_negatives[step, r] = [count(k) for k in ids]
            of_targets[step, r] = [[count(k) for k in row] for row in targets[step, r]]
    counts = {"expected_counts/negatives": of_negatives, "expected_counts/targets": of_targets}
    return {"negatives": found, "num_tries": tries} | counts


def accidental_hits(given):
    _, targets = training_windows()
    every = [targets[..., None] == part["negatives"][:, :, None, None, :] for part in given if "negatives" in part]
    return int(sum(hits.sum() for hits in every))


# --------------------------------------------------------------------------- cases

LSTM_KEYS = ("cell_clip", "dim", "n_layers", "proj_clip", "projection_dim", "use_skip_connections")
CNN_KEYS = ("activation", "embedding", "filters", "max_characters_per_token", "n_highway")
ADAGRAD = dict(name="adagrad", initial_accumulator=1.0)
ADAMW = dict(name="adamw", beta1=0.9, beta2=0.98, epsilon=1e-6, weight_decay=0.1)


def options_of(**changes):
    lstm = dict(cell_clip=3, dim=12, n_layers=2, proj_clip=3, projection_dim=8, use_skip_connections=True)
    cnn = dict(activation="relu", embedding=dict(dim=3), filters=[[1, 4], [2, 4], [3, 5]])
    cnn |= dict(max_characters_per_token=50, n_characters=261, n_highway=2)
    options = dict(bidirectional=True, char_cnn=cnn, lstm=lstm, dropout=0.0, all_clip_norm_val=10.0)
    options |= dict(batch_size=ROWS, unroll_steps=POSITIONS, n_tokens_vocab=len(VOCABULARY), learning_rate=0.2)
    options |= dict(sample_softmax=False, n_negative_samples_batch=12)
    for key, value in changes.items():
        (lstm if key in LSTM_KEYS else cnn if key in CNN_KEYS else options)[key] = value
    return options


def case(name, seed, scale=0.6, optimizer=ADAGRAD, schedule=None, kept=(), replicas=1, gradient_scale=5, **changes):
    options = options_of(**changes)
    shapes = {name: w.ndim for name, w in initial_weights(options, seed, scale).items()}
    made = dict(name=name, options=options, seed=seed, scale=scale, gradient_scale=gradient_scale)
    if optimizer["name"] == "adamw":
        optimizer = optimizer | dict(decayed=[name for name, axes in shapes.items() if axes >= 2])
    made |= dict(optimizer=optimizer, schedule=schedule or dict(name="constant"), tensors=list(shapes))
    made |= dict(kept_weights=[*kept, STEPS])
    return made | (dict(replicas=replicas) if replicas > 1 else {})


TIGHT = dict(cell_clip=0.5, proj_clip=0.25)
CASES = [
    case("base", 1),
    case("norm_never_clipped", 2, all_clip_norm_val=1000.0, gradient_scale=1),
    case("norm_always_clipped", 3, all_clip_norm_val=0.5),
    case("tight_clips", 4, **TIGHT),
    case("no_clips", 5, cell_clip=None, proj_clip=None),
    case("tanh", 6, activation="tanh"),
    case("no_skip", 7, use_skip_connections=False),
    case("one_layer", 8, n_layers=1),
    case("three_layers_one_highway", 9, n_layers=3, n_highway=1),
    case("no_lstm_projection", 10, dim=8, proj_clip=0.01),
    case("no_token_projection_no_highway", 11, filters=[[1, 3], [2, 3], [3, 2]], n_highway=0),
    case("dropout", 12, dropout=0.1),
    case("sampled", 13, sample_softmax=True),
    case("sampled_two_replicas", 14, sample_softmax=True, replicas=2),
    case("everything", 15, kept=(1,), sample_softmax=True, dropout=0.2, all_clip_norm_val=1.0, **TIGHT),
    case(
        "adamw_cosine", 16, optimizer=ADAMW, learning_rate=0.01, gradient_scale=1, all_clip_norm_val=0.5, kept=(1,),
        schedule=dict(name="cosine", warmup_steps=5, total_steps=40, final_ratio=0.1),
    ),
    case(
        "adamw_inverse_sqrt_dropout", 17, optimizer=ADAMW | dict(epsilon=1e-3, weight_decay=0.0), learning_rate=0.01,
        gradient_scale=1, dropout=0.1, schedule=dict(name="inverse_sqrt", warmup_steps=8),
    ),
]  # fmt: skip


def rounded(x):
    return float(f"{x:.1e}")


def notes(c, given, expected, clipped, rough):
    largest = lambda keys: rounded(max(np.abs(expected[key] - rough[key]).max() for key in keys))
    error = dict(
        loss=largest(["loss"]),
        relative_norm=rounded(np.abs(1 - rough["norm"] / expected["norm"]).max()),
        weights=largest([key for key in expected if key.startswith(f"weights/{STEPS}/")]),
    )
    share = {what: round(clipped[what] / max(clipped[f"all {what}"], 1), 4) for what in ("cell", "proj")}
    return dict(
        float32_error=error,
        clipped_share=share,
        norm_clipped_steps=int((expected["clip"] < 1).sum()),
        accidental_hits=accidental_hits(given),
        first_loss=round(float(expected["loss"][0, 2]), 3),
        last_loss=round(float(expected["loss"][-1, 2]), 3),
    )


def named(name, parts):
    """`parts` (one dict per replica) under the name of the case."""
    if len(parts) == 1:
        return {f"{name}/{key}": value for key, value in parts[0].items()}
    return {f"{name}/replica{k}/{key}": value for k, part in enumerate(parts) for key, value in part.items()}


# --------------------------------------------------------------------------- small fixtures


def packing():
    """Short sentences whose windows can be made by hand."""
    letters = [list(text) for text in "abc||defghijklm|n|op|qrstu|v|wxy|zABCDEF||G|HIJ|KLMNOPQRSTUVW|X|Y".split("|")]
    rows, positions = 3, 4
    sides = [list(pack(letters, r, rows, positions)) for r in (0, 1)]
    windows = []
    for forward, backward in zip(*sides):
        sheet = lambda window, k: [[pair[k] for pair in row] for row in window]
        entry = lambda window: dict(inputs=sheet(window, 0), targets=sheet(window, 1))
        windows.append(dict(forward=entry(forward), backward=entry(backward)))
    dropped = sum(len(s) + 1 for s in letters) - len(windows) * rows * positions
    rest = dict(rows=rows, positions=positions, sentences=letters, dropped=dropped)
    return json_lines("windows", windows, rest)


def sampler():
    rng = np.random.default_rng(99)
    entries = []
    for v in (2, 32, 793_471):
        ids = range(v) if v < 100 else [0, 1, 2, 3, 10, 100, 1000, 10_000, 100_000, v - 1]
        values = [probability(k, v) for k in ids]
        entries.append(dict(vocabulary_size=v, ids=list(ids), probabilities=values))
    for v, n in ((32, 12), (32, 31), (793_471, 64)):
        ids, tries = draw(rng, v, n)
        entries += [counts_entry(v, n, tries, ids), counts_entry(v, n, n, ids)]
    entries.append(counts_entry(793_471, 8192, 15_000, [0, 1, 2, 50, 8191, 100_000, 793_470]))
    return json_lines("sampler", entries)


def counts_entry(v, n, tries, ids):
    counts = [expected_count(k, v, n, tries) for k in ids]
    return dict(vocabulary_size=v, samples=n, num_tries=tries, ids=list(ids), expected_counts=counts)


def schedules():
    kinds = [
        (dict(name="constant"), 0.2),
        (dict(name="cosine", warmup_steps=4, total_steps=20, final_ratio=0.1), 0.01),
        (dict(name="cosine", warmup_steps=0, total_steps=10, final_ratio=0.0), 0.5),
        (dict(name="inverse_sqrt", warmup_steps=6), 0.03),
    ]
    rates = lambda schedule, top: [learning_rate(schedule, top, t) for t in range(1, 26)]
    entries = [dict(schedule=s, learning_rate=top, rates=rates(s, top)) for s, top in kinds]
    return json_lines("schedules", entries)


def carried_losses(model, sentences, rows):
    """[batch] of losses per direction; windows of one position, full softmax."""
    state, losses = model.zero_state(rows), []
    tokens = model.token_vectors(model.characters)
    for windows in zip(pack(sentences, 0, rows, 1), pack(sentences, 1, rows, 1)):
        pair = []
        for r, window in enumerate(windows):
            inputs, targets = (torch.from_numpy(x[0]) for x in encoded([window]))
            outputs, state[r] = model.read(r, tokens[inputs], state[r])
            pair.append(model.full_loss(outputs[-1], targets).item())
        losses.append(pair)
    return losses


def sentence_scores(model, sentence, state):
    """Natural logarithms per prediction in reading order, per direction; `state` has one row."""
    scores = []
    for r in (0, 1):
        read = pairs(sentence, r)
        words = model.token_vectors(character_rows([word for word, _ in read], model.cnn["max_characters_per_token"]))
        outputs, _ = model.read(r, words[None], state[r])
        logarithms = model.log_probabilities(outputs[-1][0])
        scores.append([logarithms[t, word_id(target)].item() for t, (_, target) in enumerate(read)])
    return dict(forward=scores[0], backward=scores[1])


@torch.no_grad()
def evaluation():
    made = dict(options=options_of(), seed=21, scale=1.0)
    model = Model(made["options"], initial_weights(made["options"], made["seed"], made["scale"]))
    losses = carried_losses(model, SENTENCES, 3)
    forward, backward = np.array(losses).mean(axis=0)
    carried = dict(sentences=SENTENCES, rows=3, losses=losses, perplexity=math.exp((forward + backward) / 2))
    carried |= dict(forward=math.exp(forward), backward=math.exp(backward))
    h, c = seeded_state(made["options"], made["seed"])
    row = lambda x: torch.tensor(x, dtype=torch.float64)[None]
    given = [[(row(h[r][i]), row(c[r][i])) for i in range(2)] for r in (0, 1)]
    sentences = []
    for start, state in (("zero", model.zero_state(1)), ("given", given)):
        for sentence in [*SENTENCES[:3], *SENTENCES[11:17:2], SENTENCES[17], []]:
            sentences.append(dict(words=sentence, start=start) | sentence_scores(model, sentence, state))
    return json_lines("sentences", sentences, dict(model=made, carried=carried))


# --------------------------------------------------------------------------- files


def build():
    inputs, targets = training_windows()
    given_tensors, expected_tensors, described = {}, {}, []
    for c in CASES:
        given = given_values(c)
        expected, clipped = train(c, given)
        rough, _ = train(c, given, torch.float32)
        note = notes(c, given, expected, clipped, rough)
        # A tolerance means something only where rounding to float32 stays well below it.
        assert max(note["float32_error"].values()) <= FLOAT32_TOLERANCE / 4, (c["name"], note)
        described.append(c | dict(notes=note))
        given_tensors |= named(c["name"], given)
        expected_tensors |= named(c["name"], [expected])
        print(f"{c['name']:32} {json.dumps(note)}", flush=True)
    text = dict(vocabulary=VOCABULARY, words=WORDS, forward=FORWARD_TEXT, backward=BACKWARD_TEXT)
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in text.items())
    return {
        "text.json": ("{\n" + lines + "\n}\n").encode(),
        "windows.safetensors": dict(inputs=inputs, targets=targets),
        "cases.json": json_lines("cases", described),
        "given.safetensors": given_tensors,
        "expected.safetensors": expected_tensors,
        "packing.json": packing(),
        "sampler.json": sampler(),
        "schedules.json": schedules(),
        "evaluation.json": evaluation(),
    }


def write(path, data):
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        save_file({name: np.ascontiguousarray(value) for name, value in data.items()}, path)
    print(f"{path.name}: {path.stat().st_size} bytes")


def leaves(value):
    """The numbers of a JSON value; notes are rounded, and not compared."""
    if isinstance(value, dict):
        return [x for key, v in value.items() if key != "notes" for x in leaves(v)]
    if isinstance(value, list):
        return [x for v in value for x in leaves(v)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def compare(path, data):
    if isinstance(data, bytes):
        before, now = (np.array(leaves(json.loads(text)), float) for text in (path.read_bytes(), data))
        assert before.shape == now.shape, f"{path.name}: other numbers of values"
        difference = np.abs(before - now).max(initial=0)
    else:
        before = load_file(path)
        assert before.keys() == data.keys(), f"{path.name}: other tensors"
        difference = max(np.abs(before[name] - value.astype(before[name].dtype)).max() for name, value in data.items())
    print(f"{path.name}: largest difference {difference:.1e}")
    if difference > 1e-11:
        raise SystemExit(f"{path.name} differs from what this program computes")


# --------------------------------------------------------------------------- self-check


def check_activations(c):
    """Every layer of some sentences against golden.py, which pads and reverses whole sentences."""
    weights = initial_weights(c["options"], c["seed"], c["scale"])
    model, other = Model(c["options"], weights), BiLm(c["options"], weights)
    sentences, worst = [SENTENCES[12], SENTENCES[17], []], 0.0
    for sentence, layers in zip(sentences, other.run([sentences], "zero", None, True)[0]):
        words = ["<S>", *sentence, "</S>"]
        for r in (0, 1):
            tokens = model.token_vectors(character_rows(words, 50))
            outputs, _ = model.read(r, (tokens.flip(0) if r else tokens)[None], model.zero_state(1)[r])
            p = c["options"]["lstm"]["projection_dim"]
            for k, y in enumerate(outputs):
                y = (y[0].flip(0) if r else y[0]).detach().numpy()
                worst = max(worst, np.abs(y - layers[k + 1][:, r * p : (r + 1) * p]).max())
    return worst


def check_gradients(c, step=2):
    """Gradients of one step, from a carried state, against central differences in three directions per tensor."""
    given = given_values(c)
    model = Model(c["options"], initial_weights(c["options"], c["seed"], c["scale"]))
    inputs, targets = (torch.from_numpy(x) for x in training_windows())
    now = lambda k: [{key: torch.from_numpy(value[k]) for key, value in part.items()} for part in given]
    state = model.zero_state(ROWS)
    for k in range(step):
        _, _, state = gradients_of(model, c, inputs[k], targets[k], state, now(k))
    _, gradients, _ = gradients_of(model, c, inputs[step], targets[step], state, now(step))

    def loss():
        (forward, backward), _, _ = gradients_of(model, c, inputs[step], targets[step], state, now(step))
        return (forward + backward).item() / 2 * c["gradient_scale"]

    rng, worst = torch.Generator().manual_seed(5), 0.0
    for name, w in model.w.items():
        g = gradients[name]
        assert g.abs().max() > 1e-9, f"{c['name']}: no gradient of {name}"
        peak = torch.zeros_like(w)
        peak.view(-1)[g.abs().argmax()] = 1.0
        for direction in (peak, *(torch.randn(w.shape, generator=rng, dtype=w.dtype) for _ in range(2))):
            slope = (g * direction).sum().item()
            # A kink (clip, ReLU, largest position) may lie within the wider step.
            found = [central_difference(loss, w, width * direction) / width for width in (1e-6, 1e-7)]
            gap = min(abs(difference - slope) for difference in found) / (1 + abs(slope))
            assert gap < 1e-7, f"{c['name']}: {name}: differences {found}, gradient {slope}"
            worst = max(worst, gap)
    return worst


def central_difference(loss, w, by):
    values = []
    for step in (by, -2 * by, by):
        with torch.no_grad():
            w += step
        values.append(loss())
    return (values[0] - values[1]) / 2


def self_check():
    for c in CASES:
        assert sum(len(s) + 1 for s in FORWARD_TEXT) >= STEPS * ROWS * POSITIONS
        print(f"{c['name']:32} activations {check_activations(c):.1e}  gradients {check_gradients(c):.1e}", flush=True)
    torch_optimizer()


def torch_optimizer():
    """The optimisers written out above against PyTorch's own."""
    rng = torch.Generator().manual_seed(3)
    for settings, make in (
        (ADAGRAD, lambda w: torch.optim.Adagrad([w], lr=0.1, initial_accumulator_value=1.0, eps=0)),
        (ADAMW | dict(decayed=["w"]), lambda w: torch.optim.AdamW([w], 0.1, (0.9, 0.98), 1e-6, 0.1)),
    ):
        start = torch.randn(7, generator=rng, dtype=torch.float64)
        mine, its = {"w": start.clone()}, start.clone().requires_grad_()
        optimizer, other = Optimizer(settings, mine), make(its)
        for _ in range(20):
            g = torch.randn(7, generator=rng, dtype=torch.float64)
            optimizer.step(mine, {"w": g}, 0.1)
            its.grad = g.clone()
            other.step()
        gap = (mine["w"] - its.detach()).abs().max().item()
        assert gap < 1e-14, (settings, gap)
        print(f"{settings['name']:32} against torch.optim {gap:.1e}")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    arguments.add_argument("--self-check", action="store_true", help="check gradients, activations and optimisers")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    print("python", platform.python_version(), "numpy", np.__version__, "torch", torch.__version__)
    if arguments.self_check:
        return self_check()
    OUT.mkdir(parents=True, exist_ok=True)
    for name, data in build().items():
        (compare if arguments.check else write)(OUT / name, data)


if __name__ == "__main__":
    main()

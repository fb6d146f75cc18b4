#!/usr/bin/env python3
"""Speed of one training step of the biLM in PyTorch: the peer of `elmo train` on the same machine.

The recipe of bilm-tf in float32 with the modules of torch.nn, eager mode, as a PyTorch user would write it: the char
CNN runs once per distinct word of a step, the input half of each LSTM product is outside of the time loop, and only
the softmax rows of a step get a gradient and an update. `--lstm torch` uses nn.LSTM instead, which knows no clips and
so computes another model; `--every-word` runs the CNN for every position, as bilm-tf does.

    pip install torch==2.11.0 numpy==2.4.6 safetensors==0.8.0
    python3 benches/peers/train_step.py --size small --text sentences.txt  # one sentence per line, tokens by spaces
    python3 benches/peers/train_step.py --size small --text sentences.txt --vocabulary 10000 --negatives 0
    python3 benches/peers/train_step.py --check tests/fixtures/train       # the step is right: losses of 50 steps

A token is a position of a window: it counts once and has a forward and a backward prediction. Reading the text,
encoding it and drawing the negatives happen before the clock starts.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

FILTERS = [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]
SIZES = dict(small=(1024, 128, 1), medium=(2048, 256, 1), original=(4096, 512, 2))


def published(size):
    dim, projection, highways = SIZES[size]
    lstm = dict(dim=dim, projection_dim=projection, n_layers=2, cell_clip=3, proj_clip=3, use_skip_connections=True)
    cnn = dict(activation="relu", n_highway=highways, filters=FILTERS, embedding=dict(dim=16))
    return dict(lstm=lstm, char_cnn=cnn, dropout=0.1, all_clip_norm_val=10.0, learning_rate=0.2)


# --------------------------------------------------------------------------- model


class CharCnn(nn.Module):
    """Character ids (N, M) -> token vectors (N, P).

    The convolutions take some words at a time, so that their outputs, 370 kB a word at the published sizes, stay in the
    cache: 64 words at a time take less than half of the time of 1,500.
    """

    def __init__(self, options, words_at_once=64):
        super().__init__()
        self.words_at_once = words_at_once
        cnn, p = options["char_cnn"], options["lstm"]["projection_dim"]
        width, n = cnn["embedding"]["dim"], sum(n for _, n in cnn["filters"])
        self.activation = F.relu if cnn["activation"] == "relu" else torch.tanh
        self.embedding = nn.Embedding(261, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, n, k) for k, n in cnn["filters"])
        self.carry = nn.ModuleList(nn.Linear(n, n) for _ in range(cnn["n_highway"]))
        self.transform = nn.ModuleList(nn.Linear(n, n) for _ in range(cnn["n_highway"]))
        self.projection = nn.Linear(n, p) if n != p else nn.Identity()

    def features(self, ids):
        e = self.embedding(ids).transpose(1, 2)  # (N, C, M)
        # max(dim) has one position's gradient to write, amax(dim) divides it among equal ones and takes twice the time.
        return torch.cat([self.activation(conv(e).max(dim=2).values) for conv in self.convolutions], dim=1)

    def forward(self, ids):
        x = torch.cat([self.features(part) for part in ids.split(self.words_at_once)])
        for carry, transform in zip(self.carry, self.transform):
            x = torch.lerp(x, F.relu(transform(x)), torch.sigmoid(carry(x)))
        return self.projection(x)


class ClippedLstm(nn.Module):
    """One layer with projection and clips: (T, R, P) -> (T, R, P). The forget gate's +1 is not part of its bias."""

    def __init__(self, lstm):
        super().__init__()
        p, d = lstm["projection_dim"], lstm["dim"]
        self.cell_clip, self.proj_clip = lstm["cell_clip"], lstm["proj_clip"]
        self.input = nn.Linear(p, 4 * d)
        self.recurrent = nn.Linear(p, 4 * d, bias=False)
        self.projection = nn.Linear(d, p, bias=False)

    def forward(self, x, state):
        h, c = state
        outputs = []
        for z in self.input(x).unbind(0):
            i, j, f, o = (z + self.recurrent(h)).chunk(4, dim=1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(j)
            c = c.clamp(-self.cell_clip, self.cell_clip)
            h = self.projection(torch.sigmoid(o) * torch.tanh(c)).clamp(-self.proj_clip, self.proj_clip)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


class TorchLstm(nn.Module):
    """nn.LSTM with a projection: no clips."""

    def __init__(self, lstm):
        super().__init__()
        self.lstm = nn.LSTM(lstm["projection_dim"], lstm["dim"], proj_size=lstm["projection_dim"])

    def forward(self, x, state):
        y, (h, c) = self.lstm(x, tuple(part[None] for part in state))
        return y, (h[0], c[0])


class BiLm(nn.Module):
    def __init__(self, options, lstm=ClippedLstm, every_word=False):
        super().__init__()
        self.dropout, self.skip = options["dropout"], options["lstm"]["use_skip_connections"]
        self.every_word = every_word
        self.cnn = CharCnn(options)
        layers = range(options["lstm"]["n_layers"])
        self.directions = nn.ModuleList(nn.ModuleList(lstm(options["lstm"]) for _ in layers) for _ in (0, 1))

    def tokens(self, characters, words):
        """`words` (2, R, T) are indices into `characters` (all words, M) -> (2, R, T, P)."""
        if self.every_word:
            return self.cnn(characters[words.flatten()]).view(*words.shape, -1)
        distinct, places = torch.unique(words, return_inverse=True)
        return self.cnn(characters[distinct])[places]

    def forward(self, characters, words, states):
        """Outputs (2, R, T, P) for the softmax, and the new states."""
        outputs, after = [], []
        for x, layers, state in zip(self.tokens(characters, words), self.directions, states):
            x, new = F.dropout(x.transpose(0, 1), self.dropout), []
            for k, layer in enumerate(layers):
                y, end = layer(x, state[k])
                x = F.dropout(y + x if k > 0 and self.skip else y, self.dropout)
                new.append(tuple(part.detach() for part in end))
            outputs.append(x.transpose(0, 1))
            after.append(new)
        return torch.stack(outputs), after


# --------------------------------------------------------------------------- softmax


class Softmax:
    """Table of the vocabulary; a step sees the rows that it needs as a leaf, and Adagrad touches only these."""

    def __init__(self, w, b):
        self.table = torch.cat([w, b[:, None]], dim=1)  # the bias is the last column
        self.squares = torch.ones_like(self.table)

    def rows(self, ids):
        """Distinct rows as a leaf; `ids` is sorted, or None for all rows."""
        self.ids = ids
        self.leaf = (self.table if ids is None else self.table[ids]).clone().requires_grad_()
        return self.leaf

    def step(self, gradient, rate):
        if self.ids is None:
            self.squares.addcmul_(gradient, gradient)
            self.table.addcdiv_(gradient, self.squares.sqrt(), value=-rate)
            return
        squares = self.squares[self.ids].addcmul_(gradient, gradient)
        self.squares[self.ids] = squares
        self.table[self.ids] = self.table[self.ids].addcdiv_(gradient, squares.sqrt(), value=-rate)


def full_loss(rows, x, targets):
    return F.cross_entropy(F.linear(x, rows[:, :-1], rows[:, -1]), targets)


def sampled_loss(rows, ids, x, targets, negatives, counts):
    """`counts`: expected counts of the targets and of the negatives."""
    of_targets, of_negatives = (count.log() for count in counts)
    true, other = rows[torch.searchsorted(ids, targets)], rows[torch.searchsorted(ids, negatives)]
    true = (x * true[:, :-1]).sum(1) + true[:, -1] - of_targets
    other = F.linear(x, other[:, :-1], other[:, -1] - of_negatives)
    other = other.masked_fill(targets[:, None] == negatives, -torch.inf)
    return F.cross_entropy(torch.cat([true[:, None], other], dim=1), torch.zeros_like(targets))


# --------------------------------------------------------------------------- step


class Trainer:
    def __init__(self, options, model, softmax, characters, rows, gradient_scale):
        self.options, self.model, self.softmax, self.characters = options, model, softmax, characters
        self.scale = gradient_scale
        self.optimizer = torch.optim.Adagrad(
            model.parameters(), lr=options["learning_rate"], initial_accumulator_value=1.0, eps=0
        )
        zeros = [torch.zeros(rows, options["lstm"][key]) for key in ("projection_dim", "dim")]
        self.states = [[tuple(zeros) for _ in range(options["lstm"]["n_layers"])] for _ in (0, 1)]

    def step(self, words, targets, sample=None):
        """`sample`, per direction: negatives and expected counts. Returns the losses of both directions."""
        self.optimizer.zero_grad()
        outputs, self.states = self.model(self.characters, words, self.states)
        x, targets = outputs.flatten(1, 2), targets.flatten(1)
        if sample is None:
            rows = self.softmax.rows(None)
            losses = [full_loss(rows, x[r], targets[r]) for r in (0, 1)]
        else:
            ids = torch.unique(torch.cat([targets.flatten(), sample[0][0], sample[1][0]]))
            rows = self.softmax.rows(ids)
            losses = [sampled_loss(rows, ids, x[r], targets[r], *sample[r]) for r in (0, 1)]
        (sum(losses) / 2 * self.scale).backward()
        self.update([parameter.grad for parameter in self.model.parameters()], rows.grad)
        return [loss.item() for loss in losses]

    def update(self, dense, softmax):
        norm = torch.nn.utils.get_total_norm([*dense, softmax])
        clip = (self.options["all_clip_norm_val"] / norm).clamp(max=1.0)
        torch._foreach_mul_([*dense, softmax], clip)
        self.optimizer.step()
        with torch.no_grad():
            self.softmax.step(softmax, self.options["learning_rate"])


# --------------------------------------------------------------------------- data


def character_rows(words, m):
    rows = np.full((len(words), m), 260)
    for row, word in zip(rows, words):
        inner = {"<S>": [256], "</S>": [257]}.get(word) or list(word.encode()[: m - 2])
        row[: len(inner) + 2] = [258, *inner, 259]
    return torch.from_numpy(rows)


def read_text(path, vocabulary_size):
    """Words (the vocabulary first, by falling count), sentences of indices into them."""
    sentences = [line.split() for line in path.read_text().split("\n") if line]
    counts = Counter(word for sentence in sentences for word in sentence)
    specials = ["<S>", "</S>", "<UNK>"]
    words = specials + [word for word, _ in counts.most_common() if word not in specials]
    known = {word: i for i, word in enumerate(words)}
    if len(words) < vocabulary_size:
        print(f"the text has {len(words)} words: the other rows of the softmax serve as negatives only")
    return words, [[known[word] for word in sentence] for sentence in sentences]


def pack(sentences, backward, rows, positions, steps):
    """(steps, R, T) inputs and targets: rows cut from one stream of text, boundaries between sentences."""
    first, last = (1, 0) if backward else (0, 1)
    inputs, targets = [], []
    for sentence in sentences:
        symbols = [first, *(sentence[::-1] if backward else sentence), last]
        inputs += symbols[:-1]
        targets += symbols[1:]
    need = rows * positions * steps
    if len(inputs) < need:
        raise SystemExit(f"the text has {len(inputs)} predictions, {steps} steps need {need}: give more text")
    cut = lambda flat: torch.tensor(flat[:need]).view(rows, steps, positions).transpose(0, 1)
    return cut(inputs), cut(targets)


def draw(rng, v, n, targets):
    """Negatives, and expected counts of the targets and of the negatives."""
    drawn = np.empty(0, np.int64)
    while len(np.unique(drawn)) < n:
        drawn = np.concatenate([drawn, np.exp(rng.random(2 * n) * np.log(v + 1)).astype(np.int64) - 1])
    first = np.sort(np.unique(drawn, return_index=True)[1])[:n]
    tries = first[-1] + 1

    def count(ids):
        p = np.log((ids + 2) / (ids + 1)) / np.log(v + 1)
        return torch.from_numpy((-np.expm1(tries * np.log1p(-p))).astype(np.float32))

    return torch.from_numpy(drawn[first]), (count(targets), count(drawn[first]))


# --------------------------------------------------------------------------- measurement and check


def measure(arguments):
    rows, positions, v, n = arguments.rows, 20, arguments.vocabulary, arguments.negatives
    steps = arguments.steps + arguments.warm_up
    options = published(arguments.size)
    words, sentences = read_text(arguments.text, v)
    half = len(sentences) // 2  # the directions read different sentences
    sides = [pack(part, side, rows, positions, steps) for side, part in enumerate((sentences[:half], sentences[half:]))]
    inputs, symbols = (torch.stack(parts, dim=1) for parts in zip(*sides))
    targets = torch.where(symbols < v, symbols, 2)
    rng = np.random.default_rng(1)
    samples = [[draw(rng, v, n, t.flatten().numpy()) for t in step] if n else None for step in targets]
    torch.manual_seed(1)
    p = options["lstm"]["projection_dim"]
    model = BiLm(options, TorchLstm if arguments.lstm == "torch" else ClippedLstm, arguments.every_word)
    softmax = Softmax(torch.randn(v, p) / p**0.5, torch.zeros(v))
    trainer = Trainer(options, model, softmax, character_rows(words, 50), rows, positions)
    parameters, of_softmax = sum(w.numel() for w in model.parameters()), softmax.table.numel()
    print(f"torch {torch.__version__}, {arguments.size}: {parameters:,} parameters and a softmax of {of_softmax:,}")
    distinct = np.mean([len(torch.unique(step)) / step.numel() for step in inputs])
    print(f"{rows} rows x {positions} positions; {distinct:.1%} of the inputs of a step are distinct words")
    for step in range(steps):
        if step == arguments.warm_up:
            start = time.perf_counter()
        losses = trainer.step(inputs[step], targets[step], samples[step])
    seconds = (time.perf_counter() - start) / arguments.steps
    print(f"loss {losses[0]:.3f} forward, {losses[1]:.3f} backward after {steps} steps")
    print(f"{rows * positions / seconds:,.0f} tokens/s, {seconds:.3f} s per step, {arguments.threads} threads")


def load(model, tensors):
    """Tensors by the names of bilm-tf's HDF5 file into the modules."""
    get = lambda name: torch.from_numpy(tensors[name].astype(np.float32))
    put = lambda module, w, b=None: module.load_state_dict({"weight": w} | ({} if b is None else {"bias": b}))
    put(model.cnn.embedding, get("char_embed"))
    for i, conv in enumerate(model.cnn.convolutions):
        put(conv, get(f"CNN/W_cnn_{i}")[0].permute(2, 1, 0), get(f"CNN/b_cnn_{i}"))
    for gate in ("carry", "transform"):
        for k, linear in enumerate(getattr(model.cnn, gate)):
            put(linear, get(f"CNN_high_{k}/W_{gate}").T, get(f"CNN_high_{k}/b_{gate}"))
    put(model.cnn.projection, get("CNN_proj/W_proj").T, get("CNN_proj/b_proj"))
    for r, layers in enumerate(model.directions):
        for k, layer in enumerate(layers):
            cell = f"RNN_{r}/RNN/MultiRNNCell/Cell{k}/LSTMCell"
            w, p = get(f"{cell}/W_0"), layer.recurrent.in_features
            put(layer.input, w[:p].T, get(f"{cell}/B"))
            put(layer.recurrent, w[p:].T)
            put(layer.projection, get(f"{cell}/W_P_0").T)


def check(fixtures):
    """Losses of 50 steps against the fixtures of the float64 reference."""
    import sys

    from safetensors.numpy import load_file

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "reference"))
    from train_step import initial_weights

    files = {name: load_file(fixtures / f"{name}.safetensors") for name in ("windows", "given", "expected")}
    words = json.loads((fixtures / "text.json").read_bytes())["words"]
    cases = {case["name"]: case for case in json.loads((fixtures / "cases.json").read_bytes())["cases"]}
    for name, every_word in dict(base=False, tight_clips=True, norm_always_clipped=False, sampled=False).items():
        case = cases[name]
        options = case["options"]
        weights = initial_weights(options, case["seed"], case["scale"])
        model = BiLm(options, every_word=every_word)
        load(model, weights)
        softmax = Softmax(*(torch.from_numpy(weights[f"softmax/{part}"]) for part in "Wb"))
        trainer = Trainer(options, model, softmax, character_rows(words, 50), 4, case["gradient_scale"])
        worst = 0.0
        for step, (inputs, targets) in enumerate(zip(files["windows"]["inputs"], files["windows"]["targets"])):
            sample = fixture_sample(files["given"], name, step) if options["sample_softmax"] else None
            found = trainer.step(torch.from_numpy(inputs), torch.from_numpy(targets), sample)
            worst = max(worst, np.abs(files["expected"][f"{name}/loss"][step, :2] - found).max())
        print(f"{name:20} losses of 50 steps within {worst:.1e}")
        assert worst < 5e-6, name


def fixture_sample(given, name, step):
    get = lambda what, r: torch.from_numpy(given[f"{name}/{what}"][step, r].ravel())
    counts = lambda what, r: get(f"expected_counts/{what}", r).float()
    negatives = lambda r: get("negatives", r)
    return [(negatives(r), (counts("targets", r), counts("negatives", r))) for r in (0, 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--text", type=Path, help="one sentence per line, tokens separated by spaces")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=793_471)
    parser.add_argument("--negatives", type=int, default=8192, help="0 for the full softmax")
    parser.add_argument("--lstm", choices=("clipped", "torch"), default="clipped")
    parser.add_argument("--every-word", action="store_true", help="run the char CNN for every position")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", type=Path, metavar="DIR", help="compare with the fixtures of the training step")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.check:
        return check(arguments.check)
    if arguments.text is None:
        parser.error("--text or --check is needed")
    measure(arguments)


if __name__ == "__main__":
    main()

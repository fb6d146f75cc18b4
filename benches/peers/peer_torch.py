#!/usr/bin/env python3
"""ELMo in plain torch, as a Python programmer would make it fast: the same vectors as AllenNLP, without its waste.

* The text is sorted by length and cut into batches of 256; a batch holds no padding.
* The char CNN runs once per distinct word. Its vectors are kept for 50,000 words; the cache starts empty.
* Convolutions leave out the windows that lie wholly in a word's padding, but for one, as all of them are equal. They
  are one matrix product for all filters.
* The input halves of the LSTM products are outside of the time loop.
* `--precision int8` quantises all linear layers dynamically, with one scale per output. Convolutions stay float32.
* LSTM states start from zeros in each sentence.
"""

import json
import warnings

import h5py
import numpy
import torch
from torch import nn
from torch.nn import functional as F

import peer
from train_step import character_rows

CACHED_WORDS = 50_000
WORDS_AT_ONCE = 32  # the output of the convolutions, up to 0.4 MB a word, stays in the CPU's cache
ROWS_AT_ONCE = 256  # of the hoisted products; larger outputs are slower
PADDING = 260


class FloatProduct:
    def __init__(self, weight, bias=None):
        self.weight, self.bias = weight, torch.zeros(weight.shape[1]) if bias is None else bias

    def __call__(self, x):
        return torch.addmm(self.bias, x, self.weight)

    def add_to(self, z, x):
        z.addmm_(x, self.weight)


class Int8Product:
    def __init__(self, weight, bias=None):
        linear = nn.Linear(*weight.shape)
        bias = torch.zeros(weight.shape[1]) if bias is None else bias
        linear.load_state_dict(dict(weight=weight.T, bias=bias))
        scheme = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the successor of torch.ao.quantization
            self.linear = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), scheme)

    def __call__(self, x):
        return self.linear(x)

    def add_to(self, z, x):
        z += self.linear(x)


class CharCnn:
    """Words -> token vectors (N, P)."""

    def __init__(self, options, get, product):
        cnn = options["char_cnn"]
        self.m = cnn["max_characters_per_token"]
        self.activation = dict(relu=torch.relu, tanh=torch.tanh)[cnn["activation"]]
        self.embedding = get("char_embed")
        self.filters = [get(f"CNN/W_cnn_{i}")[0] for i in range(len(cnn["filters"]))]  # (width, C, n)
        self.bias = torch.cat([get(f"CNN/b_cnn_{i}") for i in range(len(cnn["filters"]))])
        self.widest = max(width for width, _ in cnn["filters"])
        # All filters as one matrix; the narrow ones have zeros at the end.
        padded = (F.pad(w, (0, 0, 0, 0, 0, self.widest - len(w))) for w in self.filters)
        self.matrix = torch.cat([w.flatten(0, 1) for w in padded], dim=1)
        self.highways = []
        for i in range(cnn["n_highway"]):
            parts = zip(*(get_pair(get, f"CNN_high_{i}", gate) for gate in ("transform", "carry")))
            weight, bias = (torch.cat(part, dim=-1) for part in parts)
            self.highways.append(product(weight, bias))
        self.projection = product(*get_pair(get, "CNN_proj", "proj"))

    def features(self, rows, used):
        """`rows` (N, M) of similar words, the longest with `used` ids before the padding."""
        needed = used + self.widest  # one window of padding only
        if needed > self.m:
            e = self.embedding[rows].transpose(1, 2)
            return torch.cat([F.conv1d(e, w.permute(2, 1, 0)).amax(2) for w in self.filters], dim=1)
        e = self.embedding[rows[:, :needed]].flatten(1)
        step = self.embedding.shape[1]
        windows = e.unfold(1, self.widest * step, step)
        return (windows.reshape(-1, len(self.matrix)) @ self.matrix).view(*windows.shape[:2], -1).amax(1)

    def __call__(self, words):
        rows = character_rows(words, self.m)
        used, order = (rows != PADDING).sum(1).sort()
        x = torch.empty(len(words), len(self.bias))
        for part, lengths in zip(order.split(WORDS_AT_ONCE), used.split(WORDS_AT_ONCE)):
            x[part] = self.features(rows[part], int(lengths[-1]))
        x = self.activation(x + self.bias)
        for highway in self.highways:
            transform, carry = highway(x).chunk(2, dim=1)
            x = torch.lerp(x, transform.relu_(), carry.sigmoid_())
        return self.projection(x)


class Lstm:
    """One layer of one direction over packed rows: those of the first step, then those of the second, and so on."""

    def __init__(self, options, get, cell, product):
        lstm = options["lstm"]
        self.p, self.d = lstm["projection_dim"], lstm["dim"]
        self.clips = lstm["cell_clip"], lstm["proj_clip"]
        weight, bias = get(f"{cell}/W_0"), get(f"{cell}/B")
        # Gates i, f, o, j, so that one sigmoid does for three. The 1 of the forget gate is not in the file.
        i, j, f, o = (torch.arange(k * self.d, (k + 1) * self.d) for k in range(4))
        bias[f] += 1
        order = torch.cat([i, f, o, j])
        self.input = product(weight[: self.p, order].contiguous(), bias[order])
        self.recurrent = product(weight[self.p :, order].contiguous())
        self.projection = product(get(f"{cell}/W_P_0"))

    def __call__(self, x, active):
        cell_clip, proj_clip = self.clips
        h, c = torch.zeros(active[0], self.p), torch.zeros(active[0], self.d)
        y, start = torch.empty(len(x), self.p), 0
        for steps in chunks(active, ROWS_AT_ONCE):
            rows = sum(steps)
            gates = self.input(x[start : start + rows])
            for z in gates.split(steps):
                n = len(z)
                h, c = h[:n], c[:n]
                self.recurrent.add_to(z, h)
                i, f, o = z[:, : 3 * self.d].sigmoid_().chunk(3, dim=1)
                c = c.mul_(f).addcmul_(i, z[:, 3 * self.d :].tanh_()).clamp_(-cell_clip, cell_clip)
                h = self.projection(torch.tanh(c).mul_(o)).clamp_(-proj_clip, proj_clip)
                y[start : start + n] = h
                start += n
        return y


class Bilm:
    def __init__(self, arguments):
        torch.set_num_threads(arguments.threads)
        torch.set_grad_enabled(False)
        self.versions = dict(torch=torch.__version__, numpy=numpy.__version__)
        options = json.loads((arguments.model / "options.json").read_bytes())
        product = dict(f32=FloatProduct, int8=Int8Product)[arguments.precision]
        with h5py.File(arguments.model / "weights.hdf5") as file:
            get = lambda name: torch.from_numpy(file[name][()])  # noqa: E731
            self.cnn = CharCnn(options, get, product)
            cells = [
                [f"RNN_{r}/RNN/MultiRNNCell/Cell{k}/LSTMCell" for k in range(options["lstm"]["n_layers"])]
                for r in (0, 1)
            ]
            self.directions = [[Lstm(options, get, cell, product) for cell in side] for side in cells]
        self.skip = options["lstm"]["use_skip_connections"]
        self.places, self.cache = {}, torch.empty(CACHED_WORDS, options["lstm"]["projection_dim"])

    def tokens(self, sentences):
        """Rows of the cache for the words of the sentences."""
        words = {word for sentence in sentences for word in sentence}
        new = sorted(words - self.places.keys())
        if len(self.places) + len(new) > CACHED_WORDS:
            self.places, new = {}, sorted(words)
        if new:
            first = len(self.places)
            self.cache[first : first + len(new)] = self.cnn(new)
            self.places |= zip(new, range(first, first + len(new)))
        return [[self.places[word] for word in sentence] for sentence in sentences]

    def embed(self, sentences, batch):
        for i in range(0, len(sentences), batch):
            yield from self.embed_batch(sentences[i : i + batch])

    def embed_batch(self, sentences):
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        rows = self.tokens([["<S>", *sentences[i], "</S>"] for i in order])
        lengths = [len(row) for row in rows]
        active = [sum(n > t for n in lengths) for t in range(lengths[0])]
        starts = numpy.concatenate([[0], numpy.cumsum(active)])
        # Places of the words of each sentence, without its boundaries, in the packed rows of both directions.
        words = [numpy.arange(1, n - 1) for n in lengths]
        places = [
            torch.from_numpy(numpy.concatenate([starts[t] + b for b, t in enumerate(words)])),
            torch.from_numpy(
                numpy.concatenate([starts[n - 1 - t] + b for b, (t, n) in enumerate(zip(words, lengths))])
            ),
        ]
        sides = []
        for layers, reverse, place in zip(self.directions, (False, True), places):
            turned = [row[::-1] for row in rows] if reverse else rows
            x = self.cache[torch.tensor([turned[b][t] for t, n in enumerate(active) for b in range(n)])]
            outputs = [x[place]]
            for k, layer in enumerate(layers):
                y = layer(x, active)
                x = y.add_(x) if k > 0 and self.skip else y
                outputs.append(x[place])
            sides.append(torch.stack(outputs))
        found = torch.cat(sides, dim=2).split([n - 2 for n in lengths], dim=1)
        in_order = [None] * len(sentences)
        for i, vectors in zip(order, found):
            in_order[i] = vectors.numpy()
        return in_order


def get_pair(get, group, name):
    return get(f"{group}/W_{name}"), get(f"{group}/b_{name}")


def chunks(active, rows):
    """Groups of steps with about this many rows together."""
    group = []
    for n in active:
        if group and sum(group) + n > rows:
            yield group
            group = []
        group.append(n)
    yield group


def add_arguments(parser):
    parser.add_argument("--precision", choices=("f32", "int8"), default="f32")


if __name__ == "__main__":
    peer.main(__doc__.splitlines()[0], Bilm, add_arguments)

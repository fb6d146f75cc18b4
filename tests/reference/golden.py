#!/usr/bin/env python3
"""Makes tests/fixtures/golden: a second forward pass of the biLM, vectorised float64 numpy.

It was written from the description of the model, not from the Rust reference beside it: padded batches,
masks, index reversal and matrix products here, loops over words there. What both agree on to 1e-12 is
unlikely to be a slip of either.

    python3 tests/reference/golden.py            # writes tests/fixtures/golden
    python3 tests/reference/golden.py --check    # computes anew and compares with what lies there

Letters: B sentences, T positions with boundaries and padding, M characters per token, C character width,
F filters, P projection_dim, D LSTM dim, L LSTM layers.
"""

import argparse
import json
import platform
import struct
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "golden"

# --------------------------------------------------------------------------- seeded numbers

U64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def mix64(z):
    """splitmix64's output function, on a uint64 array."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fnv1a64(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & U64
    return h


def uniform(name, seed, shape, s):
    """Float32 numbers in [-s, s) that depend on name, seed and index only; the recipe stands in seeded.rs."""
    state = np.uint64(fnv1a64(name.encode())) ^ mix64(np.array([seed], dtype=np.uint64))[0]
    index = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    bits = mix64(state + index * np.uint64(GOLDEN_GAMMA))
    unit = (bits >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    return (unit * s).astype(np.float32).reshape(shape)


def tensor_shapes(options):
    """Names and shapes of bilm-tf's HDF5 file for these options."""
    cnn, lstm = options["char_cnn"], options["lstm"]
    c, p, d = cnn["embedding"]["dim"], lstm["projection_dim"], lstm["dim"]
    f = sum(n for _, n in cnn["filters"])
    shapes = {"char_embed": (261, c)}
    for i, (width, n) in enumerate(cnn["filters"]):
        shapes[f"CNN/W_cnn_{i}"] = (1, width, c, n)
        shapes[f"CNN/b_cnn_{i}"] = (n,)
    for k in range(cnn["n_highway"]):
        for gate in ("carry", "transform"):
            shapes[f"CNN_high_{k}/W_{gate}"] = (f, f)
            shapes[f"CNN_high_{k}/b_{gate}"] = (f,)
    if f != p:
        shapes["CNN_proj/W_proj"] = (f, p)
        shapes["CNN_proj/b_proj"] = (p,)
    for r in (0, 1):
        for i in range(lstm["n_layers"]):
            cell = f"RNN_{r}/RNN/MultiRNNCell/Cell{i}/LSTMCell"
            shapes[f"{cell}/W_0"] = (2 * p, 4 * d)
            shapes[f"{cell}/B"] = (4 * d,)
            if p < d:
                shapes[f"{cell}/W_P_0"] = (d, p)
    return shapes


def bound(name, shape, scale):
    if name == "char_embed":
        return 1.0
    if len(shape) == 1:
        return scale * 0.5
    gain = 2.0 if name.startswith("RNN_") else 1.0
    return scale * gain * np.sqrt(3.0 / np.prod(shape[:-1]))


def seeded_weights(options, seed, scale):
    return {n: uniform(n, seed, s, bound(n, s, scale)) for n, s in tensor_shapes(options).items()}


def seeded_state(options, seed):
    """h: [direction][layer] of (P,), c: the same of (D,)."""
    lstm = options["lstm"]
    make = lambda what, n: [
        [uniform(f"state/RNN_{r}/Cell{i}/{what}", seed, (n,), 0.5) for i in range(lstm["n_layers"])] for r in (0, 1)
    ]
    return make("h", lstm["projection_dim"]), make("c", lstm["dim"])


# --------------------------------------------------------------------------- forward pass


def char_ids(word, m):
    """M ids, shifted by one."""
    special = {"<S>": [256], "</S>": [257]}
    inner = special.get(word) or list(word.encode("utf-8"))[: m - 2]
    ids = [258] + inner + [259]
    return np.array(ids + [260] * (m - len(ids)), dtype=np.int64) + 1


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


class BiLm:
    """All arithmetic in `dtype`: float64 for the expected values, float32 to see what rounding costs."""

    def __init__(self, options, weights, dtype=np.float64):
        self.cnn, self.lstm, self.dtype = options["char_cnn"], options["lstm"], dtype
        self.w = {name: value.astype(dtype) for name, value in weights.items()}
        self.m = self.cnn["max_characters_per_token"]
        zero_row = np.zeros((1, self.cnn["embedding"]["dim"]), dtype)
        self.table = np.concatenate([zero_row, self.w["char_embed"]])  # (262, C)
        self.clipped = {"cell": [0, 0], "proj": [0, 0]}  # [values beyond the bound, values seen]

    # -- token layer

    def tokens(self, ids):
        """(N, M) -> (N, P)."""
        e = self.table[ids]  # (N, M, C)
        features = []
        for i, (width, n) in enumerate(self.cnn["filters"]):
            windows = sliding_window_view(e, width, axis=1)  # (N, M - width + 1, C, width)
            flat = windows.transpose(0, 1, 3, 2).reshape(e.shape[0], -1, width * e.shape[2])
            u = flat @ self.w[f"CNN/W_cnn_{i}"].reshape(-1, n)  # (N, M - width + 1, n)
            features.append(u.max(axis=1) + self.w[f"CNN/b_cnn_{i}"])
        x = np.concatenate(features, axis=1)  # (N, F)
        x = np.maximum(x, 0) if self.cnn["activation"] == "relu" else np.tanh(x)
        for k in range(self.cnn["n_highway"]):
            g = sigmoid(x @ self.w[f"CNN_high_{k}/W_carry"] + self.w[f"CNN_high_{k}/b_carry"])
            h = np.maximum(x @ self.w[f"CNN_high_{k}/W_transform"] + self.w[f"CNN_high_{k}/b_transform"], 0)
            x = x + g * (h - x)
        if "CNN_proj/W_proj" in self.w:
            x = x @ self.w["CNN_proj/W_proj"] + self.w["CNN_proj/b_proj"]
        return x

    def token_layer(self, words):
        """Lists of words with boundaries -> (B, T, P) with zeros as padding, (B,) lengths."""
        lengths = np.array([len(row) for row in words])
        known = {word: i for i, word in enumerate(sorted({word for row in words for word in row}))}
        vectors = self.tokens(np.stack([char_ids(word, self.m) for word in known]))
        t = np.zeros((len(words), lengths.max(), vectors.shape[1]), self.dtype)
        for b, row in enumerate(words):
            t[b, : len(row)] = vectors[[known[word] for word in row]]
        return t, lengths

    # -- LSTM

    def clip(self, x, bound, live, what):
        if bound is None:
            return x
        self.clipped[what][0] += int((np.abs(x[live]) > bound).sum())
        self.clipped[what][1] += x[live].size
        return np.clip(x, -bound, bound)

    def layer(self, r, i, x, lengths, h, c):
        """One cell over (B, T, P) in reading order from h (B, P), c (B, D); returns outputs and states at the ends."""
        cell = f"RNN_{r}/RNN/MultiRNNCell/Cell{i}/LSTMCell"
        w, b, w_p = self.w[f"{cell}/W_0"], self.w[f"{cell}/B"], self.w.get(f"{cell}/W_P_0")
        y = np.zeros_like(x)
        for t in range(x.shape[1]):
            live = t < lengths  # (B,)
            gi, gj, gf, go = np.split(np.concatenate([x[:, t], h], axis=1) @ w + b, 4, axis=1)  # (B, D) each
            new_c = sigmoid(gf + 1) * c + sigmoid(gi) * np.tanh(gj)
            new_c = self.clip(new_c, self.lstm["cell_clip"], live, "cell")
            new_h = sigmoid(go) * np.tanh(new_c)
            if w_p is not None:
                new_h = self.clip(new_h @ w_p, self.lstm["proj_clip"], live, "proj")
            h = np.where(live[:, None], new_h, h)
            c = np.where(live[:, None], new_c, c)
            y[:, t] = np.where(live[:, None], new_h, 0)
        if i > 0 and self.lstm["use_skip_connections"]:
            y = y + x  # padding holds zeros in both
        return y, h, c

    def stack(self, r, tokens, lengths, state):
        """(B, T, P) -> L of (B, T, P); `state` (h, c lists over layers) is replaced by the states at the ends."""
        # position of the t-th token read: its own mirror image in the backward stack, padding stays where it is
        t = np.arange(tokens.shape[1])[None, :]
        order = np.where(t < lengths[:, None], lengths[:, None] - 1 - t, t) if r == 1 else t + 0 * lengths[:, None]
        read = lambda a: np.take_along_axis(a, order[:, :, None], axis=1)
        x, outputs = read(tokens), []
        for i in range(self.lstm["n_layers"]):
            x, state[0][i], state[1][i] = self.layer(r, i, x, lengths, state[0][i], state[1][i])
            outputs.append(read(x))  # the order is its own inverse
        return outputs

    def batch(self, sentences, states, boundaries):
        """Sentences -> per sentence (L + 1, n, 2P); `states` [direction] of (h, c) rows, updated in place."""
        tokens, lengths = self.token_layer([["<S>", *sentence, "</S>"] for sentence in sentences])
        forward = self.stack(0, tokens, lengths, states[0])
        backward = self.stack(1, tokens, lengths, states[1])
        layers = [np.concatenate([tokens, tokens], axis=2)]
        layers += [np.concatenate(pair, axis=2) for pair in zip(forward, backward)]
        every = np.stack(layers)  # (L + 1, B, T, 2P)
        cut = 0 if boundaries else 1
        return [every[:, b, cut : n - cut] for b, n in enumerate(lengths)]

    def rows(self, vector, n):
        return np.repeat(np.asarray(vector, self.dtype)[None, :], n, axis=0)

    def run(self, batches, start, given, boundaries):
        """start is zero, given or carry; returns [batch][sentence] of (L + 1, n, 2P)."""
        lstm = self.lstm
        layers, p, d = range(lstm["n_layers"]), lstm["projection_dim"], lstm["dim"]
        most = max(len(batch) for batch in batches)
        zero = lambda: [tuple([np.zeros((most, n), self.dtype) for _ in layers] for n in (p, d)) for _ in (0, 1)]
        stored = zero()
        outputs = []
        for batch in batches:
            n = len(batch)
            if start == "given":
                states = [tuple([self.rows(given[k][r][i], n) for i in layers] for k in (0, 1)) for r in (0, 1)]
            else:
                states = [tuple([a[:n].copy() for a in part] for part in stored[r]) for r in (0, 1)]
            outputs.append(self.batch(batch, states, boundaries))
            if start == "carry":
                for r in (0, 1):
                    for k in (0, 1):
                        for i in layers:
                            stored[r][k][i][:n] = states[r][k][i]
        return outputs


# --------------------------------------------------------------------------- layers -> vector


def choose(layers, how):
    """(L + 1, n, 2P) -> (n, width)."""
    if how["layers"] == "average":
        return layers.mean(axis=0)
    if how["layers"] == "top":
        return layers[-1]
    if how["layers"] == "token":
        return layers[0]
    if how["layers"] == "all":
        return layers.transpose(1, 0, 2).reshape(layers.shape[1], -1)
    scalars = np.array(how["scalars"], np.float32).astype(np.float64)
    weights = np.exp(scalars) / np.exp(scalars).sum()
    if how["layer_norm"]:
        axes = (1, 2)
        layers = (layers - layers.mean(axes, keepdims=True)) / np.sqrt(layers.var(axes, keepdims=True) + 1e-12)
    return float(np.float32(how["gamma"])) * np.einsum("k,knd->nd", weights, layers)


def pool(tokens, p, pooling):
    """(n, width) -> (width,)."""
    if pooling == "mean":
        return tokens.mean(axis=0)
    if pooling == "max":
        return tokens.max(axis=0)
    if pooling == "first":
        return tokens[0]
    if pooling == "last":
        return tokens[-1]
    halves = tokens.reshape(tokens.shape[0], -1, 2, p)  # (n, layers, direction, P)
    return np.stack([halves[-1, :, 0], halves[0, :, 1]], axis=1).ravel()


# --------------------------------------------------------------------------- cases

PLAIN = "The committee met on Tuesday , and nobody was surprised .".split()
SHORT = ["Rain", "again", "."]
ONE = ["Yes"]
SIXTY = ("a river runs past the old mill , turns east , and is lost among reeds " * 4).split()[:60]
NON_ASCII = ["naïve", "café", "日本語", "Ελλάδα", "😀", "e\u0301", "\u00a0", "\u0000x"]
SPECIAL = ["see", "<S>", "and", "</S>", "but", "<s>", "<UNK>", "<S>x", "</S>"]
# 48 bytes remain of a word: whole, cut between two characters, cut inside one (2, 3, 4 bytes), cut far away.
LONG = ["a" * 48, "a" * 49, "日" * 17, "a" * 47 + "é", "x" + "日" * 20, "ab" + "😀" * 13, "é" * 90]
EMPTY_TOKEN = ["an", "", "empty", "", "token"]
MIXED = [PLAIN, [], ONE, NON_ASCII, SPECIAL, LONG, EMPTY_TOKEN]
CARRIED = [
    [SHORT, PLAIN, ONE],
    [ONE, SHORT, EMPTY_TOKEN, [], PLAIN],
    [SHORT, []],
    [[], SPECIAL[:4], ONE, SHORT, SHORT, []],
    [[]],
    [PLAIN, ONE, SHORT],
]


def tiny(**changes):
    """Options of a very small model; `changes` name fields of `lstm` and `char_cnn`."""
    lstm = dict(cell_clip=3, dim=10, n_layers=2, proj_clip=3, projection_dim=6, use_skip_connections=True)
    cnn = dict(activation="relu", embedding=dict(dim=4), filters=[[1, 4], [2, 6], [3, 5]])
    cnn |= dict(max_characters_per_token=50, n_characters=262, n_highway=2)
    for key, value in changes.items():
        part = lstm if key in lstm else cnn
        if value == "absent":
            del part[key]
        else:
            part[key] = value
    return dict(char_cnn=cnn, lstm=lstm)


def published(dim, projection_dim, n_highway):
    """Options of a published size."""
    filters = [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]
    return tiny(dim=dim, projection_dim=projection_dim, n_highway=n_highway, filters=filters, embedding=dict(dim=16))


def case(name, options, batches, seed, scale=1.0, state="zero", boundaries=False, probes=None, tolerance=5e-6):
    return dict(
        name=name, options=options, seed=seed, scale=scale, state=state, boundaries=boundaries,
        batches=batches, probes=probes, tolerance=tolerance,
    )  # fmt: skip


def real(name, options, seed, **more):
    """Real sizes keep 64 probes and two means of each layer and batch instead of all values."""
    batches = more.pop("batches", [[["An", "expensive", "naïve", "word", "."], [], ONE]])
    return case(name, options, batches, seed, scale=1.25, probes=64, tolerance=5e-5, **more)


FEW = [[PLAIN, [], ONE, SPECIAL[:4]]]
CASES = [
    case("relu_2_highways_2_layers", tiny(), [MIXED], 1),
    case("sixty_tokens", tiny(), [[SIXTY, ONE]], 1),
    case("tanh_1_highway", tiny(activation="tanh", n_highway=1), [MIXED], 2),
    case("no_skip_connections", tiny(use_skip_connections=False), FEW, 3),
    case("no_highway", tiny(n_highway=0), FEW, 4),
    case("tanh_no_highway_261_characters", tiny(n_highway=0, activation="tanh", n_characters=261), FEW, 5),
    case("1_layer_characters_not_said", tiny(n_layers=1, n_characters="absent"), FEW, 6),
    case("4_layers", tiny(n_layers=4), FEW, 7),
    case("4_layers_no_skip_carry", tiny(n_layers=4, use_skip_connections=False), CARRIED[:3], 8, scale=0.8, state="carry"),
    case("filters_out_of_order", tiny(filters=[[3, 5], [1, 4], [3, 2], [5, 3]]), FEW, 9),
    case("12_characters_per_word", tiny(max_characters_per_token=12), [[PLAIN, NON_ASCII, SPECIAL]], 10),
    case("no_token_projection", tiny(filters=[[1, 2], [2, 3], [4, 1]]), FEW, 11),
    case("no_lstm_projection", tiny(dim=6, proj_clip=0.01), FEW, 12),
    case("no_projection_at_all", tiny(filters=[[1, 2], [2, 4]], dim=6, n_highway=0), FEW, 13),
    case("both_clips_bite", tiny(cell_clip=1.5, proj_clip=1), [[PLAIN, SIXTY[:20]]], 14),
    case("no_clips", tiny(cell_clip=None, proj_clip=None), [[PLAIN, SIXTY[:20]]], 14),
    case("both_clips_tight_carry", tiny(cell_clip=0.5, proj_clip=0.25), CARRIED, 15, state="carry"),
    case("cell_clip_only", tiny(cell_clip=0.4, proj_clip=None), FEW, 16),
    case("proj_clip_only", tiny(cell_clip=None, proj_clip=0.3), FEW, 17),
    case("boundaries_kept", tiny(), [MIXED[:3]], 18, boundaries=True),
    case("given_state", tiny(), [[PLAIN, [], ONE], [SHORT]], 19, state="given"),
    case("given_state_boundaries_kept", tiny(), [[SHORT, [], ONE]], 19, state="given", boundaries=True),
    case("carry", tiny(), CARRIED, 20, scale=0.8, state="carry"),
    case("carry_boundaries_kept", tiny(), CARRIED[:3], 21, state="carry", boundaries=True),
    real("small", published(1024, 128, 1), 22),
    real("small_carry", published(1024, 128, 1), 22, state="carry", batches=[[SHORT, ONE], [ONE, [], SHORT]]),
    real("small_given_boundaries_kept", published(1024, 128, 1), 22, state="given", boundaries=True),
    real("medium", published(2048, 256, 1), 23),
    real("original", published(4096, 512, 2), 24),
]

MIX = dict(layers="mix", scalars=[0.3, -1.25, 0.75], gamma=1.5, layer_norm=False)
LAYERS = [dict(layers=word) for word in ("average", "top", "token", "all")]
LAYERS += [MIX, MIX | dict(layer_norm=True), MIX | dict(scalars=[-9e10, -9e10, 0.0], gamma=1.0)]
POOLINGS = ["mean", "max", "first", "last", "ends"]
WORDS = sorted({w for s in (PLAIN, NON_ASCII, SPECIAL, LONG, EMPTY_TOKEN) for w in s} | {"Ātest", "\u007f\U0010ffff"})


# --------------------------------------------------------------------------- files


def probe_places(n, count):
    """`count` different places among n values; the step is a prime, so they spread over tokens and dimensions."""
    return [(7 + 10007 * k) % n for k in range(count)]


def kept(values, probes):
    """What of a batch's (L + 1, tokens, 2P) goes into the file."""
    if probes is None:
        return {"": values}
    flat = values.reshape(values.shape[0], -1)
    places = probe_places(flat.shape[1], probes)
    means = np.stack([flat.mean(1), np.abs(flat).mean(1)], axis=1)
    return {"/probes": np.concatenate([flat[:, places], means], axis=1)}


def compute(c):
    """Expected values of one case, and its notes: shares of clipped values, error of float32, size of the values."""
    weights = seeded_weights(c["options"], c["seed"], c["scale"])
    given = seeded_state(c["options"], c["seed"])
    arguments = (c["batches"], c["state"], given, c["boundaries"])
    exact = BiLm(c["options"], weights)
    batches = [np.concatenate(sentences, axis=1) for sentences in exact.run(*arguments)]
    rough = BiLm(c["options"], weights, np.float32).run(*arguments)
    error = max(np.abs(a - np.concatenate(b, axis=1)).max(initial=0) for a, b in zip(batches, rough))
    share = lambda what: round(exact.clipped[what][0] / max(exact.clipped[what][1], 1), 4)
    everything = np.concatenate(batches, axis=1)
    notes = dict(
        clipped_share=dict(cell=share("cell"), proj=share("proj")),
        float32_error=float(f"{error:.1e}"),
        mean_abs_per_layer=[round(float(x), 3) for x in np.abs(everything).mean(axis=(1, 2))],
        largest=round(float(np.abs(everything).max()), 3),
    )
    return batches, notes


def vectors():
    """Chosen layers and poolings of one tiny sentence, as JSON numbers."""
    options, seed, scale = tiny(), 25, 1.0
    model = BiLm(options, seeded_weights(options, seed, scale))
    layers = model.run([[PLAIN[:5]]], "zero", None, False)[0][0]
    p = options["lstm"]["projection_dim"]
    wanted = []
    for how in LAYERS:
        tokens = choose(layers, how)
        for pooling in POOLINGS:
            vector = pool(tokens, p, pooling)
            unit = vector / np.sqrt((vector**2).sum())
            wanted.append(how | dict(pooling=pooling, vector=vector.tolist(), l2=unit.tolist()))
    return dict(options=options, seed=seed, scale=scale, sentence=PLAIN[:5], vectors=wanted)


def safetensors(tensors):
    """The file format by hand: length of the header, header, numbers."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values, "<f8").tobytes()
        header[name] = dict(dtype="F64", shape=list(values.shape), data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def json_lines(key, entries, rest=None):
    """JSON with one entry per line, to be read in a diff."""
    lines = ",\n".join("  " + json.dumps(e, ensure_ascii=True) for e in entries)
    head = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in (rest or {}).items())
    return ("{\n" + head + f' "{key}": [\n{lines}\n ]\n' + "}\n").encode()


def build():
    tensors, described = {}, []
    for c in CASES:
        batches, notes = compute(c)
        for i, values in enumerate(batches):
            tensors |= {f"{c['name']}/{i}{part}": kept_part for part, kept_part in kept(values, c["probes"]).items()}
        # A tolerance means something only where rounding to float32 stays well below it.
        assert 4 * notes["float32_error"] <= c["tolerance"], (c["name"], notes)
        described.append(c | notes)
        print(f"{c['name']:34} {notes}", flush=True)
    v = vectors()
    words = [dict(word=w, ids=char_ids(w, 50).tolist()) for w in WORDS]
    return {
        "cases.json": json_lines("cases", described),
        "values.safetensors": safetensors(tensors),
        "vectors.json": json_lines("vectors", v.pop("vectors"), v),
        "char_ids.json": json_lines("words", words),
    }


def numbers(data):
    """The numbers of a file that build() made, to be compared with a tolerance."""
    if data[:1] == b"{":
        return np.array([float(x) for x in _leaves(json.loads(data))])
    return np.frombuffer(data[8 + struct.unpack("<Q", data[:8])[0] :], "<f8")


def _leaves(value):
    if isinstance(value, dict):
        return [x for v in value.values() for x in _leaves(v)]
    if isinstance(value, list):
        return [x for v in value for x in _leaves(v)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = arguments.parse_args().check
    print("python", platform.python_version(), "numpy", np.__version__)
    OUT.mkdir(parents=True, exist_ok=True)
    for name, data in build().items():
        if not check:
            (OUT / name).write_bytes(data)
            print(f"{name}: {len(data)} bytes")
            continue
        before, now = numbers((OUT / name).read_bytes()), numbers(data)
        difference = np.abs(before - now).max()
        print(f"{name}: largest difference {difference:.1e}")
        # cases.json holds rounded notes, which another numpy may round otherwise; the rest is exact.
        if name != "cases.json" and difference > 1e-12:
            raise SystemExit(f"{name} differs from what this program computes")


if __name__ == "__main__":
    main()

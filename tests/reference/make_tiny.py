"""Computes the built-in model `tiny` and its fingerprint with Python integers, hashlib and struct only.

Written from the comments of src/model_dir.rs and src/fingerprint.rs, as a second opinion: the
fingerprint that it prints is the one that the program must have.

    python3 tests/reference/make_tiny.py
"""

import hashlib
import json
import struct

MASK = (1 << 64) - 1
FILTERS = [[1, 4], [2, 8], [3, 16], [4, 32], [5, 64]]
C, D, P, LAYERS, HIGHWAY = 16, 128, 32, 2, 2
F = sum(n for _, n in FILTERS)

CANONICAL = json.dumps(
    {
        "char_cnn": {
            "activation": "relu",
            "embedding": {"dim": C},
            "filters": FILTERS,
            "max_characters_per_token": 50,
            "n_characters": 262,
            "n_highway": HIGHWAY,
        },
        "lstm": {
            "cell_clip": 3.0,
            "dim": D,
            "n_layers": LAYERS,
            "proj_clip": 3.0,
            "projection_dim": P,
            "use_skip_connections": True,
        },
    },
    sort_keys=True,
    separators=(",", ":"),
)


def plan():
    yield "char_embed", (261, C)
    for i, (width, n) in enumerate(FILTERS):
        yield f"CNN/W_cnn_{i}", (1, width, C, n)
        yield f"CNN/b_cnn_{i}", (n,)
    for i in range(HIGHWAY):
        for gate in ("carry", "transform"):
            yield f"CNN_high_{i}/W_{gate}", (F, F)
            yield f"CNN_high_{i}/b_{gate}", (F,)
    yield "CNN_proj/W_proj", (F, P)
    yield "CNN_proj/b_proj", (P,)
    for direction in range(2):
        for layer in range(LAYERS):
            prefix = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            yield f"{prefix}/W_0", (2 * P, 4 * D)
            yield f"{prefix}/B", (4 * D,)
            yield f"{prefix}/W_P_0", (D, P)


def splitmix64(seed):
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def size(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def values(name, shape, seed):
    last = name.rsplit("/", 1)[-1]
    n = size(shape)
    if last == "b_carry":
        return [-2.0] * n
    if last.startswith("b_cnn"):
        return [-0.5] * n
    if last == "char_embed":
        span = 1.0
    elif last in ("W_carry", "W_transform"):
        span = 0.125
    elif last == "W_0":
        span = 0.5
    elif last.startswith("W"):
        span = 0.25
    else:
        span = 0.0625
    random = splitmix64(seed)
    return [((next(random) >> 40) - (1 << 23)) * span / (1 << 23) for _ in range(n)]


def tensors():
    return {name: (shape, values(name, shape, seed)) for seed, (name, shape) in enumerate(plan())}


def fingerprint(weights):
    sha = hashlib.sha256(b"elmo-model-1\n")

    def number(n):
        sha.update(struct.pack("<Q", n))

    def text(s):
        number(len(s.encode()))
        sha.update(s.encode())

    text(CANONICAL)
    for name in sorted(weights, key=str.encode):
        shape, data = weights[name]
        text(name)
        number(len(shape))
        for d in shape:
            number(d)
        sha.update(struct.pack(f"<{len(data)}f", *data))
    return sha.hexdigest()


if __name__ == "__main__":
    weights = tensors()
    print(sum(len(data) for _, data in weights.values()), "parameters")
    print(fingerprint(weights))

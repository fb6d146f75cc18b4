"""Prints the vectors that elmo_embed.slt expects, by way of numpy instead of the program: the weights of the built-in
model from make_tiny.py, the forward pass and the poolings from golden.py.

    .venv/bin/python tests/sql/slt/expected.py
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reference"))
import golden
import make_tiny

# 'Best noodles.' as Moses cuts it.
TOKENS = ["Best", "noodles", "."]

weights = {name: np.array(data, np.float32).reshape(shape) for name, (shape, data) in make_tiny.tensors().items()}
layers = golden.BiLm(json.loads(make_tiny.CANONICAL), weights).run([[TOKENS]], "zero", None, False)[0][0]
for how in ("average", "top", "token", "all"):
    for pooling in golden.POOLINGS:
        vector = golden.pool(golden.choose(layers, {"layers": how}), make_tiny.P, pooling)
        print(f"{how:8}{pooling:6}[{vector[0]:.4f}, {vector[1]:.4f}, … {len(vector)}]  {np.linalg.norm(vector):.4f}")

"""Prints the vectors that elmo_embed.slt expects. Computed with numpy, without the program: the weights of the built-in model
are those of make_tiny.py, the forward pass and the poolings those of golden.py.

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

# The Moses tokens of 'Best noodles.'.
TOKENS = ["Best", "noodles", "."]

weights = {name: np.array(data, np.float32).reshape(shape) for name, (shape, data) in make_tiny.tensors().items()}
layers = golden.BiLm(json.loads(make_tiny.CANONICAL), weights).run([[TOKENS]], "zero", None, False)[0][0]
for how in ("average", "top", "token", "all"):
    for pooling in golden.POOLINGS:
        vector = golden.pool(golden.choose(layers, {"layers": how}), make_tiny.P, pooling)
        print(f"{how:8}{pooling:6}[{vector[0]:.4f}, {vector[1]:.4f}, … {len(vector)}]  {np.linalg.norm(vector):.4f}")

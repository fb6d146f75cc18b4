"""Writes tests/fixtures/hdf5 with h5py, that is with the C library, which our reader must agree with.

    pip install h5py numpy
    python3 tests/reference/make_hdf5_fixtures.py

The committed files were written by h5py 3.16.0 with HDF5 2.0.0. All hold the same model, given by
options.json beside them; value k of a tensor is ((37 k + 11 len(name)) mod 101 - 50) / 64, which
float16 holds exactly. Files that end in _refused.hdf5 must be refused, each for its own reason.
"""

import json
import pathlib
import shutil
import struct

import h5py
import numpy as np

OUT = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / "hdf5"
FILTERS = [[1, 2], [2, 3]]
C, D, P, LAYERS, HIGHWAY = 2, 4, 3, 2, 1
F = sum(n for _, n in FILTERS)
OPTIONS = {
    "lstm": {
        "use_skip_connections": True,
        "projection_dim": P,
        "cell_clip": 3,
        "proj_clip": 3,
        "dim": D,
        "n_layers": LAYERS,
    },
    "char_cnn": {
        "activation": "relu",
        "filters": FILTERS,
        "n_highway": HIGHWAY,
        "embedding": {"dim": C},
        "n_characters": 262,
        "max_characters_per_token": 50,
    },
}


def shapes():
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


def tensor(name, shape):
    k = np.arange(int(np.prod(shape)))
    return (((37 * k + 11 * len(name)) % 101 - 50) / 64).astype("<f4").reshape(shape)


MODEL = {name: tensor(name, shape) for name, shape in shapes()}
CELL = "RNN_0/RNN/MultiRNNCell/Cell0/LSTMCell"


def write(name, leave_out=(), libver=("earliest", "latest"), dtype=None, **settings):
    """Writes the model but for `leave_out`; returns the open file. Small tensors are not packed."""
    file = h5py.File(OUT / name, "w", libver=libver)
    for path, data in MODEL.items():
        if path not in leave_out:
            how = settings if data.size > 64 else {}
            file.create_dataset(path, data=data if dtype is None else data.astype(dtype), **how)
    return file


def readable():
    write("default.hdf5").close()
    write("latest.hdf5", libver="latest").close()
    packed = dict(chunks=True, shuffle=True, compression="gzip", fletcher32=True)
    write("gzip.hdf5", **packed).close()
    write("gzip_v114.hdf5", libver=("v114", "v114"), **packed).close()
    write("lzf.hdf5", chunks=True, compression="lzf").close()
    # Chunks that do not divide the shape, and an extensible first dimension.
    with write("chunked_v114.hdf5", leave_out=["char_embed"], libver=("v114", "v114")) as file:
        file.create_dataset("char_embed", data=MODEL["char_embed"], chunks=(7, 2), maxshape=(None, 2))
    write("f64.hdf5", dtype="<f8").close()
    write("f16.hdf5", dtype="<f2").close()
    write("f16_big_endian.hdf5", dtype=">f2").close()
    write("big_endian.hdf5", dtype=">f4").close()
    with write("compact.hdf5", leave_out=["CNN/b_cnn_0"]) as file:
        compact(file["CNN"], b"b_cnn_0", MODEL["CNN/b_cnn_0"])
    with write("surplus.hdf5") as file:
        file["CNN/extra"] = np.zeros(3, "i4")
        file["softmax/W"] = np.zeros((2, 2), "f4")
        file["softmax/loop"] = file["/"]
        file.attrs["note"] = "x" * 100


def compact(group, name, data):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(data.shape)
    h5py.h5d.create(group.id, name, h5py.h5t.IEEE_F32LE, space, plist).write(h5py.h5s.ALL, h5py.h5s.ALL, data)


def refused():
    bias = "CNN/b_cnn_0"
    with write("external_storage_refused.hdf5", leave_out=[bias]) as file:
        file.create_dataset(bias, MODEL[bias].shape, "f4", external=[("beside.bin", 0, h5py.h5f.UNLIMITED)])
    with write("external_link_refused.hdf5", leave_out=[bias]) as file:
        file[bias] = h5py.ExternalLink("default.hdf5", "/" + bias)
    with write("external_group_refused.hdf5", leave_out=[n for n in MODEL if n.startswith("CNN/")]) as file:
        file["CNN"] = h5py.ExternalLink("default.hdf5", "/CNN")
    with write("soft_link_refused.hdf5", leave_out=[bias]) as file:
        file["elsewhere"] = MODEL[bias]
        file[bias] = h5py.SoftLink("/elsewhere")
    with write("soft_link_latest_refused.hdf5", leave_out=[bias], libver="latest") as file:
        file["elsewhere"] = MODEL[bias]
        file[bias] = h5py.SoftLink("/elsewhere")
    with write("virtual_refused.hdf5", leave_out=[bias], libver="latest") as file:
        layout = h5py.VirtualLayout(MODEL[bias].shape, "f4")
        layout[:] = h5py.VirtualSource("default.hdf5", bias, MODEL[bias].shape)
        file.create_virtual_dataset(bias, layout)
    with write("filter_refused.hdf5", leave_out=["char_embed"]) as file:
        file.create_dataset("char_embed", data=MODEL["char_embed"], chunks=True, scaleoffset=4)
    # Packed chunks in the format of HDF5 2.0, which our reader does not know.
    write("chunks_of_hdf5_2_refused.hdf5", libver="latest", chunks=True, compression="gzip").close()
    with write("unwritten_refused.hdf5", leave_out=["char_embed", bias]) as file:
        file.create_dataset("char_embed", (261, C), "f4", chunks=(20, C))[:100] = 1
        file.create_dataset(bias, MODEL[bias].shape, "f4")
    with write("size_bomb_refused.hdf5", leave_out=["char_embed", bias]) as file:
        file.create_dataset("char_embed", (1 << 36,), "f4")
        file.create_dataset(bias, (1 << 40, 1 << 20), "f4", chunks=(1 << 10, 1 << 10), compression="gzip")
    with write("chunk_bomb_refused.hdf5", leave_out=["char_embed"]) as file:
        shape = dict(shape=(261, C), maxshape=(None, None), chunks=(1 << 15, 1 << 14))
        file.create_dataset("char_embed", dtype="f4", compression="gzip", **shape)
    with write("not_finite_refused.hdf5", leave_out=[f"{CELL}/W_0"]) as file:
        data = MODEL[f"{CELL}/W_0"].copy()
        data[2, 5] = np.nan
        file[f"{CELL}/W_0"] = data
    with write("overflow_refused.hdf5", leave_out=[bias]) as file:
        file[bias] = np.array([1.0, 1e300])
    with write("wrong_refused.hdf5", leave_out=["char_embed", "CNN/b_cnn_1", "CNN_proj/W_proj", bias]) as file:
        file["char_embed"] = MODEL["char_embed"][:-1]
        file["CNN_proj/W_proj"] = MODEL["CNN_proj/W_proj"].astype("i4")
        file.create_group(bias)


def crafted():
    """Structures that no library writes: cheap to store, endless to follow."""
    plain = (OUT / "default.hdf5").read_bytes()
    root_tree = plain.index(b"TREE")
    heap = plain.index(b"HEAP")
    # Forty tree nodes of the root group, each naming the next one twice: 2^40 visits.
    chain = b""
    start = len(plain)
    leaf = struct.unpack_from("<Q", plain, root_tree + 24 + 8)[0]
    for i in range(40):
        child = start + (i + 1) * 64 if i < 39 else leaf
        chain += struct.pack("<4sBBHQQQQQQQ", b"TREE", 0, 39 - i, 2, *[2**64 - 1] * 2, 0, child, 0, child, 8)
    # A heap without a NUL in it, behind which every name is long.
    long_heap = struct.pack("<4sIQQQ", b"HEAP", 0, 4000, 1, start + 32) + b"A" * 4000
    for name, old, new in [("tree_bomb", root_tree, chain), ("name_bomb", heap, long_heap)]:
        data = bytearray(plain.replace(struct.pack("<Q", old), struct.pack("<Q", start)) + new)
        struct.pack_into("<Q", data, 40, len(data))  # end of file address
        (OUT / f"{name}_refused.hdf5").write_bytes(data)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    (OUT / "options.json").write_text(json.dumps(OPTIONS, indent=2) + "\n")
    readable()
    refused()
    crafted()
    for path in sorted(OUT.iterdir()):
        print(f"{path.stat().st_size:8} {path.name}")

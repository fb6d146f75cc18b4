#!/usr/bin/env python3
"""simple_elmo, the graph of bilm-tf in TensorFlow: `ElmoModel.get_elmo_vectors(layers="all")`.

`get_elmo_vectors` without a session makes one for each call and loads the weights again; here it gets one session, so
that loading is not part of the measurement. It returns one array of float64, as long as the longest sentence: a call
gets ten batches.
"""

import importlib.metadata
import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy  # noqa: E402
import tensorflow as tf  # noqa: E402
from simple_elmo import ElmoModel  # noqa: E402
from simple_elmo.elmo import weight_layers  # noqa: E402

import peer  # noqa: E402

BATCHES_PER_CALL = 10


class SimpleElmo:
    def __init__(self, arguments):
        tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
        tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
        self.versions = dict(
            simple_elmo=importlib.metadata.version("simple_elmo"),
            tensorflow=tf.__version__,
            numpy=numpy.__version__,
        )
        self.model = ElmoModel()
        logging.disable(logging.INFO)  # ElmoModel() enables a message per batch
        self.model.load(str(arguments.model), max_batch_size=arguments.batch)
        operation = weight_layers("input", self.model.sentence_embeddings_op, use_layers="all")
        self.model.elmo_sentence_input = operation
        self.session = tf.compat.v1.Session()
        self.session.run(tf.compat.v1.global_variables_initializer())

    def embed(self, sentences, batch):
        """The batch size is that of the loaded model; a smaller batch is a call of its own."""
        n = min(batch, self.model.batch_size) * BATCHES_PER_CALL
        for i in range(0, len(sentences), n):
            part = sentences[i : i + n]
            vectors = self.model.get_elmo_vectors(part, warmup=False, layers="all", session=self.session)
            for sentence, layers in zip(part, vectors):
                yield layers[:, : len(sentence)]


if __name__ == "__main__":
    peer.main(__doc__.splitlines()[0], SimpleElmo)

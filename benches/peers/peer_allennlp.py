#!/usr/bin/env python3
"""AllenNLP 0.9.0: `ElmoEmbedder.embed_sentences`, all three layers as numpy arrays.

AllenNLP 0.9.0 pins versions that no longer install. Its code runs unchanged with a current torch, if it is installed
with `pip install --no-deps allennlp==0.9.0`, and if empty modules take the place of what it imports for other purposes
than ELMo.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import numpy
import torch

import peer

ABSENT = """_jsonnet boto3 botocore conllu editdistance ftfy jsonpickle nltk overrides parsimonious
    pytorch_pretrained_bert pytorch_transformers requests spacy tqdm unidecode word2number""".split()


class EmptyModule(types.ModuleType):
    """Has every name, each an empty class, so that it can be imported from and inherited from."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        if module.__name__ == "overrides":
            module.overrides = lambda method: method  # a decorator that only checks


def import_embedder():
    sys.meta_path.insert(0, EmptyModules())
    # The package `commands` imports all commands, among them the web server. A package without code has the same path.
    found = importlib.util.find_spec("allennlp")
    if found is None:
        raise ImportError("allennlp is not installed: pip install --no-deps allennlp==0.9.0")
    commands = types.ModuleType("allennlp.commands")
    commands.__path__ = [str(Path(found.submodule_search_locations[0]) / "commands")]
    sys.modules["allennlp.commands"] = commands
    from allennlp.commands.elmo import ElmoEmbedder

    return ElmoEmbedder


class AllenNlp:
    def __init__(self, arguments):
        torch.set_num_threads(arguments.threads)
        embedder = import_embedder()
        from allennlp.version import VERSION

        self.versions = dict(allennlp=VERSION, torch=torch.__version__, numpy=numpy.__version__)
        files = (str(arguments.model / name) for name in ("options.json", "weights.hdf5"))
        self.embedder = embedder(*files)

    def embed(self, sentences, batch):
        return self.embedder.embed_sentences(sentences, batch_size=batch)


if __name__ == "__main__":
    peer.main(__doc__.splitlines()[0], AllenNlp)

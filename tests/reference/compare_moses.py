#!/usr/bin/env python3
"""Compares our Moses tokenizer with sacremoses, and makes the gold file of the unit test.

    pip install sacremoses zstandard

    # agreement on a corpus: JSON lines with a field `text`, plain or .zst; OURS as written by
    #   cargo run --example tokenize < TEXTS.jsonl > OURS.jsonl
    compare_moses.py agreement TEXTS.jsonl[.zst] OURS.jsonl

    # the tokens of the gold file anew, from the texts in it
    compare_moses.py gold tests/fixtures/moses_gold.jsonl > new.jsonl

Both tokenizers get the same sentences: those of OURS, whose lines are `[[start, end, [token, ...]], ...]`, a list for
each text, with offsets in bytes. A sentence's two token sequences are aligned with difflib; the tokens of sacremoses
inside an equal stretch agree, all others do not. Differences are listed by kind, most frequent first.
"""

import collections
import difflib
import io
import json
import sys

import sacremoses
from sacremoses import MosesPunctNormalizer, MosesTokenizer

NORMALIZER = MosesPunctNormalizer(lang="en")
TOKENIZER = MosesTokenizer(lang="en")


def reference(sentence):
    """Tokens of a sentence according to sacremoses."""
    return TOKENIZER.tokenize(NORMALIZER.normalize(sentence), escape=False)


def lines(path):
    if path.endswith(".zst"):
        import zstandard

        return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(open(path, "rb")), encoding="utf-8")
    return open(path, encoding="utf-8")


def agreement(texts, ours):
    total = same = sentences = 0
    kinds = collections.Counter()
    for text, result in zip(lines(texts), lines(ours), strict=True):
        raw = json.loads(text)["text"].encode()
        for start, end, tokens in json.loads(result):
            expected = reference(raw[start:end].decode())
            sentences += 1
            total += len(expected)
            if tokens == expected:
                same += len(expected)
                continue
            matcher = difflib.SequenceMatcher(None, expected, tokens, autojunk=False)
            for tag, a, b, c, d in matcher.get_opcodes():
                if tag == "equal":
                    same += b - a
                else:
                    kinds[f"{expected[a:b]} -> {tokens[c:d]}"] += 1
    print(f"sacremoses {sacremoses.__version__}: {sentences} sentences, {total} tokens, {same} agree "
          f"({100 * same / max(total, 1):.4f} %), {sum(kinds.values())} differences of {len(kinds)} kinds")
    for kind, count in kinds.most_common(50):
        print(f"{count:6} {kind}")


def gold(path):
    for line in lines(path):
        sentence = json.loads(line)["text"]
        print(json.dumps({"text": sentence, "tokens": reference(sentence)}, ensure_ascii=False))


if __name__ == "__main__":
    {"agreement": agreement, "gold": gold}[sys.argv[1]](*sys.argv[2:])

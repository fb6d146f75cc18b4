#!/usr/bin/env python3
"""Compares `elmo` with the other programs that run ELMo: the same weights, text and machine, one after the other.

    python3 benches/peers/compare.py --elmo target/release/elmo --text sentences.txt --output results.json

README.md beside this file says what to install, what is measured, and how. The tables go to stdout as Markdown,
progress and errors go to stderr. The exit code is 1 if a program that computes in float32 returns other vectors than
AllenNLP.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy

sys.dont_write_bytecode = True  # the scripts' folders are part of the repository

from peer import latency_sentences, read_sentences, spread  # noqa: E402
from random_model import SIZES  # noqa: E402

HERE = Path(__file__).resolve().parent
CHECKED_SENTENCES = 20
CARRIED_BATCH = 8
TOLERANCE = 2e-5  # float32 programs, activations up to 2
LONGEST = 500  # `elmo embed` cuts sentences of more than 512 tokens into windows
NEIGHBOURS = 64  # the text is sampled in blocks of neighbouring sentences, as they stand in a file
PILOT_SECONDS = 5  # the rate that decides how many sentences a program gets is measured at least this long
REFERENCES = ("allennlp", "allennlp-sorted")
CPU_FLAGS = "avx2 avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16".split()
# What text rarely has: a word of more than 48 bytes, one that is cut inside a character, words of other scripts.
UNUSUAL = ["naïve", "日本語", "a" * 60, "a" * 47 + "é" * 5, "Ελλάδα", "😀", "."]


@dataclass
class Contender:
    name: str
    engine: str  # what computes: contenders with the same engine return the same vectors
    program: list  # the script of a peer and its options, or the options of `elmo embed`
    description: str
    batch: int = 0  # 0: chosen by elmo
    sorts: bool = False
    exact: bool = True  # computes in float32
    warm_up: int = 20  # sentences before measuring latency; more fill the word cache

    @property
    def ours(self):
        return self.name.startswith("elmo")


ALLENNLP, LAYERS = ["peer_allennlp.py"], ["--level", "token", "--layers", "all"]
INT8 = ["--precision", "int8"]
CONTENDERS = [
    Contender("allennlp", "AllenNLP 0.9.0", ALLENNLP, "batches of 64, file order", 64),
    Contender("allennlp-sorted", "AllenNLP 0.9.0", ALLENNLP, "batches of 64, text sorted by length", 64, True),
    Contender("simple-elmo", "simple_elmo", ["peer_simple_elmo.py"], "batches of 32, file order", 32),
    Contender("torch-f32", "torch f32", ["peer_torch.py"], "batches of 256, text sorted", 256, True, warm_up=1000),
    Contender(
        "torch-int8", "torch int8", ["peer_torch.py", *INT8], "batches of 256, text sorted", 256, True, False, 1000
    ),
    Contender("elmo-f32", "elmo f32", [], "one vector per sentence", warm_up=1000),
    Contender("elmo-int8", "elmo int8", INT8, "one vector per sentence", exact=False, warm_up=1000),
    Contender("elmo-f32-tokens", "elmo f32", LAYERS, "all layers of all tokens", warm_up=1000),
]
NAMES = [c.name for c in CONTENDERS]


class Failed(Exception):
    """A program could not run. The message is the last line that it wrote."""


# --------------------------------------------------------------------------- processes


def plain_environment():
    """Without settings of `elmo`, which come from the command line only."""
    return {key: value for key, value in os.environ.items() if not key.startswith("ELMO_")}


def run(command, threads, folder):
    """Runs a process. Returns its output, and seconds, CPU seconds and peak memory of the whole process."""
    command = [str(word) for word in command]
    environment = plain_environment()
    if command[0] == sys.executable:
        environment |= dict(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    with tempfile.TemporaryFile(dir=folder) as output, tempfile.TemporaryFile(dir=folder) as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        text, messages = output.read().decode(), errors.read().decode(errors="replace").strip()
    if process.returncode:
        last = messages.splitlines()[-1] if messages else "no message"
        raise Failed(f"exit code {process.returncode}: {last}")
    cpu = usage.ru_utime + usage.ru_stime
    return text, dict(seconds=seconds, cpu_seconds=cpu, peak_mb=usage.ru_maxrss / 1024)


class Runner:
    """Runs contenders on one model and text."""

    def __init__(self, arguments, size, sentences, folder):
        self.elmo, self.threads, self.folder = str(arguments.elmo), arguments.threads, folder
        self.sentences, self.words = sentences, arguments.latency_words
        self.model = arguments.cache / size
        self.versions = {}
        make_model(size, self.model)
        self.text = self.write("text.txt", sentences)

    def write(self, name, sentences):
        path = self.folder / name
        path.write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
        return path

    def peer(self, contender, text, *options):
        script, *more = contender.program
        options = ["--batch", contender.batch, "--threads", self.threads, *more, *options]
        text, usage = run([sys.executable, "-B", HERE / script, self.model, text, *options], self.threads, self.folder)
        report = json.loads(text.splitlines()[-1])
        self.versions |= report.pop("versions")
        return report | dict(process=usage)

    def embed(self, options, text, output):
        settings = "--tokenizer whitespace --sentences off --overwrite --quiet --json".split()
        options = ["--model", self.model, "--threads", self.threads, "--output", output, *options]
        report, usage = run([self.elmo, "embed", text, *settings, *options], self.threads, self.folder)
        return json.loads(report)["tokens"], usage

    def measure(self, contender, n):
        """One run of about n sentences."""
        if not contender.ours:
            order = "sorted" if contender.sorts else "file"
            return self.peer(contender, self.text, "--sentences", n, "--order", order)
        # The time of a run with one sentence is that of the start: loading libtorch and the model.
        chosen = spread(self.sentences, n, NEIGHBOURS)
        one = self.write("one.txt", [chosen[0]])
        many = self.write("many.txt", chosen)
        options = ["--state", "zero", *contender.program]
        tokens_of_one, start = self.embed(options, one, self.folder / "vectors")
        tokens, whole = self.embed(options, many, self.folder / "vectors")
        shutil.rmtree(self.folder / "vectors")
        assert tokens == sum(map(len, chosen)), f"elmo embedded {tokens} tokens"
        return dict(
            sentences=len(chosen) - 1,
            tokens=tokens - tokens_of_one,
            seconds=whole["seconds"] - start["seconds"],
            cpu_seconds=whole["cpu_seconds"] - start["cpu_seconds"],
            loaded_mb=start["peak_mb"],
            peak_mb=whole["peak_mb"],
            process=whole | dict(tokens=tokens, sentences=len(chosen)),
            start=start,
        )

    def vectors(self, contender, text, batch, state):
        """Layers of all words (layers, words, dimensions). The first batch starts from LSTM states of zeros."""
        if not contender.ours:
            path = self.folder / "vectors.npy"
            self.peer(contender, text, "--batch", batch, "--dump", path)
            return numpy.load(path)
        from pyarrow import parquet

        output = self.folder / "layers"
        precision = INT8 if contender.program == INT8 else []
        carry = ["--batch-rows", batch, "--on-long", "error"] if state == "carry" else []
        self.embed([*LAYERS, *precision, "--state", state, *carry], text, output)
        tokens = parquet.read_table(output)["tokens"].combine_chunks().flatten()
        shutil.rmtree(output)
        options = json.loads((self.model / "options.json").read_bytes())
        flat = tokens.field("embedding").flatten().to_numpy()
        return flat.reshape(len(tokens), options["lstm"]["n_layers"] + 1, -1).transpose(1, 0, 2)

    def latency(self, contender):
        """Milliseconds for each sentence, one call after the other, on a warm program."""
        options = ["--latency", self.words, "--warm-up", contender.warm_up]
        if not contender.ours:
            return self.peer(contender, self.text, *options)["milliseconds"]
        # `elmo sql` executes statements one by one and prints the rows of each at once. The time between two results is
        # that of one statement: parsing, planning, embedding and printing.
        warm_up, timed = latency_sentences(self.sentences, self.words, contender.warm_up)
        settings = "tokenizer => 'whitespace', sentences => 'off', state => 'zero'"
        table = self.write("warm_up.txt", warm_up)
        statements = [f"SELECT elmo_embed(text, {settings}) FROM '{table}'"]
        for words in timed:
            literal = " ".join(words).replace("'", "''")
            statements.append(f"SELECT elmo_embed('{literal}', {settings})")
        script = self.folder / "latency.sql"
        script.write_text(";\n".join(statements) + ";\n", encoding="utf-8")
        command = [self.elmo, "sql", "--model", self.model, "--threads", self.threads, "--format", "ndjson", "--quiet"]
        command += [*contender.program, "--file", script]
        with subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, cwd=self.folder, env=plain_environment()
        ) as process:
            times = [time.perf_counter() for _ in process.stdout]
        if process.returncode or len(times) != len(warm_up) + len(timed):
            raise Failed(f"elmo sql: exit code {process.returncode}, {len(times)} rows")
        times = times[len(warm_up) - 1 :]
        return [1000 * (after - before) for before, after in zip(times, times[1:])]


def make_model(size, folder):
    if not (folder / "options.json").exists():
        say(f"{size}: writing random weights")
        # A process of its own: memory that this process once had would count as peak memory of its children.
        subprocess.run([sys.executable, "-B", HERE / "random_model.py", size, folder], check=True)


# --------------------------------------------------------------------------- measurement


def agreement(runner, contenders):
    """Differences of the engines from AllenNLP, or without it from the first engine."""
    text = runner.write("checked.txt", [*spread(runner.sentences, CHECKED_SENTENCES, 1), UNUSUAL])
    n = CHECKED_SENTENCES + 1
    results, expected = {}, None
    for contender in contenders:
        if contender.engine in results:
            continue
        try:
            vectors = runner.vectors(contender, text, n, "zero")
        except Failed as failed:
            say(f"{contender.engine}: skipped: {failed}")
            results[contender.engine] = dict(skipped=str(failed))
            continue
        if expected is None:
            expected, reference = vectors, contender
        results[contender.engine] = difference(vectors, expected, contender.exact)
        say(
            f"{contender.engine}: largest difference from {reference.engine}: {numpy.abs(vectors - expected).max():.1e}"
        )
    # With `--state carry` elmo continues from the batch before, as AllenNLP always does.
    by_name = {c.name: c for c in contenders if "skipped" not in results[c.engine]}
    pair = [by_name.get(name) for name in ("allennlp", "elmo-f32")]
    if all(pair):
        expected, vectors = (runner.vectors(contender, text, CARRIED_BATCH, "carry") for contender in pair)
        name = f"elmo f32, --state carry, batches of {CARRIED_BATCH} on both sides"
        results[name] = difference(vectors, expected, True)
    return results


def difference(vectors, expected, exact):
    largest = numpy.abs(vectors - expected).max(axis=(1, 2))
    rms = numpy.sqrt(((vectors - expected) ** 2).mean(axis=(1, 2)) / (expected**2).mean(axis=(1, 2)))
    agrees = bool(largest.max() <= TOLERANCE) if exact else None
    return dict(largest=largest.tolist(), relative_rms=rms.tolist(), agrees=agrees)


def budget(runner, contender, seconds):
    """Sentences for a run of this contender that takes about so long."""
    words = sum(map(len, runner.sentences)) / len(runner.sentences)
    n = max(contender.batch, NEIGHBOURS)
    while True:
        report = runner.measure(contender, n)
        if report["cpu_seconds"] >= min(PILOT_SECONDS, seconds) or n >= len(runner.sentences):
            break
        n *= 4
    n = int(seconds * report["tokens"] / max(report["cpu_seconds"], 1e-3) / words)
    return min(len(runner.sentences), max(n, contender.batch, NEIGHBOURS))


def measure(runner, contenders, arguments, size):
    """Reports by contender of each round, and the reasons of contenders that failed. These have no reports."""
    failed, counts, rounds = {}, {}, []
    for contender in contenders:
        try:
            counts[contender.name] = budget(runner, contender, arguments.seconds)
        except Failed as reason:
            failed[contender.name] = str(reason)
    # A word cache finds more words in more text: contenders with one get the same number of sentences per precision.
    for precision in ("f32", "int8"):
        cached = [name for name in counts if name.startswith(("elmo", "torch")) and precision in name]
        counts |= dict.fromkeys(cached, min((counts[name] for name in cached), default=0))
    for k in range(arguments.rounds):
        rounds.append({})
        for contender in contenders if k % 2 == 0 else contenders[::-1]:
            if contender.name in failed:
                continue
            try:
                report = runner.measure(contender, counts[contender.name])
            except Failed as reason:
                failed[contender.name] = str(reason)
                continue
            rounds[-1][contender.name] = report
            found = f"{rate(report, 'cpu_seconds'):,.0f} words per CPU second, {report['cpu_seconds']:.0f} s"
            say(f"{size}, round {k + 1}: {contender.name}: {found}")
    for name, reason in failed.items():
        say(f"{size}: {name}: failed: {reason}")
    return [{name: report for name, report in reports.items() if name not in failed} for reports in rounds], failed


def rate(report, clock, whole=False):
    part = report["process"] if whole else report
    return part["tokens"] / part[clock]


def summary(rounds, contenders):
    """Rows of the table: a contender, and for `elmo` the whole command too."""
    rows = []
    for contender in contenders:
        reports = [reports[contender.name] for reports in rounds if contender.name in reports]
        for whole in (False, True) if contender.ours else (False,):
            if not reports:
                continue
            row = dict(name=contender.name, whole_command=whole)
            counted = reports[0]["process"] if whole else reports[0]
            row |= dict(sentences=counted["sentences"], tokens=counted["tokens"])
            row |= {key: max(report[key] for report in reports) for key in ("loaded_mb", "peak_mb")}
            for clock in ("cpu_seconds", "seconds"):
                row[f"tokens_per_{clock}"] = spread_of([rate(report, clock, whole) for report in reports])
            for other in REFERENCES:
                if all(other in reports for reports in rounds):
                    pairs = [(reports[contender.name], reports[other]) for reports in rounds]
                    ratios = [rate(a, "cpu_seconds", whole) / rate(b, "cpu_seconds") for a, b in pairs]
                    row[f"ratio_to_{other}"] = spread_of(ratios)
            rows.append(row)
    return rows


def spread_of(values):
    return dict(median=statistics.median(values), min=min(values), max=max(values))


def measure_latency(runner, contenders, size):
    results, done = {}, set()
    for contender in contenders:
        if contender.engine in done:
            continue
        done.add(contender.engine)
        try:
            times = sorted(runner.latency(contender))
        except Failed as failed:
            say(f"{contender.name}: no latency: {failed}")
            continue
        if len(times) < 2:
            say(f"{contender.name}: no latency: the text has no sentences of {runner.words} words")
            continue
        percentile = statistics.quantiles(times, n=100, method="inclusive")
        name = f"{contender.engine}, one SQL statement each" if contender.ours else contender.engine
        results[name] = dict(sentences=len(times), p50_ms=percentile[49], p99_ms=percentile[98])
        say(f"{size}: {contender.name}: {percentile[49]:.1f} ms for one sentence")
    return results


# --------------------------------------------------------------------------- report


def machine():
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split("\t: ", 1) for line in info.replace("\t\t: ", "\t: ").splitlines() if "\t: " in line)
    flags = fields.get("flags", "").split()
    return dict(
        cpu=fields.get("model name", platform.processor()),
        family_and_model=f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        flags=[flag for flag in CPU_FLAGS if flag in flags],
        cores=os.cpu_count(),
        load_average=round(os.getloadavg()[0], 1),
        python=platform.python_version(),
    )


def interval(values, digits=0):
    return f"{values['median']:,.{digits}f} ({values['min']:,.{digits}f} to {values['max']:,.{digits}f})"


def table(head, rows):
    print(*(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]), "", sep="\n")


def print_head(results):
    host, libraries = results["machine"], results["versions"]
    print(f"# ELMo programs side by side, {results['date']}\n")
    print(f"* CPU: {host['cpu']} (family/model {host['family_and_model']}), {host['cores']} cores")
    print(f"* instruction sets: {', '.join(host['flags'])}")
    print(f"* load average at the start: {host['load_average']}; threads of each program: {results['threads']}")
    print("* " + ", ".join(f"{name} {version}" for name, version in sorted(libraries.items())))
    print(f"* text: {results['sentences']:,} sentences, {results['tokens']:,} words; rounds: {results['rounds']}")
    print(f"* command: `{results['command']}`\n")


def print_size(size, result):
    print(f"## {size}\n")
    head = ["program", "sentences", "words", "words per CPU second", "words per second"]
    head += ["× AllenNLP", "× AllenNLP sorted", "MB loaded", "MB peak"]
    rows = []
    for row in result["summary"]:
        contender = next(c for c in CONTENDERS if c.name == row["name"])
        parts = [contender.engine, contender.description]
        if contender.ours:
            parts.append("whole command" if row["whole_command"] else "without start-up")
        rates = [interval(row[f"tokens_per_{clock}"]) for clock in ("cpu_seconds", "seconds")]
        ratios = [interval(row[key], 2) if key in row else "" for key in (f"ratio_to_{other}" for other in REFERENCES)]
        memory = [f"{row[key]:,.0f}" for key in ("loaded_mb", "peak_mb")]
        rows.append([", ".join(parts), f"{row['sentences']:,}", f"{row['tokens']:,}", *rates, *ratios, *memory])
    table(head, rows)
    rows, skipped = [], [f"* {name}: failed: {reason}" for name, reason in result["failed"].items()]
    for name, entry in result["agreement"].items():
        if "skipped" in entry:
            skipped.append(f"* {name}: skipped: {entry['skipped']}")
            continue
        verdict = {True: "yes", False: "**no**", None: "not expected"}[entry["agrees"]]
        numbers = (", ".join(f"{x:.1e}" for x in entry[key]) for key in ("largest", "relative_rms"))
        rows.append([name, *numbers, verdict])
    if skipped:
        print(*skipped, "", sep="\n")
    head = ["program", "largest difference, by layer", "relative rms, by layer", f"the same within {TOLERANCE:.0e}"]
    table(head, rows)
    rows = [
        [name, str(entry["sentences"]), f"{entry['p50_ms']:.2f}", f"{entry['p99_ms']:.2f}"]
        for name, entry in result["latency"].items()
    ]
    if rows:
        table([f"one sentence of {result['latency_words']} words", "sentences", "p50, ms", "p99, ms"], rows)


def say(message):
    print(message, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------- command line


def listed(allowed):
    def parse(text):
        words = text.split(",")
        unknown = [word for word in words if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(allowed)}")
        return words

    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elmo", type=Path, required=True, help="the program")
    parser.add_argument("--text", type=Path, required=True, help="one sentence per line, words separated by spaces")
    parser.add_argument("--sizes", type=listed(list(SIZES)), default=["small", "original"], help=",".join(SIZES))
    parser.add_argument("--peers", type=listed(NAMES), default=NAMES, help=",".join(NAMES))
    parser.add_argument("--sentences", type=int, default=10_000, help="of the text, in evenly spaced blocks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="a run gets sentences for about this long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--latency-words", type=int, default=13, help="length of the sentences embedded one by one; 0: none"
    )
    parser.add_argument("--cache", type=Path, default=Path("target/peers"), help="folder for the random models")
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    arguments = parser.parse_args()
    for name in ("elmo", "text", "cache"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    if not arguments.elmo.is_file():
        parser.error(f"no such program: {arguments.elmo}")
    return arguments


def main():
    arguments = parse_arguments()
    sentences = read_sentences(arguments.text)
    short = [words for words in sentences if len(words) <= LONGEST]
    if len(short) < len(sentences):
        say(f"left out {len(sentences) - len(short)} sentences of more than {LONGEST} words")
    sentences = spread(short, arguments.sentences, NEIGHBOURS)
    contenders = [c for c in CONTENDERS if c.name in arguments.peers]
    results = dict(
        date=datetime.date.today().isoformat(),
        command=shlex.join(["compare.py", *sys.argv[1:]]),
        machine=machine(),
        versions=dict(elmo=run([str(arguments.elmo), "--version"], 1, None)[0].split()[-1]),
        sentences=len(sentences),
        tokens=sum(map(len, sentences)),
        threads=arguments.threads,
        rounds=arguments.rounds,
        sizes={},
    )
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(prefix="elmo-peers-") as folder:
            runner = Runner(arguments, size, sentences, Path(folder))
            agrees = agreement(runner, contenders)
            found = [c for c in contenders if "skipped" not in agrees[c.engine]]
            rounds, failed = measure(runner, found, arguments, size)
            times = measure_latency(runner, found, size) if arguments.latency_words else {}
        results["versions"] |= runner.versions
        results["sizes"][size] = dict(
            agreement=agrees,
            failed=failed,
            summary=summary(rounds, found),
            latency=times,
            latency_words=arguments.latency_words,
            rounds=rounds,
        )
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print_head(results)
    for size, result in results["sizes"].items():
        print_size(size, result)
    entries = [entry for result in results["sizes"].values() for entry in result["agreement"].values()]
    sys.exit(any(entry.get("agrees") is False for entry in entries))


if __name__ == "__main__":
    main()

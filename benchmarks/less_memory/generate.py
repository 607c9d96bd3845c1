"""Time and peak memory of `shardwise generate` on one process and sharded, beside stock transformers in one process.

    python benchmarks generate [--ranks 2] [--layers 12] [--hidden 768] [--prompts 16] [--new-tokens 32] [--rounds 3]

A Llama of random fp32 weights answers prompts of different lengths, greedily, eight at a time. Sides take turns, each
in fresh processes that load the model from disk: stock transformers (`from_pretrained`, `model.generate`, the same
padded batches) with one thread and with as many as there are ranks, and the command with `--ranks 1` and `--ranks N`,
one thread each. Answers must be equal. The resident set is the kernel's VmHWM of the process that had most; the same of
a model of a few thousand parameters is subtracted, which leaves what the model takes: the weights (half of them on two
ranks), the units in flight, the cache of keys and values, logits and activations.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from benchmarks.common import facts, report
from benchmarks.common.process_tree import Ran, watched

BATCH = 8
VOCABULARY = 8192
TIMEOUT_S = 1800.0
OURS = "import os; os.dup2(1, 2); from shardwise.cli.main import main; main()"
"""The command with both of its streams on standard output."""


def save_model(directory: Path, layers: int, hidden: int) -> int:
    """Write a Llama of random weights with a byte tokenizer. Returns the bytes of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.train.data.tokenizer import ByteTokenizer

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        vocab_size=VOCABULARY if hidden > 64 else 320,
        pad_token_id=256,
        bos_token_id=256,
        eos_token_id=256,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    ByteTokenizer().save(directory)
    return sum(path.stat().st_size for path in directory.glob("model*.safetensors"))


def stock(model: str, prompts: str, out: str, new_tokens: int, threads: int) -> None:
    """Answer with transformers alone, in this process, and print the seconds of generation."""
    import time

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    texts, lines = Path(prompts).read_text().splitlines(), []
    started_s = time.monotonic()
    for start in range(0, len(texts), BATCH):
        inputs = tokenizer(texts[start : start + BATCH], return_tensors="pt", padding=True)
        ids = loaded.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        lines += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"in {time.monotonic() - started_s:.3f} s,")
    Path(out).write_text("".join(f"{json.dumps({'completion': line})}\n" for line in lines))


def main() -> None:
    if sys.argv[1:2] == ["stock"]:
        model, prompts, out, new_tokens, threads = sys.argv[2:]
        stock(model, prompts, out, int(new_tokens), int(threads))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("ranks", 2), ("layers", 12), ("hidden", 768), ("prompts", 16), ("new-tokens", 32), ("rounds", 3))
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardwise-generate-") as name:
        result = measured(Path(name), options)
    text = markdown(result, options)
    print(text)
    if options.out:
        report.write(options.out, {**result, "options": vars(options), "facts": facts.machine()}, text)
    if not result["equal"]:
        raise SystemExit("answers differ")


def measured(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all sides, round after round."""
    weights = save_model(directory / "model", options.layers, options.hidden)
    save_model(directory / "tiny", 1, 64)
    words = [f"{'one two three four five six seven ' * (1 + 5 * n % 7)}prompt {n}" for n in range(options.prompts)]
    (directory / "prompts.txt").write_text("\n".join(words))
    sides = {
        "transformers, 1 thread": ("stock", 1),
        f"transformers, {options.ranks} threads": ("stock", options.ranks),
        "shardwise generate, 1 process, 1 thread": ("ours", 1),
        f"shardwise generate, {options.ranks} ranks, 1 thread each": ("ours", options.ranks),
    }
    rows: dict[str, dict[str, Any]] = {}
    answers: dict[str, set[str]] = {}
    for side, (kind, number) in sides.items():
        small = run(directory, "tiny", kind, number, options)[0]
        rows[side] = {"ranks": number if kind == "ours" else 1, "idle_bytes": small.largest_bytes, "rounds": []}
        answers[side] = set()
    for _ in range(options.rounds):
        for side, (kind, number) in sides.items():
            ran, generate_s, said = run(directory, "model", kind, number, options)
            rows[side]["rounds"].append(
                {"generate_s": generate_s, "wall_s": ran.wall_s, "peak_bytes": ran.largest_bytes}
            )
            answers[side].add(said)
            print(f"{side}: {generate_s:.1f} s, {ran.wall_s:.1f} s in all", file=sys.stderr, flush=True)
    ours = set.union(*(answers[side] for side, (kind, _) in sides.items() if kind == "ours"))
    everything = set.union(*answers.values())
    return {"weights_bytes": weights, "sides": rows, "equal": len(ours) == 1, "equal_to_stock": len(everything) == 1}


def run(directory: Path, model: str, kind: str, number: int, options: argparse.Namespace) -> tuple[Ran, float, str]:
    """Run one side. Returns how it went, the seconds of generation alone, and all answers as text."""
    out, prompts, new = directory / "answers.jsonl", directory / "prompts.txt", options.new_tokens
    out.unlink(missing_ok=True)
    if kind == "stock":
        words = [str(ROOT / "benchmarks"), "generate", "stock", directory / model, prompts, out, new, number]
    else:
        words = ["-c", OURS, "generate", directory / model, "--prompts", prompts, "--out", out, "--batch-size", BATCH]
        words += ["--max-new-tokens", new, "--no-do-sample", "--ranks", number]
    ran = watched([str(word) for word in words], TIMEOUT_S)
    generate_s = float(ran.output.rpartition(" in ")[2].split()[0]) if kind == "ours" else 0.0
    if kind == "stock":
        generate_s = float(next(line for line in ran.output.splitlines() if line.startswith("in ")).split()[1])
    said = "\n".join(str(json.loads(line)["completion"]) for line in out.read_text().splitlines())
    return ran, generate_s, said


def markdown(result: dict[str, Any], options: argparse.Namespace) -> str:
    tokens, weights = options.prompts * options.new_tokens, result["weights_bytes"]
    cells = []
    for side, row in result["sides"].items():
        middle = {key: median(one[key] for one in row["rounds"]) for key in row["rounds"][0]}
        model = middle["peak_bytes"] - row["idle_bytes"]
        cells.append(
            [
                side,
                f"{middle['wall_s']:.1f}",
                f"{middle['generate_s']:.1f}",
                f"{tokens / middle['generate_s']:.1f}",
                f"{middle['peak_bytes'] / 2**20:,.0f}",
                f"{model / 2**20:,.0f}",
                f"{model / weights:.2f}",
            ]
        )
    header = ["side", "s in all", "s generating", "tokens/s", "peak MiB of a process", "of them for the model"]
    equal = "equal to the byte on one process and on all ranks" if result["equal"] else "DIFFERENT between ranks"
    beside = "equal to" if result["equal_to_stock"] else "not all equal to"
    text = " ".join((__doc__ or "").split("\n\n")[2].split())
    return (
        f"# Generation, sharded\n\n{weights / 2**20:,.0f} MiB of weights, {options.prompts} prompts, "
        f"{options.new_tokens} new tokens each, medians of {options.rounds} rounds. {text}\n\n"
        f"{report.table([*header, 'over the weights'], cells)}\n\n"
        f"Answers: {equal}, and {beside} those of transformers.\n\n{report.facts_line(facts.machine())}"
    )

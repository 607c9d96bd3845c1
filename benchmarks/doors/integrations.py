"""Train the same model through each library, with its stock strategy (DDP on CPUs) and with shardwise's, in turn.

    python benchmarks integrations                        # some ten minutes; needs make test-integrations' extras
    python benchmarks integrations --only hf fabric --rounds 1
    python benchmarks integrations --out integrations     # and write results/DATE-integrations.{json,md}

Two ranks, 20 steps of a Llama of 12 M parameters in fp32 with AdamW and clipping. Losses of the two are compared; they
are to be equal to 1e-5, relative (MISSED is printed where they are not). Step times are medians, beside them a rank's
processor time, which a busy machine changes less; memory is the sum of all processes' largest resident sets, seen from
outside.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, Dataset

from benchmarks import on_ranks, program
from benchmarks.common import facts, report
from benchmarks.common.process_tree import watched

STEPS, BATCH, LENGTH, VOCABULARY = 20, 2, 128, 2048
MOST_OFF = 1e-5
"""Of a loss, relative."""
CLIP = 1.0


def model_of() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=LENGTH,
    )
    return transformers.LlamaForCausalLM(config)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        first = torch.randint(VOCABULARY, (STEPS * BATCH * 2, 1), generator=generator)
        self.rows = (first + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Clock:
    """Times and losses of steps, as a user's script sees them."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends_s: list[float] = []
        self.ends_cpu_s: list[float] = []
        """Processor time of this rank, which what else runs on the machine makes little longer."""

    def step(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))
        self.ends_s.append(time.perf_counter())
        self.ends_cpu_s.append(time.process_time())

    def report(self) -> dict[str, Any]:
        return {"losses": self.losses, "step_s": _median_step(self.ends_s), "cpu_s": _median_step(self.ends_cpu_s)}


def _median_step(ends_s: list[float]) -> float:
    times = [end - start for start, end in itertools.pairwise(ends_s)]
    return median(times[2:])


# One script for each library ------------------------------------------------------------------------------------------


def hf(is_ours: bool, clock: Clock, directory: Path) -> None:
    kind: Any = transformers.Trainer
    if is_ours:
        from shardwise.integrations.hf import Trainer as kind  # noqa: N813

    class Timed(kind):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            clock.step(loss)
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        max_grad_norm=CLIP,
        save_strategy="no",
        logging_strategy="no",
    )
    Timed(model=model_of(), args=arguments, train_dataset=Rows()).train()


def accelerate(is_ours: bool, clock: Clock, directory: Path) -> None:
    from accelerate import Accelerator as kind  # noqa: N813

    if is_ours:
        from shardwise.integrations.accelerate import Accelerator as kind  # noqa: N813
    accelerator: Any = kind(cpu=True)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=BATCH))
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss.detach())


def lightning(is_ours: bool, clock: Clock, directory: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            clock.step(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    if is_ours:
        import shardwise.integrations.lightning  # noqa: F401
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="shardwise" if is_ours else "ddp",
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Module(), DataLoader(Rows(), batch_size=BATCH))


def fabric(is_ours: bool, clock: Clock, directory: Path) -> None:
    from lightning import Fabric

    if is_ours:
        import shardwise.integrations.fabric  # noqa: F401
    made = Fabric(accelerator="cpu", devices=2, strategy="shardwise" if is_ours else "ddp")
    made.launch()
    model: Any = model_of()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = made.setup(model, optimizer)
    for batch in made.setup_dataloaders(DataLoader(Rows(), batch_size=BATCH)):
        loss = model(**batch).loss
        made.backward(loss)
        made.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss.detach())


SCRIPTS: dict[str, Callable[[bool, Clock, Path], None]] = {
    "hf": hf,
    "accelerate": accelerate,
    "lightning": lightning,
    "fabric": fabric,
}
SIDES = ("stock", "shardwise")


def work(name: str, side: str) -> None:
    """On each rank."""
    dist.init_process_group("gloo")
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        SCRIPTS[name](side == "shardwise", clock, Path(directory))
    if dist.get_rank() == 0:
        print(json.dumps(clock.report()))
    dist.destroy_process_group()


# Both in turn ---------------------------------------------------------------------------------------------------------


def run_once(name: str, side: str) -> dict[str, Any]:
    ran = watched(on_ranks(2, *program("integrations"), "--work", name, side), timeout_s=600)
    found: dict[str, Any] = json.loads(ran.output.strip().splitlines()[-1])
    return {**found, "peak_bytes": ran.peak_bytes}


def row_of(name: str, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES[:: 1 if number % 2 == 0 else -1]:
            runs[side].append(run_once(name, side))
    ratios = {
        key: [ours[key] / stock[key] for ours, stock in zip(runs["shardwise"], runs["stock"], strict=True)]
        for key in ("step_s", "cpu_s", "peak_bytes")
    }
    pairs = zip(runs["shardwise"][0]["losses"], runs["stock"][0]["losses"], strict=True)
    return {
        "name": name,
        "steps": len(runs["stock"][0]["losses"]),
        "loss_off": max(abs(ours / stock - 1) for ours, stock in pairs),
        **{f"{side}_{key}": median(run[key] for run in runs[side]) for side in SIDES for key in ratios},
        **{f"ratio_{key}": median(values) for key, values in ratios.items()},
        "ratios": ratios,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    header = [
        "through",
        "largest difference of losses",
        "",
        "step: stock",
        "ours",
        "ratio",
        "processor time: ratio",
        "peak RSS: stock",
        "ours",
        "ratio",
    ]
    cells = [
        [
            row["name"],
            f"{row['loss_off']:.1e} in {row['steps']} steps",
            "met" if row["loss_off"] <= MOST_OFF else "MISSED",
            *(f"{row[f'{side}_step_s'] * 1e3:.0f} ms" for side in SIDES),
            f"{row['ratio_step_s']:.2f}",
            f"{row['ratio_cpu_s']:.2f}",
            *(f"{row[f'{side}_peak_bytes'] / 2**20:.0f} MiB" for side in SIDES),
            f"{row['ratio_peak_bytes']:.2f}",
        ]
        for row in rows
    ]
    text = " ".join((__doc__ or "").split("\n\n")[2].split())
    line = report.facts_line(facts.machine())
    return f"# Integrations beside their stock runs\n\n{text}\n\n{report.table(header, cells)}\n\n{line}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    rows = [row_of(name, options.rounds) for name in options.only]
    text = markdown(rows)
    print(text)
    if options.out:
        report.write(options.out, {"rows": rows, "facts": facts.machine()}, text)

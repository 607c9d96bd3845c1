"""lightning.pytorch and Fabric, with their DDP strategies and with ours."""

from __future__ import annotations

import fractions
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError, UsageError
from shardwise.integrations import fabric as our_fabric
from shardwise.integrations import lightning as our_lightning
from shardwise.integrations import lightning_common
from tests.engine.rig import on_ranks
from tests.integrations.models import Tokens, llama

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.pytorch.LightningModule):
    """The usual kind: everything is in `self.model`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.model = llama(seed)
        self.register_buffer("steps", torch.zeros(()))
        self.losses: list[float] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self(batch)
        self.steps += 1
        self.losses.append(loss.item())
        self.log("train", loss, sync_dist=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("loss", self(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)]


class Pieces(Module):
    """Parameters in several places: the LightningModule itself is sharded, and its steps are its forwards."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Linear(1, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss * self.scale + self.shift(self.scale.view(1, 1)).sum()  # type: ignore[no-any-return]


class Built(Module):
    """Built on the meta device, when Lightning asks."""

    def __init__(self) -> None:
        lightning.pytorch.LightningModule.__init__(self)
        self.losses = []
        self.register_buffer("steps", torch.zeros(()))

    def configure_model(self) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = llama()


class ByHand(Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self(batch)
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class BothByHand(ByHand, Pieces):
    pass


def trainer_of(strategy: Any, directory: Path, **options: Any) -> Any:
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 6,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
    }
    return lightning.pytorch.Trainer(strategy=strategy, **{**usual, **options})


def batches(size: int = 64) -> DataLoader[Any]:
    return DataLoader(Tokens(size), batch_size=2)


def losses(module: Any, strategy: Any, directory: Path, **options: Any) -> list[float]:
    trainer_of(strategy, directory, **options).fit(module, batches(), batches(8))
    found: list[float] = module.losses
    return found


@pytest.mark.parametrize("kind", [Module, Pieces])
@on_ranks(2, timeout_s=120)
def test_losses_are_those_of_ddp(kind: Any, tmp_path: Path) -> None:
    stock = losses(kind(), "ddp", tmp_path)
    module = kind()
    assert losses(module, "shardwise", tmp_path) == pytest.approx(stock, rel=1e-5)
    assert len(stock) == 12
    assert isinstance(next(module.parameters()), sw.ShardedParameter)


@on_ranks(2, timeout_s=120)
def test_a_model_built_on_meta_and_strategies_options(tmp_path: Path) -> None:
    stock = losses(Module(), "ddp", tmp_path)
    strategy = our_lightning.ShardwiseStrategy(strategy="shard_grad_op")
    assert losses(Built(), strategy, tmp_path) == pytest.approx(stock, rel=1e-5)


@pytest.mark.parametrize("strategy", [our_lightning.ShardwiseStrategy, our_fabric.ShardwiseStrategy])
def test_an_option_is_shard_s_or_lightning_s(strategy: Any) -> None:
    strategy(align=16, timeout=None)
    with pytest.raises(ConfigError, match=r"'stategy' is not one of strategy, .*; did you mean strategy"):
        strategy(stategy="no_shard")


@on_ranks(2, timeout_s=120)
def test_bf16(tmp_path: Path) -> None:
    stock = losses(Module(), "ddp", tmp_path, precision="bf16-mixed")
    module = Module()
    assert losses(module, "shardwise", tmp_path, precision="bf16-mixed") == pytest.approx(stock, rel=2e-2)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


@on_ranks(2, timeout_s=120)
def test_manual_optimization(tmp_path: Path) -> None:
    plain = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    stock = losses(ByHand(), "ddp", tmp_path, **plain)
    assert losses(ByHand(), "shardwise", tmp_path, **plain) == pytest.approx(stock, rel=1e-5)
    with pytest.raises(UsageError, match="manual optimization runs backward inside training_step"):
        losses(BothByHand(), "shardwise", tmp_path, **plain)


def save_and_resume(strategy: Any, resumed_by: Any, directory: Path) -> tuple[Any, Any]:
    """A trainer that saved at every third step, and the module that went on from the third."""
    callback = ModelCheckpoint(dirpath=directory, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    saving = trainer_of(strategy, directory, enable_checkpointing=True, callbacks=[callback])
    saving.fit(Module(), batches())
    again = Module(seed=5)
    trainer_of(resumed_by, directory).fit(again, batches(), ckpt_path=directory / "step=3.ckpt")
    return saving, again


@on_ranks(2, timeout_s=120)
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    _, stock = save_and_resume("ddp", "ddp", tmp_path / "ddp")
    assert len(stock.losses) == 6
    saving, again = save_and_resume("shardwise", our_lightning.ShardwiseStrategy(strategy="no_shard"), tmp_path / "own")
    assert again.losses == pytest.approx(stock.losses, rel=1e-5)
    assert again.steps == stock.steps == 12
    path = tmp_path / "own" / "step=3.ckpt"
    sw.checkpoint.verify(path)
    evaluating = trainer_of("shardwise", tmp_path)
    evaluated = evaluating.validate(Module(seed=5), batches(8), ckpt_path=tmp_path / "own" / "step=6.ckpt")
    assert evaluated == saving.validate(saving.lightning_module, batches(8))
    saving.strategy.remove_checkpoint(path)
    dist.barrier()
    assert not path.exists()
    module = Module(seed=5)  # from the file that DDP wrote
    trainer_of("shardwise", tmp_path).fit(module, batches(), ckpt_path=tmp_path / "ddp" / "step=3.ckpt")
    assert module.losses == pytest.approx(stock.losses, rel=1e-5)


class Normed(lightning.pytorch.LightningModule):
    """Sees what its batch norm is when training begins."""

    def __init__(self, sharded: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.seen = ""
        if sharded:
            sw.shard(self.model)

    def on_train_start(self) -> None:
        self.seen = type(self.model[1]).__name__
        self.eval()  # torch synchronizes on accelerators alone

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.model(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_checkpoint_runs_no_code_unless_it_is_asked_to(tmp_path: Path) -> None:
    torch.save({"callbacks": fractions.Fraction(1, 2)}, tmp_path / "lightning.pt")
    with pytest.raises(CheckpointError, match=r"fractions\.Fraction, which .* trust the file, .*weights_only=False"):
        lightning_common.load_rest(tmp_path, None)
    assert lightning_common.load_rest(tmp_path, False) == {"callbacks": fractions.Fraction(1, 2)}


@on_ranks(2, timeout_s=120)
def test_batch_norms_are_synchronized_before_sharding(tmp_path: Path) -> None:
    module = Normed()
    for _ in range(2):  # the second time it is sharded already
        trainer_of("shardwise", tmp_path, sync_batchnorm=True).fit(module, batches(8))
        assert module.seen == "SyncBatchNorm"
        assert isinstance(module.model[1].weight, sw.ShardedParameter)
    trainer_of("shardwise", tmp_path).fit(plain := Normed(), batches(8))
    assert plain.seen == "BatchNorm1d"
    with pytest.raises(UsageError, match=r"'model.1' was sharded as a BatchNorm1d: call .*convert_sync_batchnorm"):
        trainer_of("shardwise", tmp_path, sync_batchnorm=True).fit(Normed(sharded=True), batches(8))


@on_ranks(2, timeout_s=120)
def test_another_module_is_evaluated_from_a_checkpoint_after_a_fit(tmp_path: Path) -> None:
    for strategy in ("shardwise", "ddp"):  # a directory, and a file
        path = tmp_path / f"{strategy}.ckpt"
        saving = trainer_of(strategy, tmp_path, max_steps=2)
        saving.fit(Module(), batches())
        saving.save_checkpoint(path)
        expected = saving.validate(saving.lightning_module, batches(8), verbose=False)
        trainer = trainer_of("shardwise", tmp_path, max_steps=1)
        trainer.fit(Module(seed=3), batches())
        for evaluate in (trainer.validate, trainer.validate):
            (found,) = evaluate(Module(seed=5), batches(8), ckpt_path=path, verbose=False)
            assert found == pytest.approx(expected[0], rel=1e-5)
    plain = llama(seed=5)  # as docs/integrations.md has it
    plain.load_state_dict(load_file(tmp_path / "shardwise.ckpt" / "model.safetensors"))


class Elsewhere(lightning.pytorch.plugins.io.TorchCheckpointIO):
    pass


@on_ranks(2)
def test_what_would_be_passed_over_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Elsewhere would be ignored: ranks write a sharded model's checkpoint"):
        trainer_of("shardwise", tmp_path, plugins=[Elsewhere()]).fit(Module(), batches())
    fabric = fabric_of("shardwise", plugins=[Elsewhere()])
    with pytest.raises(UsageError, match="Elsewhere would be ignored: ranks write a sharded model's checkpoint"):
        fabric.save(tmp_path / "model", {"model": fabric.setup(nn.Linear(4, 4))})
    averages = [StochasticWeightAveraging(swa_lrs=1e-3), EMAWeightAveraging(decay=0.5)]
    for callback in averages:
        with pytest.raises(UsageError, match=r"WeightAveraging averages a copy .*AveragedModel\(module.model\)"):
            trainer_of("shardwise", tmp_path, callbacks=[callback]).fit(Module(), batches())


class Averaging(lightning.pytorch.Callback):
    """As the message above has it."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = AveragedModel(module.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.average.update_parameters(module.model)


@on_ranks(2, timeout_s=120)
def test_an_average_of_ones_own(tmp_path: Path) -> None:
    found = []
    for strategy in ("ddp", "shardwise"):
        trainer_of(strategy, tmp_path, callbacks=[callback := Averaging()]).fit(Module(), batches())
        with torch.no_grad():
            found.append(callback.average(**next(iter(batches()))).loss.item())
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@on_ranks(2)
def test_a_precision_that_cannot_be_had_is_told(tmp_path: Path) -> None:
    plugin = lightning.pytorch.plugins.Precision()
    plugin.precision = "transformer-engine"  # type: ignore[assignment]
    with pytest.raises(UsageError, match="precision='transformer-engine': must be one of 16-mixed"):
        trainer_of("shardwise", tmp_path, plugins=[plugin]).fit(Module(), batches())


# Fabric ---------------------------------------------------------------------------------------------------------------


def script(strategy: Any, path: Path, load: bool = False) -> list[float]:
    """A user's loop: three steps, a checkpoint, three steps; or the last three from the checkpoint."""
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = llama(5 if load else 0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    rows = list(fabric.setup_dataloaders(batches()))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if load:
        assert fabric.load(path, state) == {}
        assert state["step"] == 3
    found = []
    for step in range(int(state["step"]), 6):
        for index in (2 * step, 2 * step + 1):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = model(**rows[index]).loss / 2
                fabric.backward(loss)
                found.append(loss.item())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and not load:
            state["step"] = 3
            fabric.save(path, state)
    return found


@on_ranks(2, timeout_s=120)
def test_fabric(tmp_path: Path) -> None:
    stock = script("ddp", tmp_path / "ddp.ckpt")
    found = script("shardwise", tmp_path / "c")
    assert found == pytest.approx(stock, rel=1e-5)
    sw.checkpoint.verify(tmp_path / "c")
    other = our_fabric.ShardwiseStrategy(strategy="no_shard")
    assert script(other, tmp_path / "c", load=True) == found[6:]
    assert script("shardwise", tmp_path / "ddp.ckpt", load=True) == pytest.approx(stock[6:], rel=1e-5)


def fabric_of(strategy: str, **options: Any) -> Any:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    return fabric


@on_ranks(2, timeout_s=120)
def test_fabric_loads_all_that_is_asked_for_or_nothing(tmp_path: Path) -> None:
    fabric = fabric_of("shardwise")
    model, optimizer = fabric.setup(linear := nn.Linear(4, 4), torch.optim.AdamW(linear.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    fabric.save(tmp_path / "weights", {"model": model})
    fabric.save(tmp_path / "all", {"model": model, "optimizer": optimizer, "step": 7})
    with torch.no_grad():
        model.weight.zero_()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    for path, asked, missing in (("weights", state, "optimizer"), ("all", {**state, "epoch": 0}, "epoch")):
        with pytest.raises(KeyError, match=f"contains a key '{missing}' that does not exist in the loaded checkpoint"):
            fabric.load(tmp_path / path, asked)
        assert not model.weight.full_tensor().any(), "written before it was known that something is missing"
    assert fabric.load(tmp_path / "weights", state, strict=False) == {}
    assert model.weight.full_tensor().any()
    assert state["step"] == 0
    assert fabric.load(tmp_path / "all", {"model": model}) == {"step": 7}


class Encoder(Pieces):
    def encode(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(ids) * self.scale  # type: ignore[no-any-return]


@on_ranks(2, timeout_s=120)
def test_steps_and_marked_methods_of_a_module_in_fabric() -> None:
    found = []
    for strategy in ("ddp", "shardwise"):
        fabric = fabric_of(strategy)
        module = Encoder()
        module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        module, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        for index, batch in enumerate(fabric.setup_dataloaders(batches(16))):
            fabric.backward(module.training_step(batch, index))
            optimizer.step()
            optimizer.zero_grad()
        module.mark_forward_method("encode")
        module.eval()
        with torch.no_grad():
            found.append((module.losses, module.encode(batch["input_ids"]).tolist()))
    assert len(found[0][0]) == 4
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    torch.testing.assert_close(torch.tensor(found[1][1]), torch.tensor(found[0][1]), rtol=1e-4, atol=1e-5)


@on_ranks(2, timeout_s=120)
def test_a_model_that_generates_in_fabric() -> None:
    ids = torch.tensor([[1, 2, 3]])
    model = fabric_of("shardwise").setup(llama().eval())
    model.mark_forward_method("generate")
    options = {"max_new_tokens": 2 + 2 * dist.get_rank(), "do_sample": False}
    assert torch.equal(model.generate(ids, **options), llama().eval().generate(ids, **options))


# The loss's scale -----------------------------------------------------------------------------------------------------


@on_ranks(2, timeout_s=120)
def test_a_scaler_keeps_its_options(tmp_path: Path) -> None:
    asked = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
    plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", asked)
    trainer = trainer_of("shardwise", tmp_path, plugins=[plugin], gradient_clip_val=None, max_steps=1)
    trainer.fit(Module(), batches(8))
    kept = trainer.strategy.precision_plugin.scaler
    assert kept.state_dict() == {**asked.state_dict(), "_growth_tracker": 1}
    assert isinstance(kept, sw.GradScaler)
    of_fabric = lightning.fabric.plugins.MixedPrecision("16-mixed", "cpu", asked)
    fabric = fabric_of("shardwise", plugins=[of_fabric])
    for turn in range(2):
        model, optimizer = fabric.setup(linear := nn.Linear(4, 4), torch.optim.SGD(linear.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        assert fabric.strategy.precision.scaler.state_dict()["_growth_tracker"] == turn + 1, "replaced"
    assert fabric.strategy.precision.scaler.get_growth_factor() == 3.0

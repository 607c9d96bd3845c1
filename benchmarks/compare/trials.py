"""What is tried on each rank. A trial returns whether the engine did it, and what was seen; an error is a no.

Faults are done in the middle of training (`fault`, `save`), where `compare.py` watches from outside how ranks end.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.gpt import GPT, Block, batch
from benchmarks.compare.peers import LEARNING_RATE, PEERS, TINY, DeepSpeed, Optimizer, Peer, adamw

Seen = tuple[bool, str]
STEPS = 5
CLOSE = 1e-5


def data(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    return batch(TINY, 1, dist.get_rank() if rank is None else rank, step)


def unsharded(optimizer: Optimizer = adamw) -> dict[str, Tensor]:
    """Weights after the same steps without an engine: the mean of both ranks' gradients, taken one after the other."""
    model = GPT(TINY)
    update = optimizer(model.parameters())
    for step in range(STEPS):
        for rank in range(dist.get_world_size()):
            model(*data(step, rank)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
        update.step()
        update.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def beside(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Seen:
    equal = sum(torch.equal(found[name], tensor) for name, tensor in expected.items())
    off = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    furthest = "" if equal == len(expected) else f", at most {off:.1e} off"
    return off < CLOSE, f"{equal} of {len(expected)} tensors equal to the bit after {STEPS} steps{furthest}"


def trained(peer: Peer) -> dict[str, Tensor]:
    for step in range(STEPS):
        peer.step(*data(step))
    return peer.weights()


# Each engine ----------------------------------------------------------------------------------------------------------


def weights(name: str, directory: Path) -> Seen:
    """Weights after five steps of AdamW in fp32, beside those of an unsharded model."""
    return beside(trained(PEERS[name](GPT(TINY))), unsharded())


def cut(name: str, directory: Path) -> Seen:
    """What each rank holds of parameters whose sizes two ranks do not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1, bias=False))
    shapes = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    PEERS[name](model)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {key: tensor.ds_tensor.numel() for key, tensor in model.named_parameters()})
    each = (f"{shapes[key]}: {' + '.join(str(rank[key]) for rank in held)} numbers" for key in shapes)
    return True, "each parameter apart, flat, padded to equal parts: " + "; ".join(each)


OPTIMIZERS = ("SGD", "RMSprop", "NAdam", "RAdam", "Adagrad", "Adafactor")


def optimizers(name: str, directory: Path) -> Seen:
    """Other optimizers of torch's than AdamW, beside the unsharded model."""
    words = [f"{kind}: {_optimizer(name, kind)}" for kind in OPTIMIZERS]
    return any("off" in word or "equal" in word for word in words), "; ".join(words)


def _optimizer(name: str, kind: str) -> str:
    def maker(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, lr=LEARNING_RATE)
        return made

    try:
        right, said = beside(trained(PEERS[name](GPT(TINY), maker)), unsharded(maker))
    except Exception as error:
        return one_line(error)
    return said.replace(f" after {STEPS} steps", "") if right else f"other weights ({said})"


def in_backward(name: str, directory: Path) -> Seen:
    """A step for each parameter in backward, from torch's hook or torch's function for it."""
    peer = PEERS[name](GPT(TINY), lambda parameters: torch.optim.SGD(list(parameters), lr=0.0))
    if name == "fsdp1":
        from torch.distributed.optim import _apply_optimizer_in_backward

        options = {"lr": LEARNING_RATE, "foreach": False}
        _apply_optimizer_in_backward(torch.optim.AdamW, peer.model.parameters(), options)
    else:
        module = peer.model.module if name == "deepspeed" else peer.model
        for parameter in module.parameters():
            _step_when_ready(parameter)
    left = 0
    for step in range(STEPS):
        peer.backward(peer.model(*data(step)))
        left += sum(parameter.grad is not None for parameter in peer.model.parameters())
    right, said = beside(peer.weights(), unsharded())
    return right, f"{said}; {left} gradients are left after backward"


def _step_when_ready(parameter: nn.Parameter) -> None:
    optimizer = adamw([parameter])

    def step(ready: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


def few_bits(name: str, directory: Path) -> Seen:
    """A frozen weight of 4 bits, two in a byte, which the model itself decodes; then the engine's own of 4 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(Packed(32), nn.Linear(32, 32))
    expected = copy.deepcopy(model)(torch.ones(1, 32))
    peer = PEERS[name](model)
    found = peer.model(torch.ones(1, 32))
    packed = model[0].packed
    held, whole = packed.ds_tensor, 32 * 32 // 2
    right = torch.equal(found, expected) and held.dtype == torch.uint8
    peer.backward(found.square().mean())
    peer.update()
    return right, (
        f"a frozen parameter of packed bytes: each rank holds {held.numel()} of {whole} {held.dtype}, "
        f"{'the same output' if torch.equal(found, expected) else 'another output'}; its own: {_own_four_bits()}"
    )


def _own_four_bits() -> str:
    linear = importlib.import_module("deepspeed.linear")
    try:
        made = linear.OptimizedLinear(
            32, 32, quantization_config=linear.QuantizationConfig(q_bits=4), dtype=torch.bfloat16
        )
        made(torch.ones(1, 32, dtype=torch.bfloat16))
    except Exception as error:
        return f"not on a CPU ({one_line(error)})"
    return "runs"


class Packed(nn.Module):
    """A frozen linear layer of whole numbers from -8 to 7, two of them in a byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.packed = nn.Parameter(torch.randint(256, (width * width // 2,), dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.packed & 15, self.packed >> 4], 1).flatten()
        return x @ ((both.float() - 8) / 64).view(self.width, self.width)


# Beside other axes ----------------------------------------------------------------------------------------------------


def tensor(name: str, directory: Path) -> Seen:
    """Two linear layers over two tensor ranks, sharded over two data ranks, beside one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu")
    )  # fmt: skip
    return _sgd_beside(plain, model, mesh["dp"].get_local_rank())


def _sgd_beside(plain: nn.Module, model: nn.Module, rank: int) -> Seen:
    """Losses of five steps of SGD, beside those of one process that takes the batches of both data ranks."""
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain))
    off = 0.0
    for step in range(STEPS):
        inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(inputs[rank]).square().mean()
        expected = [plain(one).square().mean() for one in inputs]
        off = max(off, abs(float(loss) - float(expected[rank])))
        loss.backward()
        (sum(expected) / 2).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return off < CLOSE, f"losses of {STEPS} steps at most {off:.1e} off"


def tensor_own(name: str, directory: Path) -> Seen:
    """DeepSpeed's own tensor parallelism (AutoTP) over two ranks, for a Llama of transformers'; ZeRO 1, 2, 3."""
    return _stages(lambda stage: _auto(stage, {"tensor_parallel": {"autotp_size": 2}}, "Llama", {}))


def experts_own(name: str, directory: Path) -> Seen:
    """DeepSpeed's `MoE` layer of two experts over two ranks, beside both on each rank; ZeRO 1, 2, 3."""
    return _stages(_experts_of_stage)


def _experts_of_stage(stage: int) -> str:
    layer = importlib.import_module("deepspeed.moe.layer")
    utils = importlib.import_module("deepspeed.moe.utils")
    torch.manual_seed(0)
    expert = nn.Linear(8, 8)
    peers = []
    for size in (2, 1):
        torch.manual_seed(1)
        first, last = nn.Linear(8, 8), nn.Linear(8, 8)
        experts = layer.MoE(8, copy.deepcopy(expert), 2, size, drop_tokens=False, use_rts=False)
        with torch.no_grad():  # both experts begin apart, the same in both models
            for number, one in enumerate(experts.deepspeed_moe.experts.deepspeed_experts):
                one.weight.add_(0.1 * (dist.get_rank() if size == 2 else number))
        model = nn.ModuleDict({"first": first, "experts": experts, "last": last})
        groups = utils.split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        optimizer: Optimizer = lambda _, groups=groups: torch.optim.SGD(groups, lr=0.1)  # noqa: E731
        peers.append(DeepSpeed(model, optimizer, {"zero_optimization": {"stage": stage}}))
    off = 0.0
    for step in range(STEPS):
        inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))[dist.get_rank()]
        losses = []
        for peer in peers:
            parts = peer.model.module
            out, *_ = parts["experts"](parts["first"](inputs))
            loss = parts["last"](out).square().mean()
            peer.backward(loss)
            peer.update()
            losses.append(float(loss))
        off = max(off, abs(losses[0] - losses[1]))
    return f"losses of {STEPS} steps at most {off:.1e} off" if off < CLOSE else f"other losses (by {off:.1e})"


def _stages(task: Callable[[int], str]) -> Seen:
    words = []
    for stage in (1, 2, 3):
        try:
            words.append(f"stage {stage}: {task(stage)}")
        except Exception as error:
            words.append(f"stage {stage}: {one_line(error)}")
    return any("off" in word and "other" not in word for word in words), "; ".join(words)


def _auto(stage: int, config: dict[str, Any], family: str, more: dict[str, Any]) -> str:
    """Losses of SGD steps on the same tokens everywhere, beside the model in one process."""
    transformers = importlib.import_module("transformers")
    settings = transformers.AutoConfig.for_model(
        family.lower(), vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    plain = copy.deepcopy(model)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    sgd: Optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    given: dict[str, Any] = {"zero_optimization": {"stage": stage}, **config}
    peer = DeepSpeed(model, sgd, given)
    off = 0.0
    for step in range(STEPS):
        tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(step))
        loss = peer.model(input_ids=tokens, labels=tokens).loss
        expected = plain(input_ids=tokens, labels=tokens).loss
        off = max(off, abs(float(loss) - float(expected)))
        peer.backward(loss)
        peer.update()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
    return f"losses of {STEPS} steps at most {off:.1e} off" if off < 1e-4 else f"other losses (by {off:.1e})"


def experts(name: str, directory: Path) -> Seen:
    """Two experts, one on each of two ranks, which the engine leaves alone; tokens go to them by all_to_all."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Experts(8), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    model[1].keep_one()
    fully_shard(model, ignored_params=set(model[1].parameters()))
    for parameter in model[1].parameters():  # both ranks' tokens reach an expert, and losses are averaged
        parameter.register_hook(lambda gradient: gradient / dist.get_world_size())
    return _sgd_beside(plain, model, dist.get_rank())


class Experts(nn.Module):
    """The first half of a batch goes to expert 0, the second to expert 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.whole = True

    def keep_one(self) -> None:
        """Keep this rank's expert alone."""
        self.experts = nn.ModuleList([self.experts[dist.get_rank()]])
        self.whole = False

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return torch.cat([expert(half) for expert, half in zip(self.experts, x.chunk(2), strict=True)])
        from torch.distributed.nn.functional import all_to_all_single

        there = all_to_all_single(torch.empty_like(x), x.contiguous())
        back: Tensor = all_to_all_single(torch.empty_like(x), self.experts[0](there))
        return back


def sequences(name: str, directory: Path) -> Seen:
    """torch's `context_parallel` over two ranks around a sharded block, beside one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = nn.Sequential(Block(TINY))
    peer = PEERS[name](copy.deepcopy(plain))
    whole = torch.randn(1, TINY.seq, TINY.width)
    expected = plain(whole)
    part = whole.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
        found = peer.model(part)
        found.square().sum().backward()
    off = min(float((found - piece).abs().max()) for piece in expected.chunk(2, 1))
    return off < CLOSE, f"output at most {off:.1e} off"


def pipeline(name: str, directory: Path) -> Seen:
    """torch's 1F1B over two stages, each sharded over two data ranks, beside one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
    part = copy.deepcopy(plain[stage])
    if name == "fsdp1":
        group, cpu = mesh["dp"].get_group(), torch.device("cpu")
        part = FullyShardedDataParallel(part, process_group=group, use_orig_params=True, device_id=cpu)
    else:
        fully_shard(part, mesh=mesh["dp"])
    piped = PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(piped, 2, loss_fn=lambda out, target: (out - target).square().mean())
    ours, theirs = torch.optim.SGD(part.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    off = 0.0
    for step in range(STEPS):
        inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
        target, losses = torch.zeros(4, 8), []
        schedule.step(*([inputs[rank]] if stage == 0 else []), target=target, losses=losses)
        expected = [(plain(one) - target).square().mean() for one in inputs]
        if stage == 1:
            off = max(off, abs(float(sum(losses) / 2) - float(expected[rank])))
        (sum(expected) / 2).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, off)
    return max(everyone) < CLOSE, f"losses of {STEPS} steps at most {max(everyone):.1e} off"


def pipeline_own(name: str, directory: Path) -> Seen:
    """DeepSpeed's `PipelineModule` of two stages on two ranks; ZeRO 1, 2, 3."""
    return _stages(_pipeline_of_stage)


def _pipeline_of_stage(stage: int) -> str:
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    pipe = importlib.import_module("deepspeed.pipe")
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    net = pipe.PipelineModule(layers, num_stages=2, loss_fn=lambda out, target: (out - target).square().mean())
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 1_000_000_000,
    }  # fmt: skip
    mine = [parameter for parameter in net.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(mine, lr=0.1), config=config)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    off = 0.0
    for step in range(STEPS):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = engine.train_batch(iter([(half, torch.zeros(2, 8)) for half in inputs.chunk(2)]))
        expected = plain(inputs).square().mean()
        off = max(off, abs(float(loss) - float(expected)))
        expected.backward()
        theirs.step()
        theirs.zero_grad()
    return f"losses of {STEPS} steps at most {off:.1e} off" if off < CLOSE else f"other losses (by {off:.1e})"


# Faults ---------------------------------------------------------------------------------------------------------------

FAULTY_STEP = 3


def skips_a_unit(name: str, directory: Path) -> Seen:
    """Rank 1 leaves the first block out, once."""
    return _with_a_fault(name, directory, _without_a_block)


def dies(name: str, directory: Path) -> Seen:
    """Rank 1 is killed."""
    return _with_a_fault(name, directory, lambda peer, step: os.kill(os.getpid(), signal.SIGKILL))


def skips_a_step(name: str, directory: Path) -> Seen:
    """Rank 1 leaves a batch out, and goes on with the next."""
    return _with_a_fault(name, directory, lambda peer, step: None)


def _with_a_fault(name: str, directory: Path, fault: Callable[[Peer, int], None]) -> Seen:
    peer = PEERS[name](GPT(TINY))
    for step in range(2 * FAULTY_STEP):
        if step == FAULTY_STEP and dist.get_rank() == 1:
            (directory / "begun").write_text(str(time.time()))
            fault(peer, step)
        else:
            peer.step(*data(step))
    return False, "trained to the end and said nothing"


def _without_a_block(peer: Peer, step: int) -> None:
    with _passed_by(peer.model):
        peer.step(*data(step))


@contextmanager
def _passed_by(model: nn.Module) -> Iterator[None]:
    gpt = next(module for module in model.modules() if isinstance(module, GPT))
    blocks, gpt.blocks = gpt.blocks, nn.ModuleList(list(gpt.blocks)[1:])
    yield
    gpt.blocks = blocks


# A save that is killed ------------------------------------------------------------------------------------------------

LARGER = replace(TINY, layers=4, width=256, heads=4, vocab=2048)


def save(name: str, directory: Path) -> Seen:
    """Train three steps and save each; the last save is the one that is killed."""
    peer = PEERS[name](GPT(LARGER))
    for step in (1, 2, 3):
        peer.step(*batch(LARGER, 1, dist.get_rank(), step))
        (directory / f"digest-step-{step}").write_text(digest(peer.weights()))
        dist.barrier()
        (directory / f"saving-{step}-{dist.get_rank()}").write_text(str(time.time()))
        peer.save(directory / "saved", step)
        (directory / f"saved-{step}-{dist.get_rank()}").write_text(str(time.time()))
    return True, "saved"


def resume(name: str, directory: Path) -> Seen:
    """Load what the engine takes for the newest step of each killed run, and compare weights with those saved."""
    words, right = [], True
    for place in sorted(path for path in directory.iterdir() if path.is_dir()):
        peer = PEERS[name](GPT(LARGER, seed=1))
        try:
            step = peer.load(place / "saved")
        except Exception as error:  # what it says is the answer
            right = False
            words.append(f"{place.name}: {one_line(error)}")
            continue
        equal = digest(peer.weights()) == (place / f"digest-{step}").read_text()
        right = right and equal
        words.append(f"{place.name}: {step}, {'its weights' if equal else 'OTHER weights'}")
    return right, "; ".join(words)


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()


def one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:110].rstrip()}" if said else type(error).__name__


TRIALS: dict[str, Callable[[str, Path], Seen]] = {
    trial.__name__: trial
    for trial in (
        weights, cut, optimizers, in_backward, few_bits, tensor, tensor_own, experts, experts_own, sequences,
        pipeline, pipeline_own, skips_a_unit, dies, skips_a_step, save, resume,
    )
}  # fmt: skip

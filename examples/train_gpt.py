"""Trains a byte-level GPT on the source code of Python's standard library, sharded over any number of processes.

    torchrun --standalone --nproc_per_node 2 examples/train_gpt.py --steps 300

Runs on one GPU per process with NCCL if the machine has enough of them, otherwise on the CPU with gloo. Each step draws
one global batch from (seed, step), and every rank takes its slice, so the run is the same on any number of processes.
At the end --out holds log.json and loss.png, and the model has written some Python of its own.

With --save-every 100 it saves checkpoints; --resume continues from the latest, on any number of processes. With four
processes, --strategy hybrid --mesh 2x2 makes two replicas of two shards each.

This command survives three crashes (the variable gives each attempt its own store):

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node 2 --max-restarts 3 \
        examples/train_gpt.py --save-every 100 --resume auto
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from fsdp_compose import MixedPrecisionPolicy, fully_shard
from fsdp_compose.checkpoint import async_save, get_state_dict, keep, latest, resume, save
from fsdp_compose.strategies import STRATEGIES

VOCABULARY = 256  # a token is a byte
SUFFIXES = (".py", ".txt")  # of the files read from a directory
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


# ---- data ------------------------------------------------------------------------------------------------------------


class Corpus:
    """Bytes of text, the last 5 % of them for validation."""

    def __init__(self, path: Path, max_bytes: int, seq_len: int):
        files = [path]
        if path.is_dir():
            relative = sorted(file.relative_to(path) for file in path.rglob("*") if file.suffix in SUFFIXES)
            files = [path / file for file in relative if SKIPPED_FOLDERS.isdisjoint(file.parts)]
        text = bytearray()
        while files and len(text) < max_bytes:
            text += files.pop(0).read_bytes()
        del text[max_bytes:]
        if not text:
            raise SystemExit(f"--data {path}: expected a file, or a directory with some {'/'.join(SUFFIXES)} files")
        tokens = torch.frombuffer(text, dtype=torch.uint8)
        self.training, self.validation = tokens.split([len(tokens) - len(tokens) // 20, len(tokens) // 20])
        if len(self.validation) <= seq_len:
            raise SystemExit(f"{path} is too short: 5 % of its {len(tokens):,} bytes must exceed --seq-len {seq_len}")


def windows(tokens: Tensor, starts: Tensor, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and the bytes that follow them, one row per start."""
    rows = torch.stack([tokens[start : start + seq_len + 1] for start in starts.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


# ---- model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.checkpoint_activations = args.checkpoint_activations
        self.embedding = nn.Embedding(VOCABULARY, args.dim)
        self.positions = nn.Embedding(args.seq_len, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # the two writers into the residual stream of each block share its variance
                writes_residual = name.endswith(("projection.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * args.layers) if writes_residual else 0.02)
        if args.tie:
            self.head.weight = self.embedding.weight  # both belong to the root's group

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x)).float()


def build_model(args: argparse.Namespace, device: torch.device) -> tuple[GPT, int]:
    """Builds and shards the model; also returns its number of parameters."""
    torch.manual_seed(args.seed)  # every rank builds the same model and keeps its share
    model = GPT(args).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if args.compile:
        for block in model.blocks:
            block.compile()
    shape = mesh_shape(args)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.bf16 else {}
    policy = MixedPrecisionPolicy(**dtypes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, strategy=args.strategy)
    fully_shard(model, mesh=mesh, mp_policy=policy, strategy=args.strategy)
    return model, num_parameters


def mesh_shape(args: argparse.Namespace) -> tuple[int, ...]:
    """Returns the shape of the mesh: (ranks,), or (replicas, shards)."""
    world_size, num_dims = int(os.environ["WORLD_SIZE"]), STRATEGIES[args.strategy].num_dims
    shape = (world_size,)
    if args.mesh is not None or num_dims == 2:
        shape = tuple(int(size) for size in str(args.mesh).split("x") if size.isdigit())
    if len(shape) != num_dims or math.prod(shape) != world_size:
        wanted = [name for name, row in STRATEGIES.items() if row.num_dims == 2]
        raise SystemExit(
            f"--strategy {args.strategy} --mesh {args.mesh}: with {' and '.join(wanted)}, expected --mesh RxS, R "
            f"replicas of S shards for {world_size} processes; with other strategies, no --mesh"
        )
    return shape


# ---- training --------------------------------------------------------------------------------------------------------


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def mean_over_ranks(losses: list[Tensor]) -> float:
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def my_slice(starts: Tensor) -> Tensor:
    """Returns this rank's part of a global batch."""
    return starts.chunk(dist.get_world_size())[dist.get_rank()]


@torch.no_grad()
def validate(model: GPT, corpus: Corpus, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over evenly spaced windows. All ranks take part: each forward gathers parameters."""
    starts = torch.linspace(0, len(corpus.validation) - args.seq_len - 1, args.val_batches * args.batch).long()
    losses = [
        loss_of(model, *windows(corpus.validation, my_slice(batch), args.seq_len, device))
        for batch in starts.split(args.batch)
    ]
    return mean_over_ranks(losses)


@torch.no_grad()
def generate(model: GPT, args: argparse.Namespace, device: torch.device) -> str:
    """Continues the prompt byte by byte. All ranks draw the same bytes, in step: each forward gathers parameters."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([list(args.prompt.encode())], device=device)
    for _ in range(args.sample_bytes):
        logits = model(tokens[:, -args.seq_len :])[:, -1].cpu() / args.temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth, as a factor of --lr."""
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup))


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of the whole process; in KiB, on macOS in bytes
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class Run:
    """The content of a checkpoint: model, optimizer, schedule, and the log so far."""

    def __init__(self, model: GPT, args: argparse.Namespace):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: learning_rate(step, args))
        self.log: list[dict[str, float]] = []
        self.step = 0

    def state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        progress = [json.dumps({"step": self.step, "log": self.log})]
        dist.broadcast_object_list(progress)  # the log has times: what differs between ranks is saved for each of them
        scheduler = self.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress[0]}

    def save(self, args: argparse.Namespace) -> None:
        path = args.out / f"step-{self.step}"
        if args.save_async:  # another process writes; what fails is raised by the next call, or at exit
            async_save(self.state(), path)
        else:
            save(self.state(), path)
        if args.keep and dist.get_rank() == 0:
            keep(args.out, args.keep)

    def resume(self, path: Path) -> None:
        state = resume(path, self.model, self.optimizer, scheduler=self.scheduler.state_dict(), progress="")
        self.scheduler.load_state_dict(state["scheduler"])
        progress = json.loads(state["progress"])
        self.step, self.log = progress["step"], progress["log"]


def checkpoint_to_resume(args: argparse.Namespace) -> Path | None:
    """Returns the checkpoint to resume from, the same on all ranks."""
    if args.resume not in (None, "auto", "latest"):
        return Path(args.resume)
    found = latest(args.out)
    if args.resume == "latest" and found is None:
        raise SystemExit(f"--resume: there is no checkpoint in {args.out}; train with --save-every first")
    if args.resume is None and args.save_every and found is not None:
        raise SystemExit(f"{args.out} holds checkpoints of an earlier run: --resume it, or choose another --out")
    return None if args.resume is None else found


def train(model: GPT, corpus: Corpus, args: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    run = Run(model, args)
    path = checkpoint_to_resume(args)
    if path is not None:
        run.resume(path)
    optimizer, scheduler, log = run.optimizer, run.scheduler, run.log
    steps = range(run.step + 1, args.steps + 1)
    progress = tqdm(
        steps, initial=run.step, total=args.steps, disable=dist.get_rank() != 0, mininterval=1.0, unit="step"
    )
    losses: list[Tensor] = []  # since the last entry of the log
    since = time.perf_counter()
    for step in progress:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(corpus.training) - args.seq_len, (args.batch,), generator=generator)
        loss = loss_of(model, *windows(corpus.training, my_slice(starts), args.seq_len, device))
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        time_to_validate = step % args.val_every == 0 or step == args.steps
        time_to_save = args.save_every and step % args.save_every == 0
        if step % args.log_every and not time_to_validate and not time_to_save:
            continue
        entry = {"step": step, "loss": mean_over_ranks(losses)}  # waits for the device, so that the clock is right
        entry["tokens_per_second"] = len(losses) * args.batch * args.seq_len / (time.perf_counter() - since)
        entry["peak_memory_mib"] = peak_memory_mib(device)
        if time_to_validate:
            entry["val_loss"] = validate(model, corpus, args, device)
            if not progress.disable:
                progress.write(f"step {step}: training loss {entry['loss']:.3f}, validation {entry['val_loss']:.3f}")
        progress.set_postfix_str(
            f"loss {entry['loss']:.3f}, {entry['tokens_per_second']:,.0f} tokens/s, {entry['peak_memory_mib']:,.0f} MiB"
        )
        log.append(entry)
        if time_to_save:
            run.step = step
            run.save(args)
        losses, since = [], time.perf_counter()
    return log


# ---- the run around it -----------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=Path, default=stdlib, help="file or directory (default: the standard library)")
    parser.add_argument("--max-bytes", type=int, default=16 << 20, help="read at most this much text")
    parser.add_argument("--out", type=Path, default=Path("runs/train_gpt"), help="directory of log.json and loss.png")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tie", action=argparse.BooleanOptionalAction, default=True, help="one embedding and head")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep and reduce in float32")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in backward")
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero3", help="how to shard, as for fully_shard")
    parser.add_argument("--mesh", metavar="RxS", help="with hybrid and hfsdp: replicas x shards, for example 2x2")
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--val-every", type=int, default=50)
    parser.add_argument("--val-batches", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="save a checkpoint into --out")
    parser.add_argument("--save-async", action="store_true", help="save while training goes on")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="delete all checkpoints but the N newest")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="continue from this checkpoint, or the latest in --out; auto: from the latest, or start if there is none",
    )
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--sample-bytes", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.6)
    return parser.parse_args()


def refuse_restarts_on_one_store() -> None:
    """Refuses torchrun's shared store at the start of a run, not after its first crash: restarted processes find the
    addresses of dead ones in it, and init_process_group() fails or hangs."""
    is_restarted = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if is_restarted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise SystemExit(
            "torchrun --max-restarts: all attempts would share one store, in which init_process_group() may hang after "
            "a crash. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and give it --standalone, or on several "
            "nodes --rdzv-backend c10d"
        )


def start_process_group(args: argparse.Namespace) -> torch.device:
    """Joins the other processes; returns the device this one computes on."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(f"start this under torchrun: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}")
    refuse_restarts_on_one_store()
    world_size, local_world_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if args.batch % world_size:
        raise SystemExit(f"--batch {args.batch} is the global batch: expected a multiple of the {world_size} processes")
    mesh_shape(args)  # refused before anything is begun
    if torch.cuda.device_count() < local_world_size:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def write_results(args: argparse.Namespace, log: list[dict[str, float]], summary: dict[str, float | str]) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    args.out.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    (args.out / "log.json").write_text(json.dumps({"settings": settings, **summary, "log": log}, indent=1))
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for key, label in {"loss": "training", "val_loss": "validation"}.items():
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        axes.plot(*zip(*points, strict=True), label=label, marker="o" if key == "val_loss" else "")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"{summary['num_parameters']:,} parameters")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.out / "loss.png", dpi=120)


def main() -> None:
    args = parse_args()
    device = start_process_group(args)
    start = time.perf_counter()
    corpus = Corpus(args.data, args.max_bytes, args.seq_len)
    model, num_parameters = build_model(args, device)
    if dist.get_rank() == 0:
        print(f"{num_parameters:,} parameters over {dist.get_world_size()} processes ({device.type})")
        print(f"{len(corpus.training):,} bytes to train on, {len(corpus.validation):,} to validate")
    log = train(model, corpus, args, device)
    sample = generate(model, args, device)
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        write_results(args, log, {"num_parameters": num_parameters, "seconds": seconds, "sample": sample})
        print(f"\n{sample}\n\n{num_parameters:,} parameters, {seconds:.0f} s; loss curve in {args.out}/loss.png")
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

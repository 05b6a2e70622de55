"""The peer: speculators' own model of a kind, loss and optimizer, trained on exactly the tensors of one of our stores.

It has our drafter's size (layers, draft tokens, rank, blocks per text), which is chosen for a small store; everything else is its own
default, among them its own loss, weights of draft tokens, and, for DSpark, the anchor's row and the confidence head.

It trains as its own trainer does, under autocast to bfloat16, where the processor multiplies that. Its steps beside ours (`stepping`) are in
the precision of ours.

It runs in an environment of its own (`runs/bench/peer-env`, made once) and in a process of its own (`peer_driver.py`, which
says what of it is speculators' and what a CPU made necessary). Its weights come back into our module, so that acceptance is
predicted for both by the same code, on the same held-out part; `check_mapping` proves that the module then gives the logits
that speculators' own gives.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from draftsmith.config.drafters import (
    BlockOptions,
    DrafterOptions,
    DSparkOptions,
    Eagle3Options,
    FusingOptions,
    PEagleOptions,
)
from draftsmith.config.loading import digest
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.decoder import mask_token_of
from draftsmith.run.atomic_io import write_json
from draftsmith.run.cuda import native_bfloat16
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console
from draftsmith.store.format import Sequence
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.packing import pack

VERSION = "0.9.0"
PACKAGES = (f"speculators=={VERSION}", f"hs-connectors=={VERSION}")
FOLDER = Path("runs/bench")
DRIVER = Path(__file__).with_name("peer_driver.py")
TOKENS_PER_STEP = 1024
"""Its packed length, a step's tokens; it cuts longer sequences (of those of `recipes/learn.yaml`, one in five hundred). Its own default,
8192, would leave about a dozen steps an epoch."""
LEARNING_RATE = 1e-3
"""Its default."""


# ---- environment ----


def environment() -> Path:
    """The Python interpreter of speculators' environment, which is made when it is missing.

    Speculators and its connector are installed there alone; torch, transformers and what else it imports are those of the
    environment that runs the benchmark, if speculators can be imported so, and its own otherwise.

    Raises:
        UserError: it cannot be installed.
    """
    folder = FOLDER / "peer-env"
    python, ready = folder / "bin" / "python", folder / f"speculators-{VERSION}"
    if ready.is_file():
        return python
    console.print(f"installing speculators {VERSION} into {folder}", highlight=False)
    _run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder))
    (packages,) = folder.glob("lib/python3*/site-packages")
    ours = packages / "ours.pth"
    ours.write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    install = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    _run(*install, "--no-deps", *PACKAGES)
    if subprocess.run([python, "-c", _IMPORTS], capture_output=True, check=False).returncode:
        ours.unlink()
        _run(*install, *PACKAGES)
        _run(str(python), "-c", _IMPORTS)
    ready.touch()
    return python


_IMPORTS = (
    "import speculators.models.eagle3, speculators.models.dspark, speculators.train.cli, speculators.train.optimizers"
)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"Could not make the environment of speculators {VERSION} in {FOLDER / 'peer-env'}: {last} The benchmarks against "
            "it need it; check the network and pip's configuration, or name other benchmarks in ONLY."
        )


# ---- handing over ----

_EAGLE3 = Eagle3Options()


@dataclass(frozen=True)
class Handed:
    """What the peer is given."""

    target: TargetInfo
    layer_ids: tuple[int, ...]
    """The states that its `fc` reads."""
    columns: list[int]
    """Where those are among a sequence's states."""
    last_column: int
    draft_token_ids: torch.Tensor
    """int64 [V] ascending."""
    options: DrafterOptions
    """Of our drafter of the same kind, whose size it has."""

    @property
    def kind(self) -> str:
        """Its name of the kind."""
        return self.options.kind.replace("p_eagle", "peagle")

    @property
    def own_options(self) -> dict[str, Any]:
        """Options of its training command with which it is of our drafter's size."""
        options, found = self.options, {}
        if isinstance(options, FusingOptions | BlockOptions):
            found["num_layers"] = options.num_layers
        if isinstance(options, PEagleOptions | BlockOptions):
            found["mask_token_id"] = mask_token_of(options.mask_token_id, self.target)
        if isinstance(options, PEagleOptions):
            found |= {
                "num_depths": options.num_depths,
                "draft_arch": "llama",
            }  # with Qwen3's norms our module has no place for them
        if isinstance(options, BlockOptions):
            blocks = math.ceil(TOKENS_PER_STEP * options.share_of_positions)
            found |= {"block_size": options.block_size, "max_anchors": blocks}
        if isinstance(options, DSparkOptions):
            found["markov_rank"] = options.markov_rank
        return found


def hand_over(
    target: TargetInfo,
    saved: tuple[int, ...],
    draft_token_ids: torch.Tensor,
    layer_ids: tuple[int, ...] | None = None,
    options: DrafterOptions = _EAGLE3,
) -> Handed:
    """Choose what the peer reads of states saved in this order: `layer_ids`, or its own default; and its kind and size, by those of our
    drafter.

    Raises:
        UserError: the store lacks these layers.
    """
    layers = target.num_hidden_layers
    wanted = layer_ids or (2, layers // 2, layers - 3)
    if missing := sorted({*wanted, layers} - {*saved}):
        raise UserError(
            f"speculators is to read the states of layers {[*wanted, layers]}, and the store lacks {missing}. Extract "
            "with extract.layer_ids that hold them."
        )
    columns = [saved.index(one) for one in wanted]
    return Handed(target, wanted, columns, saved.index(layers), draft_token_ids, options)


def _write(folder: Path, handed: Handed, sequences: Iterable[Sequence], job: dict[str, Any]) -> None:
    """`data.safetensors` and `job.json`: as many tokens of each sequence as it has states."""
    ids, masks, states, last, lengths = [], [], [], [], []
    for sequence in sequences:
        rows = len(sequence.hidden_states)
        ids.append(sequence.token_ids[:rows].long())
        masks.append(sequence.loss_mask[:rows])
        states.append(sequence.hidden_states[:, handed.columns].flatten(1).float())
        last.append(sequence.hidden_states[:, handed.last_column].float())
        lengths.append(rows)
    in_draft = torch.zeros(handed.target.vocab_size, dtype=torch.bool)
    in_draft[handed.draft_token_ids] = True
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "token_ids": torch.cat(ids), "loss_mask": torch.cat(masks), "hidden_states": torch.cat(states),
        "last_states": torch.cat(last), "lengths": torch.tensor(lengths), "t2d": in_draft,
        "d2t": handed.draft_token_ids - torch.arange(len(handed.draft_token_ids)),
    }  # fmt: skip
    save_file(tensors, folder / "data.safetensors")
    write_json(folder / "job.json", job)


def _job(handed: Handed, epochs: int, lr: float = LEARNING_RATE, *, bfloat16: bool = False) -> dict[str, Any]:
    return {
        "kind": handed.kind, "options": handed.own_options,
        "target": str(handed.target.path), "layer_ids": list(handed.layer_ids), "epochs": epochs, "lr": lr,
        "tokens_per_step": TOKENS_PER_STEP, "attention": "sdpa", "muon_float32": True, "bfloat16": bfloat16,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


# ---- training ----


def train_peer(
    handed: Handed, sequences: Iterable[Sequence], *, epochs: int, lr: float, about: str, fresh: bool = False
) -> tuple[Path, dict[str, Any]]:
    """Train it, or find what an earlier call with the same `about` and options left.

    Args:
        sequences: the training part.
        epochs: of the whole training, which the schedule of the learning rate goes by.
        lr: peak learning rate, of all its optimizers.
        about: what identifies the sequences.
        fresh: train again, for the clock.

    Returns:
        The folder with `epoch-N.safetensors`, and its figures: `epochs`, each with `loss`, `steps`, and `tokens` and
        `seconds` since the start; building the model and loading data are in the seconds, writing weights is not.
    """
    python = environment()
    job = _job(handed, epochs, lr, bfloat16=native_bfloat16())
    learned_from = {name: value for name, value in job.items() if name != "threads"}
    made_by = digest(
        [VERSION, DRIVER.read_text(), about, learned_from, handed.draft_token_ids.tolist(), torch.__version__]
    )
    folder = FOLDER / f"peer-{made_by[:12]}"
    finished = folder / "figures.json"
    if fresh:
        finished.unlink(missing_ok=True)
    if not finished.is_file():
        _write(folder, handed, sequences, job)
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen([python, DRIVER, folder], stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
        ):
            status = process.wait()  # the input ends with this process
        (folder / "data.safetensors").unlink()
        if status:
            raise DraftsmithError(f"Training speculators' drafter failed; see {folder / 'log'}.")
    found: dict[str, Any] = json.loads(finished.read_text())
    return folder, found


@contextmanager
def stepping(
    handed: Handed, sequences: Iterable[Sequence], folder: Path, precision: Literal["float32", "bfloat16"]
) -> Iterator[Any]:
    """A peer that waits beside us: each call takes one optimizer step on these sequences and returns its seconds. In bfloat16 its Muon
    computes in that too, as torch's own does."""
    python, bfloat16 = environment(), precision == "bfloat16"
    _write(folder, handed, sequences, _job(handed, 1, bfloat16=bfloat16) | {"muon_float32": not bfloat16})
    command = [python, DRIVER, folder, "steps"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdin is not None
        assert process.stdout is not None

        def said() -> str:
            line = process.stdout.readline().strip()  # type: ignore[union-attr]
            if not line:
                raise DraftsmithError(f"speculators' process has ended; see {folder / 'log'}.")
            return str(line)

        def step() -> float:
            process.stdin.write("step\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return float(said())

        try:
            while said() != "ready":
                pass
            yield step
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


# ---- back into our module ----


@dataclass(frozen=True)
class PeerDrafter:
    """The peer's weights in our module, which reads some of the states of a store."""

    drafter: Drafter
    columns: list[int]

    def prepared(self, sequence: Sequence) -> Sequence:
        """The sequence with the states that the module reads alone, [tokens, n, H]; its columns are 0 ... n - 1."""
        return replace(sequence, hidden_states=sequence.hidden_states[:, self.columns].float())


def load_peer(handed: Handed, folder: Path, *, epoch: int) -> PeerDrafter:
    """Its weights after an epoch (from 1); names and shapes are the same."""
    flags = json.loads((folder / "figures.json").read_text())["config"]
    tensors = load_file(folder / f"epoch-{epoch}.safetensors")
    kind, vocabulary = drafter_class(handed.options.kind), handed.draft_token_ids
    made = kind.make_config(handed.options, handed.target, handed.layer_ids, len(vocabulary))
    config = kind.config_class.from_dict(made.to_dict() | {n: v for n, v in flags.items() if n in made.to_dict()})
    of_target = load_target_tensors(handed.target.path)
    if (embedding := tensors.pop("embed_tokens.weight", None)) is not None:
        of_target = replace(of_target, embedding=embedding)
    drafter = kind.from_target(config, of_target, vocabulary)
    if "mask_embedding" in drafter.state_dict():  # its mask is the row of its token
        tensors["mask_embedding"] = drafter.embedding[config.mask_token_id]
    drafter.load_state_dict(tensors)
    return PeerDrafter(drafter, handed.columns)


@torch.no_grad()
def check_mapping(peer: PeerDrafter, first: Sequence, folder: Path) -> None:
    """That our module computes what speculators' computes: its last epoch's logits for the first training sequence.

    Raises:
        DraftsmithError: it does not.
    """
    checked = load_file(folder / "check.safetensors")
    sequence = peer.prepared(first)
    rows = len(sequence.hidden_states)
    everywhere = replace(sequence, token_ids=sequence.token_ids[:rows], loss_mask=torch.ones(rows, dtype=torch.bool))
    steps = int(checked["steps"].max()) + 1
    batch = pack([everywhere], steps=steps)
    for k, step in enumerate(peer.drafter.chain(batch, steps=steps)):
        counted = int((step.loss_weights > 0).sum())  # rows from 0 on whose token at this step is known
        here = (checked["steps"] == k) & (checked["rows"] >= 0) & (checked["rows"] < counted)
        theirs = checked["logits"][here]
        if k and not len(theirs):  # P-EAGLE may not have drawn a row for a late draft token
            continue
        logits = F.linear(step.normed[checked["rows"][here]], step.head)
        apart = (logits - theirs).abs().max().item()
        if apart > 1e-3 * theirs.abs().max().item():
            raise DraftsmithError(
                f"Speculators' weights give other logits in our module at chain step {k}: up to {apart:.3g} apart. What is "
                "predicted for it would be wrong."
            )

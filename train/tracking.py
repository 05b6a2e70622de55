"""Experiment trackers (`train.tracker`), which accelerate logs to."""

import importlib.util
import netrc
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from accelerate import Accelerator

from draftsmith.config.recipe import Recipe
from draftsmith.run.atomic_io import write_bytes
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console

RUN_ID = "tracker-run-id"
"""In the checkpoint's folder while training runs: the id of its run of wandb."""

_MODULES = {"wandb": ["wandb"], "tensorboard": ["tensorboard", "tensorboardX"], "trackio": ["trackio"]}
"""Modules of each tracker, any of which will do."""


def require_tracker(name: str | None) -> None:
    """Raises UserError: the tracker is not installed."""
    if name and not any(importlib.util.find_spec(module) for module in _MODULES[name]):
        raise UserError(
            f"`train.tracker: {name}` needs the package {name}, which is not installed: "
            "`pip install -e '.[trackers]'` in Draftsmith's folder. Or leave the tracker out."
        )


@contextmanager
def tracking(recipe: Recipe, accelerator: Accelerator, run_dir: Path, directory: Path) -> Iterator[None]:
    """Log to the recipe's tracker, if it names one. A training that is resumed goes on in the same run of wandb, whose id is kept in
    `directory`, the checkpoint's folder. wandb runs offline where no account is configured. After an error it is told that the run has ended:
    processes of several GPUs end without what it would do at exit."""
    options = recipe.train
    if not options.tracker:
        yield
        return
    if options.tracker == "wandb" and not (os.environ.get("WANDB_API_KEY") or _logged_in_to_wandb()):
        if "WANDB_MODE" not in os.environ and accelerator.is_main_process:
            console.print(
                "train: no account of wandb's is configured, so it runs offline; `wandb sync` uploads it later"
            )
        os.environ.setdefault("WANDB_MODE", "offline")
    arguments = {options.tracker: {"name": recipe.name}} if options.tracker != "tensorboard" else {}
    if options.tracker == "wandb" and accelerator.is_main_process:
        arguments["wandb"] |= {"dir": str(run_dir), "id": _run_id(directory), "resume": "allow"}
    settings = {key: str(value) for key, value in options.model_dump(mode="json").items()}
    accelerator.init_trackers("draftsmith", config=settings, init_kwargs=arguments)
    try:
        yield
    except BaseException:
        for tracker in accelerator.trackers:
            tracker.finish()
        raise


def _run_id(directory: Path) -> str:
    """The id of this training: the one that it had before it was interrupted, or a new one."""
    path = directory / RUN_ID
    if not path.exists():
        write_bytes(path, secrets.token_hex(4).encode())
    return path.read_text()


def _logged_in_to_wandb() -> bool:
    """Whether `wandb login` has stored a key in ~/.netrc, for wandb's own server or for that of `WANDB_BASE_URL`."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

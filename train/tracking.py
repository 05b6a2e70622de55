"""Experiment trackers (`train.tracker`), which accelerate logs to."""

import importlib.util
import netrc
import os
from pathlib import Path

from accelerate import Accelerator

from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import UserError

_MODULES = {"wandb": ["wandb"], "tensorboard": ["tensorboard", "tensorboardX"], "trackio": ["trackio"]}
"""Modules of each tracker, any of which will do."""


def require_tracker(name: str | None) -> None:
    """Raises UserError: the tracker is not installed."""
    if name and not any(importlib.util.find_spec(module) for module in _MODULES[name]):
        raise UserError(
            f"`train.tracker: {name}` needs the package {name}, which is not installed: "
            "`pip install -e '.[trackers]'` in Draftsmith's folder. Or leave the tracker out."
        )


def start_tracker(recipe: Recipe, accelerator: Accelerator, run_dir: Path) -> None:
    """Start the recipe's tracker, if it names one; wandb runs offline where no account is configured."""
    options = recipe.train
    if options.tracker == "wandb" and not (os.environ.get("WANDB_API_KEY") or _logged_in_to_wandb()):
        os.environ.setdefault("WANDB_MODE", "offline")  # `wandb sync` uploads it later
    if options.tracker:
        arguments = {"wandb": {"name": recipe.name, "dir": str(run_dir)}, "trackio": {"name": recipe.name}}
        settings = {key: str(value) for key, value in options.model_dump(mode="json").items()}
        accelerator.init_trackers("draftsmith", config=settings, init_kwargs=arguments)


def _logged_in_to_wandb() -> bool:
    """Whether `wandb login` has stored a key in ~/.netrc."""
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False

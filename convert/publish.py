"""Publish a run's drafter, its model card and its evaluation as one commit on the Hugging Face Hub.

Measured figures on the card come from a finished, unchanged evaluation of exactly the weights that are uploaded; without one,
none are published.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, errors
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from rich.markup import escape

from draftsmith.config.target import TargetConfig
from draftsmith.convert.model_card import hub_id, render
from draftsmith.convert.records import EVALUATION, checkpoint_of, evaluation_of, extraction_of
from draftsmith.data.results_in_words import changed_answers
from draftsmith.engine.speculation import drafter_files
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console
from draftsmith.target.downloads import place_of

TAG = "draftsmith"
"""Tag of the card that marks a repository as published by Draftsmith, which may then replace its files."""
_IN_EVERY_REPO = {".gitattributes", "README.md"}
_LICENSE = ("license", "license_name", "license_link")
_BRANCH = re.compile(r"[A-Za-z0-9_][\w-]*([./][\w-]+)*", re.ASCII)


def publish(
    directory: Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    evaluation: str | None = "eval",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Upload a drafter. If the Hub already has the same files, no commit is made.

    Args:
        directory: `runs/NAME`, or the `vllm` folder in it.
        repo: `OWNER/NAME`, created if missing.
        revision: the branch to commit to, created if missing; None for `main`.
        base_model: the target's Hub id, if the recipe names a folder or a file.
        license: a license id of the Hub, or `other`; None for the target's, if known.
        evaluation: folder of the evaluation in the run; None publishes without one.
        dry_run: upload nothing and contact nothing.

    Returns `repo`, `revision`, `files` (name to bytes), `card`, and unless `dry_run`, `commit` and `url`.

    Raises:
        UserError: there is no finished drafter, its evaluation is missing, of other weights, or found changed answers, a name or the metadata is
            invalid, the repository was not published by Draftsmith, or the Hub denies access.
        DraftsmithError: the network or the Hub failed; the same command resumes.
    """
    _check_id(repo, "--repo")
    if base_model is not None:
        _check_id(base_model, "--base-model")
    if revision is not None and not _BRANCH.fullmatch(revision):
        raise UserError(
            f"`--revision {revision}` is not a branch's name: letters, digits, `-`, `_`, and between them `.` and `/`, as in `v2` or `eagle3/v2.1`."
        )
    drafter = directory / "vllm" if (directory / "vllm").is_dir() else directory
    run_dir = drafter.resolve().parent
    checkpoint, train, quantized = checkpoint_of(drafter, run_dir / "checkpoint")
    target = TargetConfig.model_validate(train["recipe"]["target"])
    evaluate = evaluation_of(drafter, run_dir / evaluation) if evaluation is not None else None
    if evaluate is not None and (wrong := changed_answers(evaluate["figures"], methods=False)):
        raise UserError(
            f"The evaluation in {run_dir / str(evaluation)} found that speculative decoding changes the target's answers: {'; '.join(wrong)}. "
            "A faulty engine, plugin or drafter configuration does that. Find the fault and evaluate again, or publish the weights "
            "without measured numbers: `--without-evaluation`."
        )
    base_model = hub_id(checkpoint.target["name"]) or base_model
    known = {"license": license} if license else _target_license(target, base_model, online=not dry_run)
    if not known:
        name = escape(checkpoint.target["name"])
        asked = " without asking the Hub" if dry_run and base_model else ""
        console.print(
            f"[bold yellow]warning:[/] the license of the target {name} is not known{asked}, so the card names none. A drafter "
            "holds parts of its target: find out the license and name it, as in `--license apache-2.0`.",
            highlight=False,
            soft_wrap=True,
        )
    card = render(
        checkpoint,
        target,
        quantized=quantized,
        repo=repo,
        revision=revision,
        base_model=base_model,
        license=known,
        train=train,
        extract=extraction_of(run_dir / "store", train),
        evaluate=evaluate,
    )
    parsed = _parse(card)
    files: dict[str, Path | bytes] = {"README.md": card.encode()}
    files |= {name: drafter / name for name in drafter_files(drafter)}
    if evaluate is not None:
        files |= {f"eval/{name}": run_dir / str(evaluation) / name for name in EVALUATION}
    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in files.items()}
    done = {"repo": repo, "revision": revision, "files": sizes, "card": card}
    if dry_run:
        return done

    with _explained(repo):
        parsed.validate()  # before anything is created
        commit, url = _upload(repo, revision, files, private=private)
    return done | {"commit": commit, "url": url}


def _upload(repo: str, revision: str | None, files: Mapping[str, Path | bytes], *, private: bool) -> tuple[str, str]:
    """Upload all files in one commit; return its hash and the repository's URL."""
    if not console.is_terminal:
        disable_progress_bars()
    api = HfApi()
    api.create_repo(repo, private=private or None, exist_ok=True)
    if revision:
        api.create_branch(repo, branch=revision, exist_ok=True)
    before = api.model_info(repo, revision=revision)
    there = {file.rfilename for file in before.siblings or ()}
    if there - _IN_EVERY_REPO and not _is_draftsmiths(api, repo, before.sha, there):
        raise UserError(
            f"{repo} holds files that Draftsmith did not publish, so it is left alone. Choose another name with --repo, or, to "
            f"replace its weights, add the tag `{TAG}` to its card."
        )
    if private and not before.private:
        raise UserError(
            f"{repo} exists and is public, which --private does not change. Make it private in its settings on the "
            "Hub, or choose another name with --repo."
        )
    # Weights and figures of an earlier publication must not remain beside these.
    replaced = {
        name for name in there if name.startswith("eval/") or name.endswith((".safetensors", ".index.json", ".pt"))
    }
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()),
        *(CommitOperationDelete(path_in_repo=name) for name in sorted(replaced - set(files))),
    ]
    what = "Drafter, model card and evaluation" if "eval/results.json" in files else "Drafter and model card"
    total = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
    console.print(
        f"publish: {len(files)} files, {total / 1e6:.1f} MB, to {repo}; files that the Hub already has are not sent again",
        highlight=False,
        soft_wrap=True,
    )
    with warnings.catch_warnings(record=True) as hints:
        warnings.simplefilter("always")
        commit = api.create_commit(repo, operations, commit_message=what, revision=revision)
    for hint in hints:
        if hint.category is UserWarning:  # the Hub's remarks about the metadata
            console.print(f"publish: {hint.message}", highlight=False, markup=False, soft_wrap=True)
    unchanged = commit.oid == before.sha
    url = f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")
    console.print(
        f"publish: {'nothing has changed at' if unchanged else 'published at'} {url}, commit {commit.oid[:12]}",
        highlight=False,
        soft_wrap=True,
    )
    return commit.oid, url


def _is_draftsmiths(api: HfApi, repo: str, commit: str | None, there: set[str]) -> bool:
    """Whether the card at that commit has Draftsmith's tag."""
    if "README.md" not in there:
        return False
    card = Path(api.hf_hub_download(repo, "README.md", revision=commit))
    return TAG in _metadata(card).get("tags", ())


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn the Hub's errors into errors that say what to do."""
    try:
        yield
    except errors.HfHubHTTPError as error:
        status, said = error.response.status_code, error.server_message or _one_line(error)
        if status in (401, 403, 404):
            raise UserError(
                f"The Hub does not let you write to {repo} (status {status}: {said}). Log in with `hf auth login` and a token "
                "with write access, or name a repository of your own with --repo."
            ) from error
        if status == 400:
            raise UserError(f"The Hub refuses {repo} as it is: {said}") from error
        raise _interrupted(repo, said) from error
    except (errors.HTTPError, OSError, RuntimeError) as error:  # errors of an upload are wrapped in a RuntimeError
        raise _interrupted(repo, _one_line(error.__cause__ or error)) from error
    except ValueError as error:  # metadata that the Hub rejects
        raise UserError(
            f"The Hub refuses the card of {repo}: {_one_line(error)}. Correct --license or --base-model if they are the cause."
        ) from error


def _interrupted(repo: str, said: str) -> DraftsmithError:
    return DraftsmithError(
        f"Publishing to {repo} was interrupted: {said}. It is one commit, so nothing is published partially. Check the network and "
        "HF_ENDPOINT, and run the same command again; files that have arrived are not sent again."
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _check_id(name: str, option: str) -> None:
    try:
        validate_repo_id(name)
        if "/" not in name:
            raise errors.HFValidationError("it has no owner")
    except errors.HFValidationError as error:
        raise UserError(f"`{option} {name}` is not a repository id such as owner/name: {error}") from None


def _target_license(target: TargetConfig, base_model: str | None, *, online: bool) -> dict[str, str]:
    """The target's license fields, in the Hub's terms; {} if it states none or cannot be reached."""
    if target.gguf is not None:
        if named := _gguf_license(place_of(target.gguf)):
            return {"license": named}
    elif Path(target.model or "").is_absolute():
        readme = Path(target.model or "") / "README.md"
        if readme.is_file() and (said := _license_fields(_metadata(readme))):
            return said
    if base_model is None or not online:
        return {}
    try:
        data = HfApi().model_info(base_model, revision=target.revision).card_data
    except (errors.HTTPError, OSError):
        return {}  # gated, gone, or offline
    return _license_fields(data.to_dict() if data else {})


def _gguf_license(path: Path) -> str | None:
    """`general.license` of a local GGUF file."""
    try:
        from gguf import GGUFReader

        field = GGUFReader(path).get_field("general.license")
    except (ImportError, OSError, ValueError):
        return None
    return str(field.contents()) if field else None


def _metadata(card: Path) -> dict[str, Any]:
    """The metadata of a model card; {} if it cannot be read."""
    try:
        return ModelCard(card.read_text(), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # a malformed card may raise anything
        return {}


def _license_fields(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {key: metadata[key] for key in _LICENSE if isinstance(metadata.get(key), str)}
    return found if "license" in found else {}


def _parse(card: str) -> ModelCard:
    """Check offline that huggingface_hub can read the card's metadata back."""
    try:
        return ModelCard(card)
    except ValueError as error:
        raise DraftsmithError(f"huggingface_hub cannot read the card's metadata: {error}.") from error

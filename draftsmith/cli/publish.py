"""`draftsmith publish`: a run's drafter to the Hugging Face Hub."""

from typing import Annotated

import typer

from draftsmith.cli.common import AsJson, print_json


def publish(
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A run (RUNS/NAME) or its vllm folder, or the Hub id of a whole run.",
            show_default=False,
        ),
    ],
    repo: Annotated[str, typer.Option(metavar="OWNER/NAME", help="Repository to publish to; created if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch to commit to; created if missing. Default: main.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="The target's Hub id, if the recipe names a file or a folder."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The drafter's license, such as apache-2.0. Default: the target's."),
    ] = None,
    evaluation: Annotated[
        str, typer.Option(metavar="FOLDER", help="The run's evaluation folder (`evaluate.output` of its recipe).")
    ] = "eval",
    without_evaluation: Annotated[
        bool, typer.Option("--without-evaluation", help="Publish only predicted figures, no measured ones.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and the card; contact nothing and upload nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Publish a run's drafter on the Hugging Face Hub, with a model card and its evaluation, in one commit.

    The card says what the drafter is for, how to serve it with vLLM (the full command), how it was made, and what the run's
    evaluation measured: acceptance length and speedup by suite, machine and versions. Only figures from a finished evaluation
    of exactly these weights are published. To resume an interrupted upload, run the command again. Log in first with
    `hf auth login`, or set HF_TOKEN; HF_ENDPOINT selects a server other than huggingface.co.

    draftsmith publish runs/demo --repo me/smollm2-drafter --dry-run
    """
    from draftsmith.convert.publish import publish as publish_drafter
    from draftsmith.target.hub import local_directory

    published = publish_drafter(
        local_directory(place),
        repo,
        private=private,
        revision=revision,
        base_model=base_model,
        license=license,
        evaluation=None if without_evaluation else evaluation,
        dry_run=dry_run,
    )
    if as_json:
        print_json(published)
    elif dry_run:
        for name, size in published["files"].items():
            print(f"{size:>14,} bytes  {name}")
        print(f"\n{published['card']}")

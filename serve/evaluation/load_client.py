"""vLLM's own load generator, `vllm bench serve`, as a program: the `vllm` command of the CPU build does not start.

    python -m draftsmith.serve.evaluation.load_client PARENT --base-url http://127.0.0.1:8000 OPTIONS...

PARENT is the id of the process to end with. This process must lead its process group.
"""

import sys

from draftsmith.serve.server_process import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description=__doc__)
    add_cli_args(parser)
    main(parser.parse_args())

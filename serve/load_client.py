"""vLLM's own load generator, `vllm bench serve`, as a program: the CPU build's `vllm` command does not start.

python -m draftsmith.serve.load_client --base-url http://127.0.0.1:8000 OPTIONS...
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__)
    add_cli_args(parser)
    main(parser.parse_args())

"""No test is skipped everywhere: what `make test` leaves to `make soak` is in a file that the Makefile's target names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_make_soak_names_every_file_that_soaks() -> None:
    (recipe,) = re.findall(r"^soak:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    named = set(re.findall(r"tests/\S+\.py", recipe))
    assert all((ROOT / name).is_file() for name in named)
    # `make soak` builds the package of suffix decoding, without which `test_suffix.py` is skipped.
    uses = re.compile(r'^from tests\.soak import|importorskip\("arctic_inference"', re.M)
    soaking = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").glob("*/test_*.py")
        if path.parent.name != "v2" and uses.search(path.read_text())
    }
    assert len(soaking) > 5
    assert named == soaking

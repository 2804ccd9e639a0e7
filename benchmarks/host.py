"""Drafters on the host against the software that they reimplement.

    python -m benchmarks.host --only suffix --original FOLDER --output results.json
    python -m benchmarks.host --only soak

n-gram lookup has a program of its own: `python -m benchmarks.ngram --host`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import host_suffix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("suffix", "soak"), action="append")
    parser.add_argument("--original", type=Path, help="folder to import arctic_inference from")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="length of the soak")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    parts = arguments.only or ["suffix", "soak"]
    results: dict[str, Any] = {"setting": host_suffix.about("host")}
    if arguments.original:
        command = results["setting"]["command"]
        results["setting"]["command"] = command.replace(str(arguments.original), "FOLDER")
    if "suffix" in parts:
        results["suffix"] = host_suffix.run(
            arguments.original,
            smoke=arguments.smoke,
            rounds=1 if arguments.smoke else arguments.rounds,
        )
    if "soak" in parts:
        results["soak"] = host_suffix.soak(20_000 if arguments.smoke else arguments.tokens)
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

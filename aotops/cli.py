"""The command ``aotops``. A subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="aotops", description="Kernels for every framework.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_bench(commands.add_parser("bench", help="time the operators against those of others"))
    args = parser.parse_args(argv)
    args.argv = ["aotops", *(sys.argv[1:] if argv is None else argv)]
    try:
        args.run(args)
    except ImportError as error:
        sys.exit(f"aotops {args.command}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times each operator, forward and backward, against what others offer, and against a copy of as many bytes. "
        "On a GPU the time is the device's, from replays of CUDA graphs; on a CPU it is that of the call."
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds one, else cpu")
    add("--ops", type=_words, metavar="A,B", help="only these operators")
    add("--impls", type=_words, metavar="A,B", help="only these, of those installed: aotops, torch, torch.compile, "
        "quack, liger, mindspore, numpy; 'none' measures nothing, for --merge")  # fmt: skip
    add("--dtypes", type=_words, metavar="A,B", help="default: bfloat16,float32")
    add("--shapes", type=_shapes, metavar="MxN,N", help="only these, each of the operators whose shapes have as many "
        "numbers: MxNxK of products; on a GPU N alone means 2^26 elements in rows of N")  # fmt: skip
    add("--passes", type=_words, metavar="A,B", help="only these of forward, backward")
    add("--quick", action="store_true", help="few shapes and few repeats: to see that all works, not for the record")
    add("--jobs", type=int, metavar="N", help="processes that compile ahead what torch.compile and quack want compiled")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--plots", type=Path, metavar="DIR", help="draw there, one PNG an operator")
    add("--cases", type=Path, metavar="DIR", help="the rows of the operators; default: tests/cases of the checkout")
    add("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="keep the rows of these earlier results too")
    parser.set_defaults(run=_bench)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _shapes(text: str) -> list[tuple[int, ...]]:
    try:
        return [tuple(int(dim) for dim in word.split("x")) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected shapes as 8192x4096, or lengths of rows") from None


def _bench(args: argparse.Namespace) -> None:
    from .bench import work
    from .bench.run import run

    if args.cases:
        work.use(args.cases)
    run(args)

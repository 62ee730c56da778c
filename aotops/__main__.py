"""``python -m aotops``, and the command ``aotops``. It is apart from cli.py so that it can say what that needs."""

import sys


def main() -> None:
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("aotops: the commands need click, which is not installed: pip install 'aotops[tools]'")
    run(prog_name="aotops")


if __name__ == "__main__":
    main()

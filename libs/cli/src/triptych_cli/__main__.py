"""Entry point `python -m triptych_cli`, which the launcher runs."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

from triptych_cli.app import app  # noqa: E402


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app(prog_name="./triptych")


if __name__ == "__main__":
    main()

"""`python -m triptych_cli`: what the launcher runs."""

from triptych_cli.app import app


def main() -> None:
    app(prog_name="./triptych")


if __name__ == "__main__":
    main()

"""A fake service for tests of the supervisor: an HTTP server with faults that its options choose.

    python fake_service.py PORT [--exit-after-s S] [--exit-at-once CODE] [--child] [--ignore-sigterm]
                           [--never-ready] [--shared-memory NAME] [--num-lines N]

`--child`: starts a process of its own that outlives it. SIGUSR1: it answers no more, and does nothing;
SIGUSR2: it answers no more, and computes.
"""

import argparse
import signal
import subprocess
import sys
import threading
from _multiprocessing import SemLock  # type: ignore[import-not-found]
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.shared_memory import SharedMemory


class Answer(BaseHTTPRequestHandler):
    status = 200
    stalls = threading.Event()

    def do_GET(self) -> None:
        if self.stalls.is_set():
            threading.Event().wait()
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def stall(number: int, _frame: object) -> None:
    Answer.stalls.set()
    while number == signal.SIGUSR2:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--exit-after-s", type=float)
    parser.add_argument("--exit-at-once", type=int)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--shared-memory")
    parser.add_argument("--num-lines", type=int, default=0)
    args = parser.parse_args()
    for number in range(args.num_lines):
        sys.stderr.write(f"line {number}\n")
    if args.exit_at_once is not None:
        sys.stderr.write("fake service: cannot go on\n")
        sys.exit(args.exit_at_once)
    if args.child:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    memory = SharedMemory(args.shared_memory, create=True, size=4096) if args.shared_memory else None
    semaphore = SemLock(1, 1, 1, f"/{args.shared_memory}", False) if args.shared_memory else None
    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.ignore_sigterm else lambda *_: sys.exit(0))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, stall)
    Answer.status = 503 if args.never_ready else 200
    HTTPServer.allow_reuse_address = True
    server = HTTPServer(("127.0.0.1", args.port), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if args.exit_after_s is not None:
        threading.Event().wait(args.exit_after_s)
        sys.exit(3)
    while memory is None or semaphore:
        signal.pause()


if __name__ == "__main__":
    main()

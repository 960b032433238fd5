"""Processes of their own: for baselines that cannot live in one, and for versions of ours.

Lines of JSON go in and out. `serve` is the worker's end, `Worker` the other. What code prints in a
worker goes to stderr; a worker that fails says so there, and the other end raises RuntimeError.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from dsv4_prologue.measure.bench import Options, Records, Watcher, run

#: The exit status of a worker that Ctrl-C ended, as a shell would tell it.
INTERRUPTED = 130


class Worker:
    """A worker, and the lines to and from it. A context manager that ends it."""

    def __init__(self, module: str, job: Mapping[str, Any], *path: Path) -> None:
        """Run `python -m module` with these folders first on its path, and give it its job.

        It runs in the first of them, since Python looks for modules where it is run, before all.
        """
        folders = dict.fromkeys((*map(str, path), *(one for one in sys.path if one)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=path[0] if path else None,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        )
        self.tell(job)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, if it has not ended by itself."""
        self._process.terminate()
        self._process.communicate()

    def tell(self, line: Mapping[str, Any]) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it sends, until it says that it is done."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found.get("done"):
                return
            yield found
        raise self._failed()

    def ask(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line, and wait for the one that answers it."""
        self.tell(line)
        for answer in self.lines():
            return answer
        raise self._failed()

    def _failed(self) -> BaseException:
        """What became of it; Ctrl-C reaches it as well as us, and maybe sooner."""
        code = self._process.wait()
        if code == INTERRUPTED:
            return KeyboardInterrupt()
        return RuntimeError(f"a worker process ended with {code}; its stderr says why")


class Channel:
    """A worker's end of the lines."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink = source, sink

    def read(self) -> dict[str, Any] | None:
        """The next line, None where there are no more."""
        line = self._source.readline()
        return json.loads(line) if line else None

    def send(self, **line: Any) -> None:
        """Send a line."""
        self._sink.write(json.dumps(line) + "\n")
        self._sink.flush()


class _Relay(Watcher):
    """Sends what happens to the other end."""

    def __init__(self, channel: Channel, records: Records) -> None:
        self._channel, self._records, self._told = channel, records, 0.0

    def progress(self, share: float, text: str) -> None:
        """See Watcher. Ten times a second is enough."""
        if time.monotonic() - self._told > 0.1:
            self._told = time.monotonic()
            self._channel.send(progress=[share, text])

    def remark(self, text: str) -> None:
        """See Watcher."""
        self._channel.send(remark=text)

    def flush(self) -> None:
        """See Watcher. All records go each time, since the last flush completes them."""
        self._channel.send(records=self._records)


def bench_in_process(options: Options, records: Records, watcher: Watcher, *, process: int) -> None:
    """`bench.run` in a process of its own."""
    first = len(records)
    job = {"job": "bench", "options": asdict(options)}
    with Worker("dsv4_prologue.measure.worker", job) as worker:
        for line in worker.lines():
            if "progress" in line:
                watcher.progress(*line["progress"])
            elif "remark" in line:
                watcher.remark(line["remark"])
            else:
                records[first:] = [{**one, "process": process} for one in line["records"]]
                watcher.flush()


def serve(channel: Channel) -> None:
    """Do the one job that comes."""
    job = channel.read()
    assert job is not None
    if job["job"] == "bench":
        records: Records = []
        run(Options(**job["options"]), records, _Relay(channel, records))
    else:
        from dsv4_prologue.measure.versions import serve_version

        serve_version(channel, job)
    channel.send(done=True)


def main() -> None:
    """Serve on stdin and stdout; a KeyboardInterrupt is the other end's to tell of."""
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(Channel(sys.stdin, sink))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

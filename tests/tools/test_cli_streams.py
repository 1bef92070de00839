"""Output on its way: large, slow, cut off, full. On the real local backend."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shlex
import threading
import time
from pathlib import Path

import pytest

from tests.tools.command import CORRAL, LIMIT, Running, corral, install

pytestmark = pytest.mark.backend("local")

BIG = 50_000_000
PIPE = 65_536


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 50 MB in which no two places look alike."""
    path = tmp_path_factory.mktemp("big") / "bytes"
    path.write_bytes(random.Random(7).randbytes(BIG))
    return path


def digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


class Reader(threading.Thread):
    """Takes everything from a descriptor, `pause` seconds apart, `size` bytes at a time."""

    def __init__(self, fd: int, *, size: int = 1 << 20, pause: float = 0.0, delay: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._fd, self._size, self._pause, self._delay = fd, size, pause, delay
        self._chunks: list[bytes] = []
        self.start()

    def run(self) -> None:
        time.sleep(self._delay)
        while chunk := os.read(self._fd, self._size):
            self._chunks.append(chunk)
            time.sleep(self._pause)

    def data(self) -> bytes:
        self.join(LIMIT)
        assert not self.is_alive()
        return b"".join(self._chunks)


def stdout_of(running: Running) -> int:
    assert running.process.stdout is not None
    return running.process.stdout.fileno()


def stderr_of(running: Running) -> int:
    assert running.process.stderr is not None
    return running.process.stderr.fileno()


def test_fifty_megabytes_for_a_fast_reader(big: Path) -> None:
    done = corral("run", "cat", str(big))
    assert (len(done.stdout), done.stderr, done.returncode) == (BIG, b"", 0)
    assert digest(done.stdout) == digest(big.read_bytes())


def test_fifty_megabytes_for_a_slow_reader(big: Path) -> None:
    with Running("run", "cat", str(big)) as running:
        # A pipe holds 64 KiB: this takes about four seconds, for which the command does not wait.
        reader = Reader(stdout_of(running), size=PIPE, pause=0.005, delay=0.3)
        data = reader.data()
        assert running.process.wait(LIMIT) == 0
        assert running.process.stderr is not None
        assert running.process.stderr.read() == b""
        running.assert_gone()
    assert digest(data) == digest(big.read_bytes())


def test_both_outputs_at_once(big: Path) -> None:
    with Running("run", "--", f"cat {big} >&2 & head -c 20000000 {big}; wait") as running:
        out = Reader(stdout_of(running), size=PIPE, pause=0.002)
        err = Reader(stderr_of(running))
        assert digest(out.data()) == digest(big.read_bytes()[:20_000_000])
        assert digest(err.data()) == digest(big.read_bytes())
        assert running.process.wait(LIMIT) == 0


def test_a_reader_that_comes_late(big: Path) -> None:
    with Running("run", "--", f"for i in 1 2 3 4 5; do head -c 100000 {big}; sleep 0.05; done") as running:
        data = Reader(stdout_of(running), delay=1.5).data()
        assert running.process.wait(LIMIT) == 0
    assert digest(data) == digest(big.read_bytes()[:100_000] * 5)


def test_memory_stays_small_however_slow_the_reader(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with Running("run", "--", f"head -c 300000000 /dev/zero; touch {done}; sleep 1") as running:
        deadline = time.monotonic() + LIMIT
        while not done.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        resident = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1])
        data = Reader(stdout_of(running)).data()
        assert running.process.wait(LIMIT) == 0
    assert len(data) == 300_000_000
    assert resident * os.sysconf("SC_PAGE_SIZE") < 100_000_000


def test_output_that_outlasts_memory_while_the_command_goes_on(big: Path, tmp_path: Path) -> None:
    # The rest of the first burst must come while the command still runs, not only when it ends.
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Running("run", "--", f"head -c 30000000 {big}; read < {gate}; echo end") as running:
        received = bytearray()
        while len(received) < 30_000_000:
            chunk = os.read(stdout_of(running), 1 << 20)
            assert chunk
            received += chunk
        gate.write_text("go\n")
        status, rest, stderr = running.finish()
    assert (status, rest, stderr) == (0, b"end\n", b"")
    assert digest(received) == digest(big.read_bytes()[:30_000_000])


def test_output_comes_while_the_command_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Running("run", "--", f"printf first; read x < {gate}; printf $x") as running:
        running.read_until(b"first")
        gate.write_text("second\n")
        assert running.finish() == (0, b"second", b"")


def test_a_reader_that_leaves_ends_the_command() -> None:
    # `corral run -- yes | head -c 10` in a shell.
    pipeline = f'{shlex.join(CORRAL)} run -- yes | head -c 10; echo "${{PIPESTATUS[0]}}"'
    with Running("-c", pipeline, program=["bash"]) as running:
        status, stdout, stderr = running.finish()
        running.assert_gone()
    assert (status, stdout, stderr) == (0, b"y\ny\ny\ny\ny\n141\n", b"")


def test_a_reader_of_errors_that_leaves_ends_the_command() -> None:
    with Running("run", "--", "while :; do echo x >&2; sleep 0.01; done") as running:
        assert running.process.stderr is not None
        running.process.stderr.close()
        assert running.process.wait(LIMIT) == 141
        running.assert_gone()


def test_a_full_device_is_told() -> None:
    with open("/dev/full", "wb") as full, Running("run", "--", "echo x; sleep 600", stdout=full) as running:
        status, _, stderr = running.finish()
        running.assert_gone()
    assert status == 125
    assert stderr.startswith(b"corral: cannot write standard output: No space left on device; ")
    assert stderr.count(b"\n") == 1


def test_a_closed_output_is_told_and_reaches_nothing_else() -> None:
    with Running("-c", f"exec {shlex.join(CORRAL)} run -- 'echo x' >&-", program=["bash"]) as running:
        status, _, stderr = running.finish()
    assert status == 125
    assert stderr.startswith(b"corral: cannot write standard output: Bad file descriptor; ")
    # Who has nothing to say does not miss it.
    with Running("-c", f"exec {shlex.join(CORRAL)} run -- 'exit 3' >&- 2>&-", program=["bash"]) as running:
        assert running.finish() == (3, b"", b"")


def test_an_output_that_somebody_made_nonblocking(big: Path) -> None:
    ours, theirs = os.pipe()
    try:
        os.set_blocking(theirs, False)
        with Running("run", "--", f"head -c 3000000 {big}", stdout=theirs) as running:
            os.close(theirs)
            data = Reader(ours, size=PIPE, pause=0.005, delay=0.5).data()
            assert running.process.wait(LIMIT) == 0
    finally:
        os.close(ours)
    assert digest(data) == digest(big.read_bytes()[:3_000_000])


def test_our_line_begins_a_line() -> None:
    done = corral("run", "--timeout", "1s", "--", "printf prompt: >&2; sleep 600")
    assert done.stderr == b"prompt:\ncorral: timed out after 1s\n"


def lost(stderr: bytes) -> tuple[int, int]:
    """Of the one line about missing output: how many bytes, and of how many."""
    match = re.fullmatch(
        rb"corral: (\d+) bytes of stdout are missing \((\d+)-(\d+).* of (\d+)\): (.*)\n", stderr
    )
    assert match is not None, stderr
    return int(match[1]), int(match[4])


def test_output_that_was_lost_is_told_exactly(big: Path) -> None:
    """Without a directory for the spill, a reader that comes too late cannot get everything."""
    with Running("run", "cat", str(big), env={"TMPDIR": "/no/such/directory"}) as running:
        data = Reader(stdout_of(running), delay=2).data()
        status = running.process.wait(LIMIT)
        stderr = Reader(stderr_of(running)).data()
    missing, total = lost(stderr)
    assert (status, total) == (125, BIG)
    assert len(data) == BIG - missing
    assert missing > 0
    assert data[:PIPE] == big.read_bytes()[:PIPE]
    assert data[-PIPE:] == big.read_bytes()[-PIPE:]


def test_what_is_told_to_be_missing_is_exactly_what_is_missing(big: Path, tmp_path: Path) -> None:
    """A spill that holds 8 MB gives up its head while the reader is away."""
    file = tmp_path / "corral.yaml"
    file.write_text("- name: local\n  config: {max_spill_bytes: 8000000}\n")
    with Running("run", "--config", str(file), "--", f"cat {big}; sleep 0.3") as running:
        data = Reader(stdout_of(running), size=PIPE, pause=0.001, delay=1.5).data()
        assert running.process.wait(LIMIT) == 125
        stderr = Reader(stderr_of(running)).data()
    missing, total = lost(stderr)
    assert (total, len(data)) == (BIG, BIG - missing)
    assert stderr.endswith(b": its full copy reached its limit of size\n")
    assert b"and more" not in stderr
    full, expected, position = big.read_bytes(), b"", 0
    for start, last in re.findall(rb"(\d+)-(\d+)", stderr):
        expected += full[position : int(start)]
        position = int(last) + 1
    assert digest(data) == digest(expected + full[position:])


def test_a_status_of_failure_stays_when_output_was_lost(big: Path) -> None:
    env = {"TMPDIR": "/no/such/directory"}
    with Running("run", "--", f"cat {big}; exit 9", env=env) as running:
        Reader(stdout_of(running), delay=2).data()
        assert running.process.wait(LIMIT) == 9


def test_a_backend_without_a_spill(big: Path, tmp_path: Path) -> None:
    """A third party's, that knows none of our options: what fits is passed on, what does not is told."""
    source = (Path(__file__).parent / "plain_backend.py").read_text()
    env = install(tmp_path, {"plain": "plain_backend:PlainExecutor"}, {"plain_backend": source})
    done = corral("run", "--backend", "plain", "--", "echo out; echo err >&2; exit 7", env=env)
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 7)
    done = corral("run", "--backend", "plain", "--", f"cat {big}", env=env)
    missing, total = lost(done.stderr)
    assert (done.returncode, total, len(done.stdout)) == (125, BIG, BIG - missing)
    done = corral("run", "--backend", "plain", "--timeout", "300ms", "sleep", "600", env=env)
    assert (done.returncode, done.stderr) == (124, b"corral: timed out after 300ms\n")
    done = corral("run", "--backend", "plain", "--json", "--max-output", "9", "true", env=env)
    assert done.returncode == 125
    assert b"has no option max_output_bytes" in done.stdout
    done = corral("run", "--backend", "plain", "--json", "true", env=env)
    assert b'"timeout_ms": 120000' in done.stdout  # its own, since it has no option to say otherwise

"""A seeded fuzzer for the whole warden: sessions that make sense, damaged in ways that know their structure.

    python -m tests.warden.fuzz.mutate --seconds 600
    python -m tests.warden.fuzz.mutate --seed 4711            # one session again
    python -m tests.warden.fuzz.mutate --corpus DIRECTORY     # the sessions as inputs for frames_fuzzer.c

Whatever is sent, the warden must answer in well-formed frames in an order that PROTOCOL.md allows, must trip
no sanitizer, must exit with status 0 within 3 s of the end of its stream, and must leave no process and no
file. The text of commands is never damaged, and all of them are short and harmless; as root they are run by
an ordinary user besides.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from tests.warden import frames
from tests.warden.builds import Build, CannotBuildError, released, sanitized
from tests.warden.frames import BadFrameError, Frame, Task
from tests.warden.harness import Warden
from tests.warden.procs import ordinary

COMMANDS = [
    *(
        b"",
        b"true",
        b"echo x",
        b"exit 3",
        b"cat",
        b"sleep 0.01",
        b"kill -9 $$",
        b"echo e >&2; seq 20000",
        b"exec 1>&-",
    ),
    *(b"yes | head -c 300000", b"sleep 3 & exit 5", b"setsid sleep 3 & echo x", b"trap '' TERM; sleep 3"),
    *(b"kill -9 $PPID; sleep 3", b"kill -STOP $PPID; sleep 3", b"head -c 200000 /dev/zero >&2 & sleep 0.02"),
    *(b"echo long #" + b"x" * size for size in (131_060, 131_061, 150_000)),
]
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0xFFFF,
    0x10000,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 30,
    8 << 20,
]


class Piece:
    """One frame on its way. The bytes from `fixed` on are a command's text and stay as they are."""

    def __init__(self, data: bytes, fixed: int | None = None) -> None:
        self.data = bytearray(data)
        self.fixed = len(data) if fixed is None else fixed


Damage: TypeAlias = Callable[[random.Random, list[Piece]], None]


def greeting(dice: random.Random) -> Piece:
    return Piece(
        frames.hello(
            ring=dice.choice([1, 100, 4096, 64_000, 1 << 20]),
            spill_cap=dice.choice([0, 1, 5000, 100_000, 1 << 30]),
            spill_total=dice.choice([0, 100_000, 1 << 32]),
            lease_ms=dice.choice([0, 0, 0, 2000]),
            env=dice.choice([b"", b"A=1\0", b"A=1\0B=\0A=2\0"]),
        )
    )


def command(dice: random.Random, task: int) -> list[Piece]:
    text = dice.choice(COMMANDS)
    stdin = dice.choice([None, None, b"", b"some input\n", bytes(100_000)])
    cut = dice.choice([len(text), len(text), 0, len(text) // 2])
    credit = dice.choice([0, 10, 64_000, 1 << 40])
    env = dice.choice([b"", b"", b"C=3\0D=4\0"])
    size = None if stdin is None else len(stdin)
    first = frames.start(
        task, text[:cut], size=len(text), stdin_size=size, credit=credit, env=env, workdir="/tmp"
    )
    found = [Piece(first, len(first) - cut)]
    if cut < len(text):
        found.append(Piece(frames.frame(frames.TEXT, text[cut:], task=task), 12))
    if stdin:
        found.append(Piece(frames.frame(frames.STDIN, stdin[:50], task=task)))
        found.append(Piece(frames.frame(frames.STDIN, stdin[50:], task=task)))
    return found


def session(dice: random.Random) -> list[Piece]:
    """A sequence of frames that a well-behaved host could send."""
    found = [greeting(dice)]
    for task in range(1, dice.randint(2, 8)):
        found += command(dice, task)
        for _ in range(dice.randint(0, 3)):
            about = dice.randint(1, task)
            found.append(
                Piece(
                    dice.choice(
                        [
                            frames.kill(about, dice.choice([0, 10, 500])),
                            frames.forget(about),
                            frames.ping(dice.getrandbits(64)),
                            frames.fetch(
                                100 + len(found), "/etc/passwd", credit=dice.choice([0, 100, 1 << 30])
                            ),
                            frames.credit(100 + dice.randint(0, len(found)), 1, dice.choice(NUMBERS)),
                        ]
                    )
                )
            )
    if dice.random() < 0.3:
        found.append(Piece(frames.shutdown(dice.choice([0, 100]))))
    return found


# --- damage


def flip_bits(dice: random.Random, pieces: list[Piece]) -> None:
    piece = dice.choice(pieces)
    for _ in range(dice.randint(1, 4)):
        piece.data[dice.randrange(piece.fixed)] ^= 1 << dice.randrange(8)


def lie_about_a_length(dice: random.Random, pieces: list[Piece]) -> None:
    piece = dice.choice(pieces)
    (length,) = struct.unpack_from("<I", piece.data)
    lie = dice.choice([length + 1, length - 1, 0, length * 2, *NUMBERS]) & 0xFFFFFFFF
    struct.pack_into("<I", piece.data, 0, lie)


def put_a_number(dice: random.Random, pieces: list[Piece]) -> None:
    piece = dice.choice(pieces)
    width, layout = dice.choice([(1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")])
    if piece.fixed > width:
        number = dice.choice(NUMBERS) & ((1 << 8 * width) - 1)
        struct.pack_into(layout, piece.data, dice.randrange(piece.fixed - width), number)


def change_the_type(dice: random.Random, pieces: list[Piece]) -> None:
    dice.choice(pieces).data[4] = dice.choice([*frames.FROM_HOST, 0, 0x0B, 0x81, dice.randrange(256)])


def change_the_task(dice: random.Random, pieces: list[Piece]) -> None:
    struct.pack_into("<I", dice.choice(pieces).data, 8, dice.choice([0, 1, 2, 3, 0xFFFFFFFF]))


def truncate(dice: random.Random, pieces: list[Piece]) -> None:
    piece = dice.choice(pieces)
    del piece.data[dice.randrange(len(piece.data)) :]
    piece.fixed = min(piece.fixed, len(piece.data))
    if not piece.data:
        pieces.remove(piece)


def duplicate(dice: random.Random, pieces: list[Piece]) -> None:
    piece = dice.choice(pieces)
    pieces.insert(dice.randint(0, len(pieces)), Piece(bytes(piece.data), piece.fixed))


def drop(dice: random.Random, pieces: list[Piece]) -> None:
    del pieces[dice.randrange(len(pieces))]


def swap(dice: random.Random, pieces: list[Piece]) -> None:
    one, other = dice.randrange(len(pieces)), dice.randrange(len(pieces))
    pieces[one], pieces[other] = pieces[other], pieces[one]


def insert_garbage(dice: random.Random, pieces: list[Piece]) -> None:
    size = dice.choice([1, 4, 12, 40, 1000, 100_000])
    garbage = dice.randbytes(size) if dice.random() < 0.5 else bytes(size)
    pieces.insert(dice.randint(0, len(pieces)), Piece(garbage))


def insert_a_random_frame(dice: random.Random, pieces: list[Piece]) -> None:
    kind = dice.choice([kind for kind in frames.FROM_HOST if kind not in (frames.START, frames.TEXT)])
    payload = dice.randbytes(dice.choice([0, 4, 8, 20]))
    flags = dice.choice([0, 1, 2])
    frame = frames.frame(kind, payload, task=dice.randint(0, 4), flags=flags)
    pieces.insert(dice.randint(0, len(pieces)), Piece(frame))


def reorder(dice: random.Random, pieces: list[Piece]) -> None:
    rest = pieces[1:]
    dice.shuffle(rest)
    pieces[1:] = rest


DAMAGES: list[Damage] = [
    *(
        flip_bits,
        lie_about_a_length,
        put_a_number,
        change_the_type,
        change_the_task,
        truncate,
        duplicate,
        drop,
        swap,
    ),
    *(insert_garbage, insert_a_random_frame, reorder),
]


def make(seed: int) -> tuple[random.Random, list[Piece]]:
    """The frames of a seed, damaged. The dice go on from there, for how they are sent."""
    dice = random.Random(seed)
    pieces = session(dice)
    for _ in range(dice.choice([0, 1, 1, 1, 2, 3, 5])):
        if pieces:
            dice.choice(DAMAGES)(dice, pieces)
    return dice, pieces


# --- the oracle


class Suspect(Warden):
    """Takes frames for tasks that it did not start itself, since damage may have changed their numbers."""

    def _take(self, frame: Frame) -> None:
        if frame.kind in (frames.READY, frames.PONG, frames.BYE) or frame.task == 0:
            super()._take(frame)
            return
        known = self.tasks.get(frame.task)
        if known is None or known.over:  # a number that was used again
            is_fetch = frame.kind in (frames.DATA, frames.END)
            offset = int.from_bytes(frame.payload[:8], "little") if is_fetch else 0
            known = self.tasks[frame.task] = Task(frame.task, 0, is_fetch, offset)
        known.take(frame)


def run(build: Build, seed: int) -> None:
    """One session. `AssertionError` or `BadFrameError` when the warden did not stand it."""
    dice, pieces = make(seed)
    data = b"".join(bytes(piece.data) for piece in pieces)
    with Suspect(build, account=ordinary()) as warden:
        at = 0
        try:
            while at < len(data) and not warden.eof:
                size = dice.choice([1, 11, 12, 100, 4096, 100_000, len(data)])
                warden.write(data[at : at + size])
                at += size
                warden.listen(dice.choice([0, 0, 0, 0.001, 0.01]))
        except BrokenPipeError:
            pass  # it has ended the session
        warden.listen(dice.choice([0, 0.01, 0.05]))
        ending = dice.choice(["hang up", "half-close", "shutdown"])
        try:
            if ending == "half-close":
                warden.end_of_input()
            elif ending == "shutdown":
                warden.write(frames.shutdown(0))
        except (BrokenPipeError, OSError):
            pass
        if ending == "half-close":
            warden.wait_eof()


def corpus(where: Path, count: int) -> None:
    """Inputs for frames_fuzzer.c: its step 2 passes bytes on, 3 to 7 let keepers, deaths and time go on."""
    where.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        dice, pieces = make(seed)
        steps = bytearray()
        for piece in pieces:
            data = bytes(piece.data[:16_000])
            for at in range(0, len(data), 16_320):
                part = data[at : at + 16_320]
                whole, rest = divmod(len(part), 64)
                if whole:
                    steps += bytes([2 | 8, whole]) + part[: whole * 64]
                if rest:
                    steps += bytes([2, rest]) + part[whole * 64 :]
            for _ in range(dice.randint(0, 4)):
                steps += bytes(
                    [dice.choice([3, 4, 5, 5, 6, 7]) | dice.randrange(32) << 3, dice.randrange(256), 0]
                )
        (where / f"seed-{seed:05}").write_bytes(steps)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the warden with damaged sessions.")
    parser.add_argument("--seconds", type=float, default=60, help="how long")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument(
        "--released", action="store_true", help="the released build, not the one with sanitizers"
    )
    parser.add_argument("--corpus", type=Path, help="write inputs for frames_fuzzer there, and run nothing")
    options = parser.parse_args()
    if options.corpus:
        corpus(options.corpus, 400)
        return 0
    try:
        build = released() if options.released else sanitized()
    except CannotBuildError as error:
        sys.exit(f"cannot build: {error}")
    deadline, failed, seed = time.monotonic() + options.seconds, 0, options.first
    seeds = [options.seed] if options.seed is not None else None
    while seeds or (seeds is None and time.monotonic() < deadline):
        number = seeds.pop() if seeds else seed
        try:
            run(build, number)
        except (AssertionError, BadFrameError) as error:
            failed += 1
            print(f"seed {number}: {error!r}\n{getattr(error, '__notes__', '')}", flush=True)
        seed += 1
    print(f"{seed - options.first} sessions, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

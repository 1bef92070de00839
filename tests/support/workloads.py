"""Process trees that must be ended completely: pipelines, daemons, stopped processes, fork storms.

Each is bash text that starts its processes, has each of them leave a mark on the lifeline once it is what
it is meant to be, prints READY, and then stays. `Workload.script` puts the prologue of a lifeline in front.
Where the point of a workload is a shell that exits, an inner shell does so while the leader stays, because
leftovers of a leader that has exited are not killed by its timeout; `leftovers` is the same with the leader
gone.

Everything ends by itself within 20 s, fork storms within 12 s. The one exception are stopped processes,
which do not notice the time; the supervisor kills those.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.storm import storm_program

if TYPE_CHECKING:
    from tests.support.lifeline import Lifeline

__all__ = ["WORKLOADS", "Workload", "leftovers"]

# A process of its own program that marks and stays, for where the shell function `n` is out of reach.
STAY = shlex.quote("printf m >&9; exec sleep 20")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    text: str
    """Bash text; `{storm}` stands for the storm program. Ends without waiting."""
    marks: int
    """How many marks come from the processes that `text` starts."""
    alive: int
    """How many processes of it are alive at any time at least, without the leader."""
    escapes_group: bool
    """Whether some of it leaves the process group of the leader."""
    moves: bool = False
    """A fork chain: its pids are gone before a list of them can be read, so only the lifeline counts."""
    needs: tuple[str, ...] = ()
    """Programs it calls beyond bash and coreutils; `cc` for the storm program."""
    stay: str = "wait"
    """How the leader stays: `wait` for its jobs, or something else where they are not its own."""

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        for program in self.needs:
            if program == "cc":
                if storm_program() is None:
                    return "no C compiler for the storm program"
            elif shutil.which(program) is None:
                return f"no {program} here"
        return None

    def script(self, line: Lifeline, *, ending: str | None = None) -> str:
        """The whole command. `ending` replaces the way the leader stays."""
        text = self.text.replace("{storm}", shlex.quote(str(storm_program())) if "cc" in self.needs else "")
        return f"{line.prologue}{text}\necho READY\nprintf m >&9\n{ending or self.stay}\n"

    @property
    def all_marks(self) -> int:
        """Marks of the processes and of the leader."""
        return self.marks + 1


SLEEP = "sleep 20"

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        name="pipeline",
        text="n sleep 20 | n sleep 20 | n cat &",
        marks=3,
        alive=3,
        escapes_group=False,
    ),
    Workload(
        name="nested-subshells",
        text="( ( ( n sleep 20 & n sleep 20 & wait ) & wait ) & )\n( n sleep 20 & )",
        marks=3,
        alive=3,
        escapes_group=False,
        stay=SLEEP,
    ),
    Workload(
        name="background-then-exit",
        text="( n sleep 20 & n sleep 20 & exit 0 )",
        marks=2,
        alive=2,
        escapes_group=False,
        stay=SLEEP,
    ),
    Workload(
        name="nohup-disown",
        text=f"( nohup bash -c {STAY} >/dev/null 2>&1 & disown; exit 0 )",
        marks=1,
        alive=1,
        escapes_group=False,
        needs=("nohup",),
        stay=SLEEP,
    ),
    Workload(
        name="job-control",
        text="set -m\nn sleep 20 &\nn sleep 20 &",
        marks=2,
        alive=2,
        escapes_group=True,
    ),
    Workload(
        name="setsid",
        text=f"setsid bash -c {STAY} &\nn sleep 20 &",
        marks=2,
        alive=2,
        escapes_group=True,
        needs=("setsid",),
    ),
    Workload(
        name="setsid-double-fork",
        text="\n".join(["setsid -f bash -c '(printf m >&9; exec sleep 20) & exit 0'"] * 2),
        marks=2,
        alive=2,
        escapes_group=True,
        needs=("setsid",),
        stay=SLEEP,
    ),
    Workload(
        name="ignores-signals",
        text="trap '' TERM INT HUP\nn sleep 20 &\nn sleep 20 &",
        marks=2,
        alive=2,
        escapes_group=False,
    ),
    Workload(
        name="env-i-setsid",
        text="\n".join([f"env -i setsid -f bash -c {STAY}"] * 2),
        marks=2,
        alive=2,
        escapes_group=True,
        needs=("setsid",),
        stay=SLEEP,
    ),
    Workload(
        name="stopped",
        # The leader waits until /proc says that each of them is stopped, and marks for them.
        text="""\
n sleep 20 & a=$!
coproc B { exec setsid bash -c 'echo $$; printf m >&9; exec sleep 20'; }
read -r -u "${B[0]}" b
for p in "$a" "$b"; do
    until [[ $(</proc/$p/comm) == sleep ]]; do sleep 0.002; done
    kill -STOP "$p"
    until read -r _ _ state _ </proc/$p/stat && [[ $state == T ]]; do sleep 0.002; done
done""",
        marks=2,
        alive=2,
        escapes_group=True,
        needs=("setsid",),
        stay=SLEEP,
    ),
    Workload(
        name="stopped-leader",
        text="n sleep 20 &",
        marks=1,
        alive=1,
        escapes_group=False,
        stay="kill -STOP $$\nwait",
    ),
    Workload(
        name="zombie",
        # `exec` puts a program that never waits where the shell was; the child ends only then, and stays a
        # zombie.
        text="""\
coproc P {
    p=$BASHPID
    { until [[ $(</proc/$p/comm) == sleep ]]; do sleep 0.002; done; } & echo $!
    printf m >&9
    exec sleep 20
}
read -r -u "${P[0]}" p
until read -r _ _ state _ </proc/$p/stat && [[ $state == Z ]]; do sleep 0.002; done""",
        marks=1,
        alive=1,
        escapes_group=False,
    ),
    Workload(
        name="fork-chain",
        text="{storm} chain 8 12 same",
        marks=8,
        alive=8,
        escapes_group=False,
        moves=True,
        needs=("cc",),
        stay=SLEEP,
    ),
    Workload(
        name="fork-chain-setsid",
        text="{storm} chain 4 12 setsid",
        marks=4,
        alive=4,
        escapes_group=True,
        moves=True,
        needs=("cc",),
        stay=SLEEP,
    ),
    Workload(
        name="fork-chain-setsid-wide",
        text="{storm} chain 32 12 setsid",
        marks=32,
        alive=32,
        escapes_group=True,
        moves=True,
        needs=("cc",),
        stay=SLEEP,
    ),
    Workload(
        name="hydra",
        text="{storm} hydra 16 12",
        marks=32,
        alive=32,
        escapes_group=True,
        needs=("cc",),
        stay=SLEEP,
    ),
    Workload(
        name="headless-threads",
        text="{storm} headless 2 12",
        marks=4,
        alive=2,
        escapes_group=True,
        needs=("cc",),
        stay=SLEEP,
    ),
    Workload(
        name="fork-chain-setsid-env-i",
        text="env -i {storm} chain 4 12 setsid",
        marks=4,
        alive=4,
        escapes_group=True,
        moves=True,
        needs=("cc",),
        stay=SLEEP,
    ),
)


def leftovers(workload: Workload, line: Lifeline) -> str:
    """The workload with a leader that exits with status 7 and leaves everything behind."""
    return workload.script(line, ending="exit 7")

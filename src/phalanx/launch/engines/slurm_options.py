"""Checks of a Slurm job before sbatch: a user's own options, and the limits of accounts and QOS.

Options come from a run file or from the environment. They are read as sbatch reads them, and refused where they contradict the launcher. A
line of a batch script is words as of a shell, read by getopt_long: letters may be joined (``-HN9`` holds a job of nine nodes), values may
follow at once, after a space or after ``=``, and any beginning of a name will do that no other name has. Variables such as
``SBATCH_PARTITION`` overrule what stands in a script (man sbatch, "INPUT ENVIRONMENT VARIABLES"), so they would silently overrule the run
file: those that a field of ``[launch]`` stands for fill it where it is empty; those that contradict the launcher are refused; neither
reaches sbatch. The tables are those of Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.launch.engines.order import EngineError, LaunchOrder, run_tool, seconds_of, slurm_time
from phalanx.run.spec import LaunchSpec

FIELDS = {"time": "time_limit"} | {
    name: name for name in ("account", "constraint", "exclude", "partition", "qos", "reservation")
}
"""Options -> the fields of ``[launch]`` that stand for them."""
_ALIKE = (
    "a heterogeneous job is several groups of nodes with a step of its own each, and a run is one fleet of equal nodes: its ranks would wait for the "
    'slowest. Partitions of which any will do are launch.partition = "big,small"; nodes of another kind can join by phalanx fleet grow'
)
_ONE_AGENT = "every node runs one agent, which starts the workers: fleet.workers_per_node"
_GPUS = "launch.gpus_per_node sets the GPUs of each node; of one type: launch.constraint"
_OWN_LOG = "the job's log is in the run directory, where phalanx logs reads it"
_HERE = (
    "the job is looked for, and ended, in the cluster of this machine: give the command on a login node of the other one, or set "
    "SLURM_CONF or SLURM_CLUSTERS to it"
)
_NO_JOB = "sbatch would submit nothing, or not return: phalanx submit --dry-run shows the script, phalanx status follows the job"
_OWN = "the job shows up among your own, where phalanx runs list and phalanx cancel look for it"
REFUSED = {
    "array": "a run is one job: an array would start it several times. For seeds or sweeps submit one run file for each",
    "chdir": "the job runs where it was submitted: relative paths of the run file begin there",
    "cluster-constraint": _HERE,
    "clusters": _HERE,
    "comment": "the job's comment names the run directory",
    "container-image": "launch.container_image: the agents run in it, the script does not",
    "error": _OWN_LOG,
    "exclusive": "launch.exclusive decides whether nodes are shared",
    "gid": _OWN,
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": _GPUS,
    "help": _NO_JOB,
    "het-group": _ALIKE,
    "hetjob": _ALIKE,
    "no-kill": "the job sets it: a lost node never ends the others",
    "no-requeue": "the job queues itself again after its time limit; leave it out",
    "nodes": "give --nodes to phalanx submit, or fleet.nodes",
    "ntasks": _ONE_AGENT,
    "ntasks-per-core": _ONE_AGENT,
    "ntasks-per-gpu": _ONE_AGENT,
    "ntasks-per-node": _ONE_AGENT,
    "ntasks-per-socket": _ONE_AGENT,
    "open-mode": "the log of a run that queues itself again holds all of its starts",
    "output": _OWN_LOG,
    "oversubscribe": "launch.exclusive decides whether nodes are shared",
    "packjob": _ALIKE,
    "signal": "launch.grace_s sets when the run saves",
    "test-only": _NO_JOB,
    "uid": _OWN,
    "usage": _NO_JOB,
    "version": _NO_JOB,
    "wait": _NO_JOB,
    "wrap": "the script is Phalanx's; lines of your own before the agents start are launch.prologue",
    **{option: f"launch.{field}" for option, field in FIELDS.items()},
    "partition": "launch.partition, several as big,small: the job starts in the first that can",
    "time": "launch.time_limit, of which it is known when the run saves",
}
"""Options that contradict what the launcher decides -> what decides it."""


def _words(*lines: str) -> list[str]:
    return " ".join(lines).split()


LETTERS = dict(
    pair.split("=")
    for pair in _words(
        "A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error F=nodefile G=gpus H=hold h=help i=input",
        "J=job-name k=no-kill L=licenses M=clusters m=distribution N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos S=core-spec",
        "s=oversubscribe t=time V=version v=verbose W=wait w=nodelist x=exclude",
    )
)
"""Letters of options -> their names."""
WITHOUT_VALUE = frozenset(
    _words(
        "contiguous help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot requeue spread-job test-only usage use-min-nodes",
        "verbose version wait",
    )
)
VALUE_AT_ONCE = frozenset(_words("exclusive export get-user-env nice no-kill propagate"))
"""Options whose value may be missing, so that no other word is one."""
WITH_VALUE = (
    frozenset(
        _words(
            "acctg-freq batch bb bbf begin container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot",
            "dependency distribution export-file extra extra-node-info gpu-bind gpu-freq gres gres-flags hint input job-name kill-on-invalid-dep",
            "licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist ntasks-per-tres power",
            "prefer priority profile resv-ports segment sockets-per-node stepmgr switches thread-spec threads-per-core time-min tmp tres-bind",
            "tres-per-task wait-all-nodes wckey x11",
        )
    )
    | REFUSED.keys()
) - {"hetjob", "packjob", *WITHOUT_VALUE, *VALUE_AT_ONCE}
_NAMES = WITH_VALUE | VALUE_AT_ONCE | WITHOUT_VALUE
_NAMED_OTHERWISE = {"array": "ARRAY_INX", "time": "TIMELIMIT"}
VARIABLES = {
    f"SBATCH_{_NAMED_OTHERWISE.get(option, option.upper().replace('-', '_'))}": option
    for option in _words(
        "account array clusters cluster-constraint constraint error exclusive gpus gpus-per-node gpus-per-socket gpus-per-task no-kill no-requeue",
        "open-mode output partition qos reservation signal time wait",
    )
}
"""Variables that sbatch reads -> the options that they stand for, of those that contradict the launcher."""


def options_in(line: str) -> Iterator[str]:
    """Yield the full names of the options in a line as sbatch reads it, without their values.

    An ambiguous abbreviation yields all its meanings, an unknown option nothing or "". Raises ``EngineError`` for a
    quote without an end.
    """
    try:
        words = iter(list(_words_in(line)))
    except ValueError as error:
        raise EngineError(f"launch.options: {line!r}: a quote in it has no end") from error
    for word in words:
        if word in ("hetjob", "packjob"):
            yield word
        elif word.startswith("--"):
            name, sign, _ = word[2:].partition("=")
            full = (
                [name]
                if name in _NAMES
                else [option_name for option_name in sorted(_NAMES) if option_name.startswith(name)]
            )
            yield from full
            if not sign and len(full) == 1 and full[0] in WITH_VALUE:
                next(words, None)
        elif word.startswith("-"):
            for place, letter in enumerate(word[1:], 2):
                option = LETTERS.get(letter, "")
                yield option
                if option in VALUE_AT_ONCE:
                    break
                if option in WITH_VALUE:
                    if place == len(word):
                        next(words, None)
                    break


def _words_in(line: str) -> shlex.shlex:
    """Words as sbatch's own reader of scripts splits them: also between single quotes a backslash takes the meaning from the next letter."""
    words = shlex.shlex(line, posix=True)
    words.whitespace_split, words.whitespace, words.escapedquotes = True, " \t\n\v\f\r", "\"'"
    return words


def refuse(line: str) -> None:
    """Raise ``EngineError`` if a line has a line break, does not begin with "-", or has an option that contradicts
    the launcher.

    Unknown names are left to sbatch.
    """
    if "\n" in line:
        raise EngineError(f"launch.options: {line!r} is no option of sbatch, as --licenses=lustre is")
    for option in options_in(line):
        if option in REFUSED:
            raise EngineError(f"launch.options: {line}: {REFUSED[option]}")
    if not line.startswith("-"):
        raise EngineError(f"launch.options: {line!r} is no option of sbatch, as --licenses=lustre is")


def from_environment(launch: LaunchSpec, environ: Mapping[str, str]) -> tuple[LaunchSpec, list[str]]:
    """Return ``launch`` with its empty fields filled from the variables of sbatch, and a line about each of these
    variables.

    A field that the run file sets wins. Raises ``EngineError``, naming all of them, for variables that contradict
    the launcher.
    """
    lines, wrong = [], []
    for variable, option in VARIABLES.items():
        value, field = environ.get(variable, ""), FIELDS.get(option)
        if variable in environ and field is None:
            wrong.append(f"{variable}={value} in the environment: {REFUSED[option]}")
        elif value and field is not None:
            own = str(getattr(launch, field))
            if not own and not value.isprintable():
                wrong.append(f"{variable}={value!a} in the environment: no value of launch.{field}")
            elif not own:
                filled: dict[str, Any] = {field: value}
                launch = replace(launch, **filled)
            lines.append(
                f"launch.{field} = {own or value}"
                + (f", and not {variable}={value}" if own else f", from {variable}")
            )
    if "," in (several := environ.get("SLURM_CLUSTERS", "")) or several == "all":
        wrong.append(f"SLURM_CLUSTERS={several} in the environment: {_HERE}, and to one alone")
    if wrong:
        raise EngineError("sbatch would take these before the run file; unset them:\n  " + "\n  ".join(wrong))
    return launch, lines


def without_overrulers(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that sbatch would take before what stands in the script."""
    return {name: value for name, value in environ.items() if name not in VARIABLES}


# Limits of accounts and QOS that would keep a job waiting for ever: sbatch queues such a job without an error.
#
# The limits of the user's association, of its account, of all parent accounts and of the QOS apply to a job
# (https://slurm.schedmd.com/resource_limits.html). Only a request above a full limit is a problem. If others use up a limit,
# the job waits, and ``phalanx status`` shows its reason.

_MOST_PARENTS = 32
"""Accounts above one another that are followed: a damaged table may name a circle."""


@dataclass(frozen=True)
class Limit:
    """The most that one job may have under an association or a QOS; ``None`` for no limit."""

    whose: str
    """As in "the account train"."""
    remedy: str
    """The option by which one comes under another."""
    nodes: int | None = None
    gpus: int | None = None
    wall_s: float | None = None


def limits_of(order: LaunchOrder, run: Callable[[Sequence[str]], str] = run_tool) -> list[Limit]:
    """Return the limits that apply to the job of ``order``: of the user, the account and its parents, and the QOS.

    Empty where Slurm enforces none or keeps no accounts. ``run`` runs a tool. Raises ``EngineError`` if the
    accounts cannot be read.
    """
    lines = (line.split("=", 1) for line in run(["scontrol", "show", "config"]).splitlines() if "=" in line)
    settings = {name.strip(): value.strip() for name, value in lines}
    if "limits" not in settings.get("AccountingStorageEnforce", "").lower():
        return []
    ask = ["sacctmgr", "-n", "-P", "show"]
    user, launch = getpass.getuser(), order.launch
    account = launch.account or run([*ask, "user", user, "format=DefaultAccount"]).strip()
    limits: list[Limit] = []
    qos, seen = launch.qos, set[str]()
    while account and account not in seen and len(seen) < _MOST_PARENTS:
        seen.add(account)
        columns = "format=User,ParentName,GrpTRES,MaxTRES,MaxWall,DefaultQOS"
        where = ["where", f"account={account}", f"cluster={settings.get('ClusterName', '')}"]
        rows = [line.split("|") for line in run([*ask, "assoc", *where, columns]).splitlines()]
        mine = [row for row in rows if len(row) == 6 and row[0] in ("", user)]
        for row in mine:
            whose = f"the account {account}" if not row[0] else f"the user {user} in the account {account}"
            limits.append(_limit(whose, "--account", row[2:5]))
            qos = qos or row[5]
        account = next((row[1] for row in mine if not row[0]), "")
    if qos:
        table = run([*ask, "qos", qos, "format=GrpTRES,MaxTRES,MaxTRESPU,MaxWall"])
        limits += [_limit(f"the QOS {qos}", "--qos", line.split("|")) for line in table.splitlines()]
    return limits


def limit_problems(order: LaunchOrder, limits: Sequence[Limit]) -> Iterator[str]:
    """Yield one line for each limit that the job of ``order`` exceeds, with the remedy: nodes, time, and GPUs if
    the nodes are within it.

    Raises ``EngineError`` for a malformed time limit.
    """
    gpus = order.all_nodes * order.gpus_per_node
    wall_s = seconds_of(order.launch.time_limit) if order.launch.time_limit else None
    for limit in limits:
        if limit.nodes is not None and order.all_nodes > limit.nodes:
            yield (
                f"fleet.nodes + fleet.spares = {order.all_nodes}: {limit.whose} may have {limit.nodes} nodes: "
                f"--nodes, --spares or another {limit.remedy}"
            )
        elif limit.gpus is not None and gpus > limit.gpus:
            yield (
                f"launch.gpus_per_node: {gpus} GPUs are requested, and {limit.whose} may have {limit.gpus}: "
                f"--nodes, --spares or another {limit.remedy}"
            )
        if limit.wall_s is not None and wall_s is not None and wall_s > limit.wall_s:
            yield (
                f"launch.time_limit: {order.launch.time_limit} is more than {limit.whose} may take ({slurm_time(limit.wall_s)}): --time; "
                "the run queues itself again when its time is up"
            )


def _limit(whose: str, remedy: str, cells: Sequence[str]) -> Limit:
    """A limit from sacctmgr's cells: tables of TRES, and last the wall time. The tightest table decides."""
    *tables, wall = cells
    tres = [dict(part.split("=", 1) for part in table.split(",") if "=" in part) for table in tables]
    return Limit(whose, remedy, _least(tres, "node"), _least(tres, "gres/gpu"), _wall_s(wall))


def _least(tables: Sequence[Mapping[str, str]], name: str) -> int | None:
    values = [int(table[name]) for table in tables if table.get(name, "").isdecimal()]
    return min(values, default=None)


def _wall_s(text: str) -> float | None:
    try:
        return seconds_of(text) if text.strip() else None
    except EngineError:  # a keyword of a newer Slurm, which sbatch will check
        return None
